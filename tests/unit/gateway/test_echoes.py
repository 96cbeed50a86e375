"""How clients send replies back, and what that leaves of the sampled tokens."""

from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from tests.unit.gateway.scripted_lane import Script, contexts_of, wall_ms
from tests.unit.gateway.world import configuration_of, running

HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "shoes"}}\n</tool_call>'


async def conversation(
    model: Path, script: Script, *bodies: Any
) -> tuple[list[Any], list[FinishedCompletion], FinishedEpisode]:
    """Replies, completions and the end of an episode of these requests.

    A body may be a function of the reply before it.
    """
    replies: list[Any] = []
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), script) as (world, _):
        claim = await world.episode()
        client = world.client(claim)
        for body in bodies:
            given = body(replies[-1].choices[0].message) if callable(body) else body
            replies.append(await client.chat.completions.create(model="m", **given))
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        finished = await world.records(topics.FINISHED_COMPLETIONS)
        ended = await world.records(topics.FINISHED_EPISODES)
    return replies, finished, ended[0]


def extends(finished: list[FinishedCompletion]) -> bool:
    """Whether the last completion's context begins with all tokens of the first."""
    whole = contexts_of(finished)
    first, last = whole[finished[0].request_id], whole[finished[-1].request_id]
    return last[: len(first)] == first and not finished[-1].turn.is_fork


async def test_reasoning_echoed_inside_the_text_keeps_the_sampled_tokens(model: Path) -> None:
    def echo(reply: Any) -> dict[str, Any]:
        text = f"<think>\n{reply.reasoning_content}\n</think>\n\n{reply.content}"
        return {"messages": [HELLO, {"role": "assistant", "content": text}, MORE]}

    _, finished, ended = await conversation(
        model, lambda _: "<think>\nhm\n</think>\n\nyes", {"messages": [HELLO]}, echo
    )
    assert extends(finished)
    assert ended.forks == 0


async def test_a_stop_string_is_cut_recorded_and_the_cut_echo_keeps_the_sampled_tokens(
    model: Path,
) -> None:
    def echo(reply: Any) -> dict[str, Any]:
        assert reply.content == "DONE:"
        return {
            "messages": [HELLO, {"role": "assistant", "content": "DONE:"}, MORE],
            "stop": [" created"],
        }

    asked = {"messages": [HELLO], "stop": [" created"]}
    replies, finished, _ = await conversation(
        model, lambda _: "DONE: created an order", asked, echo
    )
    assert replies[0].choices[0].finish_reason == "stop"
    assert finished[0].stop_string == " created"
    assert finished[0].output == finished[1].output
    assert replies[0].usage.completion_tokens == len(unpack_ids(finished[0].output))
    assert extends(finished)


def changed(reply: Any, *, arguments: str | None = None, content: Any = "kept") -> dict[str, Any]:
    call = reply.tool_calls[0]
    function = {"name": "find", "arguments": arguments or call.function.arguments}
    echo = {
        "role": "assistant",
        "content": reply.content if content == "kept" else content,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    answer = {"role": "tool", "tool_call_id": call.id, "content": "none"}
    return {"messages": [HELLO, echo, answer], "tools": [TOOL]}


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"arguments": '{ "q" : "shoes" }'}, []),
        ({"content": None}, []),
        ({"arguments": "{}"}, [("edited", 1)]),
        ({"content": "something else"}, [("edited", 1)]),
    ],
    ids=["spacing", "lost text", "cleared arguments", "changed text"],
)
async def test_an_edited_call_forks_with_its_reason_and_its_new_text_counts(
    model: Path, change: dict[str, Any], reasons: list[tuple[str, int]]
) -> None:
    _, finished, ended = await conversation(
        model,
        lambda _: f"let me see {CALL}",
        {"messages": [HELLO], "tools": [TOOL]},
        lambda reply: changed(reply, **change),
    )
    assert extends(finished) == (not reasons)
    assert [(fork.reason, fork.count) for fork in ended.fork_reasons] == reasons
    assert ended.forks == len(reasons)


async def test_other_tools_fork_and_the_same_tools_in_another_order_of_keys_do_not(
    model: Path,
) -> None:
    echo = {"role": "assistant", "content": "yes"}
    reordered = {name: TOOL[name] for name in reversed(TOOL)}
    other = {"type": "function", "function": {"name": "look"}}
    _, finished, ended = await conversation(
        model,
        lambda _: "yes",
        {"messages": [HELLO], "tools": [TOOL]},
        {"messages": [HELLO, echo, MORE], "tools": [reordered]},
        {"messages": [HELLO, echo, MORE], "tools": [other]},
    )
    assert [c.turn.fork_reason for c in finished] == [None, None, "other_tools"]
    assert [(fork.reason, fork.count) for fork in ended.fork_reasons] == [("other_tools", 1)]


async def test_a_title_and_a_second_conversation_are_side_requests(model: Path) -> None:
    title = {"messages": [{"role": "system", "content": "name it"}, HELLO]}
    _, finished, ended = await conversation(
        model,
        lambda _: "yes",
        {"messages": [HELLO]},
        title,
        {"messages": [MORE]},
        {"messages": [HELLO, {"role": "assistant", "content": "yes"}, MORE]},
    )
    assert [c.turn.fork_reason for c in finished] == [None, "side_request", "side_request", None]
    assert ended.forks == 2


async def test_a_path_that_leaves_another_behind_a_kept_reply_has_its_reason(model: Path) -> None:
    kept = [HELLO, {"role": "assistant", "content": "yes"}]
    on = [*kept, MORE]
    bodies: list[dict[str, Any]] = [
        {"messages": [HELLO]},
        {"messages": on},
        {"messages": [*on, {"role": "assistant", "content": "no"}, MORE]},
        {"messages": [*kept, {"role": "user", "content": "other"}]},
        {"messages": on, "temperature": 0.5},
        {"messages": [*on, {"role": "assistant", "content": "yes"}, MORE]},
    ]
    _, finished, ended = await conversation(model, lambda _: "yes", *bodies)
    expected = [None, None, "edited", "side_request", "resampled", None]
    assert [c.turn.fork_reason for c in finished] == expected
    # All but the first extend the tokens of a reply: none is rendered from its start.
    assert [c.parent_id is None for c in finished] == [True, *[False] * 5]
    assert not any(c.turn.is_fork for c in finished)
    assert ended.forks == 3
