"""A run of the demo on the real broker and engine: its log says what every request was."""

import asyncio
import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from shop_desk.environment import TURNS_MAX, ShopDesk
from shop_desk.shop import Order, order_of
from shop_desk.tasks import task

from forgemq_agents.completion import Completion
from forgemq_agents.errors import ContextFullError
from forgemq_agents.tool_loop import run_tool_loop
from forgemq_launcher.dispatch import run_tool
from forgemq_rendering import Rendering, chat_message
from forgemq_run_view.sent_requests import SentRequest
from tests.integration.launched_run import DEMO, ROOT, LaunchedRun
from tests.unit.gateway.played import canonical

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, GROUP_SIZE = 8, 8
"""Of the one step; many of the episodes take notes."""


class Recorded:
    """The policy of an episode as the log has it; checks that it is asked what the log says."""

    context_tokens_max = 372

    def __init__(self, requests: list[SentRequest], rendering: Rendering) -> None:
        self._left = list(requests)
        self._rendering = rendering
        self.cuts = 0

    async def chat(self, messages, *, tools=(), cuts=()) -> Completion:
        if not self._left:  # The gateway refused what followed, or training ended.
            raise ContextFullError("full", status=400, code="context_length_exceeded")
        request = self._left.pop(0)
        assert canonical(messages) == canonical(request.messages)
        assert list(tools) == list(request.tools)
        assert tuple(cuts) == request.cuts
        self.cuts += len(cuts)
        parsed = self._rendering.parse(
            request.output, completion_id=request.completion_id, tools=tools
        )
        stopped = request.output[-1] in self._rendering.stop_token_ids
        return Completion(
            id=f"chatcmpl-{request.completion_id}",
            message=chat_message(parsed),
            finish_reason="stop" if stopped else "length",
        )

    def truncate(self, cause) -> None:
        assert cause


def printed(environ: dict[str, str], *arguments: str) -> str:
    """What `forgemq ARGUMENTS` prints; it must succeed."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    assert run_tool(list(arguments), environ=environ, console=console) == 0, out.getvalue()
    return out.getvalue()


def requests_of(environ: dict[str, str], run: str, group: str) -> dict[str, list[SentRequest]]:
    """The requests of a group's episodes, as `forgemq inspect --requests` prints them."""
    found: dict[str, list[SentRequest]] = {}
    for line in printed(environ, "inspect", run, group, "--requests").splitlines():
        request = msgspec.json.decode(line, type=SentRequest)
        found.setdefault(request.episode_id, []).append(request)
    return found


def orders() -> dict[str, Order]:
    """The run's tasks by their question."""
    found = [order_of(task(0, "shop_desk", k)) for k in range(200)]
    return {order.question: order for order in found}


async def replay(requests: list[SentRequest], order: Order, rendering: Rendering) -> int:
    """Play an episode again with what its policy said; the number of its cuts."""
    policy = Recorded(requests, rendering)
    await run_tool_loop(policy, ShopDesk(order), turns_max=TURNS_MAX)
    assert policy._left == []
    return policy.cuts


def test_every_request_of_a_run_is_rebuilt_from_its_log_cuts_included(
    kafka_bootstrap: str, base_engine_url: str, new_run_id, tmp_path: Path
) -> None:
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run_id = new_run_id()
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(DEMO, f"run={run_id}", "trainer.steps=1", "evaluation.tasks=0")
        assert run.wait_for_end(within_s=600) == 0, run.story()
    finally:
        run.close()
    looking = {**environ, "FORGEMQ_LAUNCHER_RUNS": str(run.runs)}
    rows = printed(looking, "inspect", run_id).splitlines()
    groups = [row.split()[0] for row in rows if " trained " in row]
    assert len(groups) == GROUPS
    rendering = Rendering.load(str(ROOT / "deploy/demo/model"))
    known, cuts, episodes = orders(), 0, 0
    for group in groups:
        for requests in requests_of(looking, run_id, group).values():
            question = requests[0].messages[0]["content"]
            cuts += asyncio.run(replay(requests, known[question], rendering))
            episodes += 1
            for each in requests:
                if not any(message["role"] == "assistant" for message in each.messages):
                    # A path from its start: rendered whole from its messages.
                    rendered = rendering.render(each.messages, tools=each.tools)
                    assert list(each.context) == rendered.ids
    assert episodes >= GROUPS * GROUP_SIZE
    assert cuts > 0
