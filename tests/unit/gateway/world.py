"""A gateway on a real socket over a log, and a lane that answers by script.

The lane is a participant of the log: it reads requested-completions of its partition, decides by
script, and writes FinishedCompletion as an inference process does, deltas and errors included.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from openai import AsyncOpenAI

from forgemq.bus.errors import ClosedError
from forgemq.bus.log import Log, Place
from forgemq.contracts import topics
from forgemq.contracts.arrays import pack_floats, pack_ids, unpack_ids
from forgemq.contracts.completions import FinishedCompletion, RequestedCompletion
from forgemq.contracts.episodes import Sampling
from forgemq.contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup
from forgemq.contracts.messages import Output
from forgemq.contracts.partitions import group_partition
from forgemq.contracts.run import Episodes, Model, Queue, RunConfiguration, Trainer
from forgemq.contracts.run import Log as LogSettings
from forgemq.contracts.weights import ReportedEngine
from forgemq.gateway.app import serve
from forgemq.gateway.settings import GatewaySettings
from forgemq.rendering import Rendering
from forgemq.shell.records import emit_of
from forgemq.telemetry.telemetry import Telemetry

ADMIN_KEY = "an-admin-key-of-some-length"
GROUP_PARTITIONS = 3
LANES = 2

Script = Callable[["Asked"], Awaitable[str] | str]


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def configuration_of(
    model: Path, *, run: str = "r", lease_s: float = 30.0, context_tokens_max: int = 4096
) -> RunConfiguration:
    return RunConfiguration(
        run=run,
        seed=1,
        model=Model(path=str(model), context_tokens_max=context_tokens_max, dtype="float32"),
        queues=(
            Queue(
                domain="shop",
                task_source="a:b",
                agent="a:c",
                group_size=2,
                groups_per_step=1,
                slots=4,
                groups_requested_max=3,
            ),
        ),
        trainer=Trainer(steps=10),
        episodes=Episodes(
            sampling=Sampling(temperature=1.0, max_tokens=200), lease_s=lease_s, attempts_max=2
        ),
        log=LogSettings(group_partitions=GROUP_PARTITIONS, lanes=LANES),
    )


def partitions_of(configuration: RunConfiguration) -> dict[str, int]:
    return {
        topic.name: topics.partition_count(
            topic,
            group_partitions=configuration.log.group_partitions,
            lanes=configuration.log.lanes,
            queues=len(configuration.queues),
        )
        for topic in topics.OF_RUN
    }


def contexts_of(records: list[Any]) -> dict[str, list[int]]:
    """Context + output of every finished completion, from parents and deltas."""
    whole: dict[str, list[int]] = {}
    for record in records:
        parent = whole.get(record.parent_id or "", [])
        context = [*parent[: record.shared_prefix_tokens], *unpack_ids(record.context)]
        whole[record.request_id] = [*context, *unpack_ids(record.output)]
    return whole


class Asked(msgspec.Struct):
    """One request as a lane has it: with all tokens, and as text."""

    record: RequestedCompletion
    context: list[int]
    text: str


class FailAttempt(Exception):  # noqa: N818 - an order of the script, not an error
    """The script wants this attempt to end with an error."""


class ScriptedLane:
    """One lane of one epoch. A script gives the text of each answer."""

    def __init__(
        self, log: Log, rendering: Rendering, script: Script, *, lane: int = 0, epoch: int = 1
    ) -> None:
        self.lane, self.epoch = lane, epoch
        self.seen: list[Asked] = []
        self.known: dict[str, list[int]] = {}
        self.is_silent = False
        self._arrived = asyncio.Event()
        self._working: list[asyncio.Task[None]] = []
        self._log = log
        self._rendering = rendering
        self._script = script

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        self._writer = await self._log.writer()
        place = Place(topics.REQUESTED_COMPLETIONS.name, self.lane)
        ends = await self._log.end_positions([place])
        reader = await self._log.reader(ends)
        await self.report()
        self._working.append(tasks.create_task(self._heartbeat()))
        while True:
            for record in await reader.read(timeout_s=0.2, records_max=100):
                asked = topics.decode(topics.REQUESTED_COMPLETIONS, record.value)
                assert isinstance(asked, RequestedCompletion)
                if asked.epoch == self.epoch and not self.is_silent:
                    self._working.append(tasks.create_task(self._serve(asked)))

    def stop(self) -> None:
        """End everything this lane does."""
        for task in self._working:
            task.cancel()

    async def has_seen(self, count: int) -> None:
        """Return when so many requests have come."""
        async with asyncio.timeout(10):
            while len(self.seen) < count:
                self._arrived.clear()
                await self._arrived.wait()

    async def _heartbeat(self) -> None:
        while not self.is_silent:
            await asyncio.sleep(0.3)
            await self.report()

    async def report(self, *, is_serving: bool = True) -> None:
        await self._write(
            topics.REPORTED_ENGINES,
            self.lane,
            ReportedEngine(
                lane=self.lane,
                epoch=self.epoch,
                url="",
                is_serving=is_serving,
                lineage=0,
                version=0,
                running=0,
                queued=0,
                reported_ms=wall_ms(),
            ),
        )

    async def _serve(self, record: RequestedCompletion) -> None:
        started_ms = wall_ms()
        parent = self.known.get(record.parent_id or "", [])
        own = unpack_ids(record.context)
        if record.is_delta and len(parent) < record.shared_prefix_tokens:
            await self._finish(record, b"", reason="error", error="context_missing")
            return
        context = [*parent[: record.shared_prefix_tokens], *own] if record.is_delta else own
        delta = context[record.shared_prefix_tokens :]
        asked = Asked(record=record, context=context, text=self._rendering.decode(context))
        self.seen.append(asked)
        self._arrived.set()
        try:
            answer = self._script(asked)
            text = answer if isinstance(answer, str) else await answer
        except FailAttempt as failure:
            await self._finish(record, pack_ids(delta), reason="error", error=str(failure))
            return
        ids = [*self._rendering._tokenizer.encode(text), self._rendering.stop_token_ids[0]]
        reason = "stop"
        if len(ids) > record.sampling.max_tokens:
            ids, reason = ids[: record.sampling.max_tokens], "length"
        self.known[record.request_id] = [*context, *ids]
        engine_s = (wall_ms() - started_ms) / 1000
        await self._finish(record, pack_ids(delta), reason=reason, ids=ids, engine_s=engine_s)

    async def _finish(
        self,
        record: RequestedCompletion,
        context: bytes,
        *,
        reason: Any,
        ids: list[int] | None = None,
        engine_s: float = 0.0,
        error: str = "",
    ) -> None:
        output = ids or []
        await self._write(
            topics.FINISHED_COMPLETIONS,
            group_partition(record.group_id, partitions=GROUP_PARTITIONS),
            FinishedCompletion(
                request_id=record.request_id,
                attempt=record.attempt,
                episode_id=record.episode_id,
                group_id=record.group_id,
                lane=self.lane,
                epoch=self.epoch,
                finish_reason=reason,
                turn=record.turn,
                parent_id=record.parent_id,
                shared_prefix_tokens=record.shared_prefix_tokens,
                context=context,
                output=pack_ids(output),
                logprobs=pack_floats([-0.5] * len(output)),
                engine_s=engine_s,
                error=error,
            ),
        )

    async def _write(self, topic: topics.Topic, partition: int, record: msgspec.Struct) -> None:
        output = Output(topic=topic.name, partition=partition, record=record)
        await self._writer.write(emit_of(output))


class World:
    """A run with a gateway; tests act as agents, scheduler and lanes."""

    def __init__(self, open_log: Callable[[], Log], configuration: RunConfiguration) -> None:
        self.open_log = open_log
        self.log = open_log()
        self.configuration = configuration
        self.rendering = Rendering.load(configuration.model.path)
        self.base_url = ""
        self.settings = GatewaySettings(
            admin_key=ADMIN_KEY, keepalive_s=0.4, lane_hold_s=0.5, lane_lapse_s=1.0, drain_s=1.0
        )
        self.clients: list[AsyncOpenAI] = []
        self.tasks: asyncio.TaskGroup | None = None
        self._log = open_log()
        self._stop = asyncio.Event()
        self._gateway: asyncio.Task[None] | None = None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """A gateway on a free port; the log is all it knows."""
        self.tasks = tasks
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._stop = asyncio.Event()
        self._log = self.open_log()
        self._gateway = tasks.create_task(self._serve(listener))
        async with httpx.AsyncClient() as client:
            while True:
                answer = await client.get(f"{self.base_url}/health", timeout=5)
                if answer.status_code == 200:
                    return
                await asyncio.sleep(0.02)

    def client(self, claim: Any, *, retries: int = 0) -> AsyncOpenAI:
        """OpenAI's client with the episode's key, closed with the world."""
        client = AsyncOpenAI(api_key=claim["key"], base_url=claim["base_url"], max_retries=retries)
        self.clients.append(client)
        return client

    async def _serve(self, listener: socket.socket) -> None:
        try:
            await serve(
                configuration=self.configuration,
                settings=self.settings,
                log=self._log,
                telemetry=Telemetry(service="gateway"),
                stop=self._stop,
                listener=listener,
            )
        except* ClosedError:  # What `kill` does.
            pass

    async def kill(self) -> None:
        """The gateway ends at once, as by kill -9: its log takes nothing any more."""
        await self._log.close()
        assert self._gateway is not None
        await asyncio.wait([self._gateway])

    async def stop(self) -> None:
        self._stop.set()
        assert self._gateway is not None
        await asyncio.wait([self._gateway])

    async def admin(
        self, method: str, path: str, body: Any = None, *, key: str = ADMIN_KEY
    ) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.request(
                method,
                self.base_url + path,
                json=body,
                headers={"Authorization": f"Bearer {key}"},
            )

    async def write(self, topic: topics.Topic, partition: int, record: msgspec.Struct) -> None:
        log = self.log
        output = Output(topic=topic.name, partition=partition, record=record)
        if topic.is_transactional:
            transactions = await log.transaction_writer("scheduler")
            await transactions.commit(outputs=[emit_of(output)], group="scheduler", positions={})
            await transactions.close()
        else:
            writer = await log.writer()
            await writer.write(emit_of(output))
            await writer.close()

    async def records(self, topic: topics.Topic) -> list[Any]:
        """All records of a topic, by partition and offset."""
        log = self.log
        places = [
            Place(topic.name, n) for n in range(partitions_of(self.configuration)[topic.name])
        ]
        ends = await log.end_positions(places)
        reader = await log.reader(dict.fromkeys(places, 0))
        found = []
        while any(reader.position(place) < ends[place] for place in places):
            found += await reader.read(timeout_s=0.5, records_max=1000)
        await reader.close()
        found.sort(key=lambda record: (record.partition, record.offset))
        return [topics.decode(topic, record.value) for record in found]

    async def eventually(self, topic: topics.Topic, count: int) -> list[Any]:
        """All records of a topic, as soon as there are so many."""
        for _ in range(200):
            records = await self.records(topic)
            if len(records) >= count:
                return records
            await asyncio.sleep(0.05)
        raise AssertionError(f"{topic.name}: {len(records)} records, waited for {count}")

    async def open_group(self, key: str = "k1", *, temperature: float | None = None) -> str:
        """A group, requested by an agent and admitted by the scheduler."""
        body = {"domain": "shop", "idempotency_key": key, "task": {"n": 1}}
        if temperature is not None:
            body["temperature"] = temperature
        answer = await self.admin("POST", "/v1/groups", body)
        assert answer.status_code == 200, answer.text
        group_id = str(answer.json()["group_id"])
        await self.admit(group_id)
        return group_id

    async def admit(self, group_id: str) -> None:
        requested = next(
            record
            for record in await self.records(topics.REQUESTED_GROUPS)
            if record.group_id == group_id
        )
        assert isinstance(requested, RequestedGroup)
        await self.write(
            topics.ADMITTED_GROUPS,
            0,
            AdmittedGroup(
                group_id=group_id,
                domain=requested.domain,
                purpose=requested.purpose,
                group_size=requested.group_size,
                task=requested.task,
                version_at_admission=0,
                queue_index=0,
                temperature=requested.temperature,
            ),
        )

    async def retire(self, group_id: str) -> None:
        await self.write(
            topics.RETIRED_GROUPS,
            group_partition(group_id, partitions=GROUP_PARTITIONS),
            RetiredGroup(
                group_id=group_id,
                domain="shop",
                purpose="train",
                reason="zero_variance",
                queue_index=0,
            ),
        )

    async def claim(self, group_id: str, *, wait_s: float = 5) -> Any:
        answer = await self.admin("POST", f"/v1/groups/{group_id}/claim", {"wait_s": wait_s})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def episode(self) -> Any:
        """An episode of a new group."""
        return await self.claim(await self.open_group())


@asynccontextmanager
async def running(
    open_log: Callable[[], Log],
    configuration: RunConfiguration,
    script: Script,
    *,
    lanes: int = 1,
    memory_bytes_max: int = 1_000_000_000,
) -> AsyncIterator[tuple[World, list[ScriptedLane]]]:
    """A world with a gateway and scripted lanes."""
    world = World(open_log, configuration)
    world.settings = msgspec.structs.replace(world.settings, memory_bytes_max=memory_bytes_max)
    await world.log.create_topics(partitions_of(configuration))
    async with asyncio.TaskGroup() as tasks:
        started = [
            ScriptedLane(world.log, world.rendering, script, lane=number) for number in range(lanes)
        ]
        running_lanes = [tasks.create_task(lane.run(tasks)) for lane in started]
        await world.start(tasks)
        try:
            yield world, started
        finally:
            for client in world.clients:
                await client.close()
            await world.stop()
            for lane in started:
                lane.stop()
            for task in running_lanes:
                task.cancel()
    await world.log.close()
