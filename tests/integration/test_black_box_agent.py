"""Agents through the real gateway: the demo's, and a third party's that knows nothing of ForgeMQ.

The log is in memory. The test admits groups in the scheduler's stead and answers as the lane: it
decides by the decoded context, and answers with tool-call text in the model's form.
"""

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import aiohttp
import msgspec
import pytest
from black_box import agent as black_box_agent
from msgspec import Raw
from shop_desk import agent as white_box_agent
from shop_desk.calls import add_up
from shop_desk.demonstrator import call_text
from shop_desk.shop import Line, Order, as_task
from tokenizers import Tokenizer

from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_agents.user_code import Play
from forgemq_bus.log import Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.admin import GroupRequest
from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_ids
from forgemq_contracts.completions import FinishedCompletion, RequestedCompletion, WeightSpan
from forgemq_contracts.episodes import FinishedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import Episodes, LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_gateway.app import serve
from forgemq_gateway.settings import GatewaySettings
from forgemq_rendering import Rendering
from forgemq_shell.records import emit_of
from forgemq_telemetry.telemetry import Telemetry
from tests.small_run import small_run

pytestmark = pytest.mark.integration

MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
ADMIN_KEY = "an-admin-key-of-the-test"
ORDER = Order((Line(3, "lamp"), Line(2, "mug")), "Order: {order}. What is the total?", 7)


def configuration(context_tokens_max: int) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path=str(MODEL), context_tokens_max=context_tokens_max, dtype="float32"),
        queues=(Queue(domain="shop_desk", task_source="m:f", agent="m:f", group_size=2),),
        trainer=Trainer(steps=3),
        episodes=Episodes(sampling=Sampling(max_tokens=80)),
        log=LogLayout(group_partitions=2, lanes=1),
    )


def skilled(context: str) -> str:
    """The policy's text: all prices at once, then the total, then the answer."""
    lines = re.findall(r"(\d+) ([a-z]+)", context.rpartition("Order: ")[2].partition(".")[0])
    prices = dict(re.findall(r"<tool_response>\n([a-z]+) (\d+), color", context))
    if not prices:
        return "\n".join(call_text("price", item) for _, item in lines)
    asked = ", ".join(f"{count} {item} {prices[item]}" for count, item in lines)
    if '{"total": ' not in context:
        return call_text("total", asked)
    return f"The total is {add_up(asked)}."


class World:
    """The other services, as far as the gateway needs them: admits every group, serves one lane."""

    def __init__(
        self, log: MemoryLog, say: Callable[[str], str], *, context_tokens_max: int
    ) -> None:
        self.log, self.say = log, say
        self.context_tokens_max = context_tokens_max
        self.rendering = Rendering.load(str(MODEL))
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.served: list[tuple[list[int], list[int]]] = []

    async def run(self) -> None:
        writer = await self.log.writer()
        await writer.write(
            emit_of(
                Output(
                    topic=topics.LOADED_WEIGHTS.name,
                    partition=0,
                    record=LoadedWeights(
                        lane=0, epoch=1, lineage=1, version=0, path="start", duration_s=0
                    ),
                )
            )
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(writer))
            tasks.create_task(self._follow(topics.REQUESTED_GROUPS, self._admit, writer))
            tasks.create_task(self._follow(topics.REQUESTED_COMPLETIONS, self._finish, writer))

    async def _beat(self, writer) -> None:
        while True:
            record = ReportedEngine(
                lane=0,
                epoch=1,
                url="http://127.0.0.1:9",
                is_serving=True,
                lineage=1,
                version=0,
                running=0,
                queued=0,
                reported_ms=1,
                context_tokens_max=self.context_tokens_max,
            )
            output = Output(topic=topics.REPORTED_ENGINES.name, partition=0, record=record)
            await writer.write(emit_of(output))
            await asyncio.sleep(0.5)

    async def _follow(self, topic, handle, writer) -> None:
        reader = await self.log.reader({Place(topic.name, 0): 0})
        while True:
            for record in await reader.read(timeout_s=0.2, records_max=100):
                await writer.write(emit_of(handle(topics.decode(topic, record.value))))

    def _admit(self, asked: RequestedGroup) -> Output:
        record = AdmittedGroup(
            group_id=asked.group_id,
            domain=asked.domain,
            purpose=asked.purpose,
            group_size=asked.group_size,
            task=asked.task,
            version_at_admission=0,
            queue_index=0,
        )
        return Output(topic=topics.ADMITTED_GROUPS.name, partition=0, record=record)

    def _finish(self, asked: RequestedCompletion) -> Output:
        before = []
        if asked.is_delta:
            before = next(
                context + output
                for context, output in reversed(self.served)
                if len(context + output) >= asked.shared_prefix_tokens
            )[: asked.shared_prefix_tokens]
        context = [*before, *unpack_ids(asked.context)]
        text = self.say(self.rendering.decode(context))
        output = [*self.tokenizer.encode(text).ids, self.rendering.stop_token_ids[0]]
        self.served.append((context, output))
        record = FinishedCompletion(
            request_id=asked.request_id,
            attempt=asked.attempt,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            lane=0,
            epoch=asked.epoch,
            finish_reason="stop",
            turn=asked.turn,
            parent_id=asked.parent_id,
            shared_prefix_tokens=asked.shared_prefix_tokens,
            context=pack_ids(context[asked.shared_prefix_tokens :]),
            output=pack_ids(output),
            logprobs=pack_floats([-0.5] * len(output)),
            spans=(WeightSpan(start=0, end=len(output), lineage=1, version=0),),
        )
        partition = group_partition(asked.group_id, partitions=2)
        return Output(topic=topics.FINISHED_COMPLETIONS.name, partition=partition, record=record)


@asynccontextmanager
async def running(
    say: Callable[[str], str], *, context_tokens_max: int = 1024
) -> AsyncIterator[tuple[str, World]]:
    """The gateway on a free port, with `World` behind it."""
    log = MemoryLog(run="r")
    settings = configuration(context_tokens_max)
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    listener = socket.create_server(("127.0.0.1", 0))
    stop = asyncio.Event()
    world = World(log, say, context_tokens_max=context_tokens_max)
    async with asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(world.run())
        tasks.create_task(
            serve(
                configuration=settings,
                settings=GatewaySettings(admin_key=ADMIN_KEY),
                log=log.open(),
                telemetry=Telemetry(service="gateway", stream=StringIO()),
                stop=stop,
                listener=listener,
            )
        )
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", world
        stop.set()
        playing.cancel()


async def finished_episode(world: World, group_id: str) -> FinishedEpisode:
    place = Place(topics.FINISHED_EPISODES.name, group_partition(group_id, partitions=2))
    reader = await world.log.reader({place: 0})
    async with asyncio.timeout(10):
        while True:
            for record in await reader.read(timeout_s=0.2, records_max=10):
                decoded = topics.decode(topics.FINISHED_EPISODES, record.value)
                assert isinstance(decoded, FinishedEpisode)
                return decoded


async def played(
    play: Play, url: str, world: World, *, task: object = as_task(ORDER)
) -> FinishedEpisode:
    """Play one episode of the task to its end with the agents' service code."""
    retry = Retry(deadline_s=20)
    leases = LeaseThread(url=url, admin_key=ADMIN_KEY, retry=retry)
    async with aiohttp.ClientSession() as http, leases:
        requests = JsonRequests(http, retry=retry)
        gateway = GatewayClient(requests, url=url, admin_key=ADMIN_KEY)
        status = await gateway.request_group(
            GroupRequest(
                domain="shop_desk",
                idempotency_key="shop_desk/0",
                task=Raw(msgspec.json.encode(task)),
            )
        )
        while status.state == "requested":
            status = await gateway.read_group(status, wait_s=5)
        claim = await gateway.claim(status.group_id)
        assert claim is not None
        player = EpisodePlayer(
            gateway=gateway,
            requests=requests,
            leases=leases,
            environ=dict(os.environ),
            telemetry=Telemetry(service="agents", stream=StringIO()),
        )
        await player.play(claim, play)
        return await finished_episode(world, status.group_id)


async def test_the_openai_agents_sdk_serves_a_customer_unmodified():
    async with running(skilled) as (url, world):
        episode = await played(black_box_agent.play, url, world)
    assert (episode.status, episode.detail) == ("completed", "")
    answer = f"The total is {ORDER.total}."
    assert json.loads(episode.result) == {"end": "answered", "answer": answer}
    assert [entry.sequence for entry in episode.manifest] == [0, 1, 2]
    ids = [entry.completion_id for entry in episode.manifest]
    assert [entry.parent_id for entry in episode.manifest] == [None, ids[0], ids[1]]
    assert episode.forks == 0
    for (context, output), (following, _) in zip(world.served, world.served[1:], strict=False):
        assert following[: len(context + output)] == context + output


async def test_our_own_agent_serves_a_customer_and_reports_its_virtual_time():
    async with running(skilled) as (url, world):
        episode = await played(white_box_agent.play, url, world)
    assert episode.status == "completed"
    assert episode.virtual_s == pytest.approx(0.4 + 1.0 + 0.4 + 0.3 + 0.4)
    assert json.loads(episode.result)["is_parallel"] is True
    assert len(episode.manifest) == 3


async def test_a_note_forks_the_history_and_nothing_is_lost():
    def noting(context: str) -> str:
        return "The total is 3." if "Notes: " in context else call_text("note", "lamp 4")

    async with running(noting) as (url, world):
        episode = await played(white_box_agent.play, url, world)
    assert json.loads(episode.result)["notes"] == 1
    assert [entry.sequence for entry in episode.manifest] == [0, 1]
    assert "Notes: lamp 4" in world.rendering.decode(world.served[1][0])


async def test_a_malformed_call_is_answered_within_the_same_history():
    def spoiled(context: str) -> str:
        return "The total is 3." if "bad call" in context else call_text("note", "x")[:-14]

    async with running(spoiled) as (url, world):
        episode = await played(white_box_agent.play, url, world)
    assert json.loads(episode.result)["bad_calls"] == 1
    first, second = world.served
    assert second[0][: len(first[0] + first[1])] == first[0] + first[1]
    assert world.rendering.decode(second[0]).endswith(
        '<tool_response>\n{"error": "bad call"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


async def test_a_black_box_that_fails_is_masked():
    def endless(context: str) -> str:
        return "x"

    broken = black_box_agent.black_box((sys.executable, "-c", "raise SystemExit(4)"), timeout_s=20)
    async with running(endless) as (url, world):
        episode = await played(broken, url, world)
    assert episode.status == "aborted"
    assert episode.detail.startswith("AgentStatusError: status 4")
