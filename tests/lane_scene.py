"""One lane for tests: the real service on a log beside a given engine, and its records."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Headers, Log, Place
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import (
    CancelledCompletion,
    FinishedCompletion,
    RequestedCompletion,
    TurnPart,
)
from forgemq_contracts.distillation import Distillation
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.repetition import RepetitionStop
from forgemq_contracts.run import (
    Episodes,
    LogLayout,
    Model,
    Queue,
    RunConfiguration,
    StartedRun,
    Trainer,
)
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.weights import (
    EngineLoad,
    LoadedWeights,
    PublishedHead,
    PublishedWeights,
    RelayedLane,
    Rendezvous,
    ReportedEngine,
    SampledParameter,
)
from forgemq_inference.app import main
from forgemq_shell.clock import now_ms
from forgemq_shell.records import emit_of
from forgemq_shell.service import Context
from forgemq_telemetry import Telemetry
from forgemq_telemetry.telemetry import Exporter
from tests.small_run import small_run

PARTITIONS = 4
GROUP = "g-0123456789abcdef"
TURN = TurnPart(sequence=0, protocol="chat_completions", body_digest="d")


def configuration(
    model: Path,
    *,
    lanes: int = 2,
    speculation: Speculation | None = None,
    repetition_stop: RepetitionStop = RepetitionStop(),  # noqa: B008  # frozen
    teacher_url: str = "",
    quantization: str = "none",
) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path=str(model), dtype="float32", engine_quantization=quantization),
        queues=(Queue(domain="shop", task_source="m:f", agent="m:f"),),
        trainer=Trainer(steps=3),
        log=LogLayout(group_partitions=PARTITIONS, lanes=lanes),
        episodes=Episodes(repetition_stop=repetition_stop),
        distillation=Distillation(url=teacher_url) if teacher_url else None,
        speculation=speculation,
    )


async def create_topics(log: Log, *, lanes: int = 2) -> None:
    run = small_run(group_partitions=PARTITIONS, lanes=lanes)
    counts = {topic.name: topics.partition_count(topic, run) for topic in topics.OF_RUN}
    dead = {topic.dlq_name: 1 for topic in topics.OF_RUN if topic.has_dlq}
    await log.create_topics(counts | dead)


def published_head(folder: Path) -> PublishedHead:
    data = (folder / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return PublishedHead(sha256=sha256, uri=str(folder), size_bytes=len(data))


def name_of(folder: Path, *, version: int) -> str:
    """What an engine calls the weights in a folder if they are this version of lineage 1."""
    (file,) = folder.glob("*model.safetensors")
    return f"1.{version}-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def request_id(number: int) -> str:
    return f"{number:032x}"


class LaneScene:
    """Writes requests to the log and reads records back; `serving` runs the service."""

    def __init__(
        self,
        log: Log,
        *,
        model: Path,
        engine_url: str,
        lane: int = 0,
        lanes: int = 2,
        speculation: Speculation | None = None,
        repetition_stop: RepetitionStop = RepetitionStop(),  # noqa: B008  # frozen
        teacher_url: str = "",
        quantization: str = "none",
    ) -> None:
        self.teacher_url = teacher_url
        self.repetition_stop = repetition_stop
        self.log = log
        self.model = model
        self.engine_url = engine_url
        self.lane = lane
        self.lanes = lanes
        self.speculation = speculation
        self.quantization = quantization
        self.events = StringIO()
        self.exporter: Exporter | None = None
        self._writer: Any = None

    @asynccontextmanager
    async def serving(self, **settings: object) -> AsyncIterator["asyncio.Event"]:
        """Run the service during the block, which gets the event that stops it."""
        variables = {"LANE": self.lane, "ENGINE_URL": self.engine_url, "HEARTBEAT_S": 0.1}
        variables |= {"DRAIN_S": 0.2} | {name.upper(): value for name, value in settings.items()}
        stop = asyncio.Event()
        context = Context(
            started=StartedRun(
                run="r",
                configuration=configuration(
                    self.model,
                    lanes=self.lanes,
                    speculation=self.speculation,
                    repetition_stop=self.repetition_stop,
                    teacher_url=self.teacher_url,
                    quantization=self.quantization,
                ),
                blobs="memory://",
                started_ms=1,
            ),
            log=self.log,
            blobs=BlobStore("memory://blobs", run="r"),
            telemetry=Telemetry(service="inference", exporter=self.exporter, stream=self.events),
            stop=stop,
            environ={f"FORGEMQ_INFERENCE_{name}": str(value) for name, value in variables.items()},
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(main(context))
            await asyncio.sleep(0)
            yield stop
            stop.set()
            await asyncio.wait([task], timeout=20)
            assert task.done(), "the service did not stop"

    async def request(
        self,
        number: int,
        context: Sequence[int],
        *,
        epoch: int = 1,
        attempt: int = 0,
        episode: int = 0,
        deadline_s: float = 60.0,
        headers: Headers = (),
        parent: int | None = None,
        shared: int = 0,
        is_delta: bool = False,
        requested_ms: int | None = None,
        is_live: bool = False,
        **sampling: Any,
    ) -> None:
        request = RequestedCompletion(
            request_id=request_id(number),
            attempt=attempt,
            episode_id=f"{GROUP}.{episode}.0",
            group_id=GROUP,
            lane=self.lane,
            epoch=epoch,
            sampling=Sampling(**sampling),
            deadline_ms=now_ms() + int(deadline_s * 1000),
            requested_ms=now_ms() if requested_ms is None else requested_ms,
            turn=TURN,
            parent_id=None if parent is None else request_id(parent),
            shared_prefix_tokens=shared,
            context=pack_ids(context),
            is_delta=is_delta,
            is_live=is_live,
        )
        await self.write(topics.REQUESTED_COMPLETIONS, self.lane, request, headers=headers)

    async def cancel(self, number: int, *, attempt: int = 0) -> None:
        record = CancelledCompletion(request_id=request_id(number), attempt=attempt, lane=self.lane)
        await self.write(topics.CANCELLED_COMPLETIONS, self.lane, record)

    async def publish(
        self,
        folder: Path,
        *,
        lineage: int = 1,
        version: int,
        fast_paths: tuple[Rendezvous, ...] = (),
        deadline_s: float = 10.0,
        sha256: str | None = None,
        head: Path | None = None,
        relayed_to: tuple[RelayedLane, ...] = (),
        sampled: tuple[SampledParameter, ...] = (),
        durable_before: Path | None = None,
    ) -> None:
        """Publish the weights in a folder, which may be an adapter's.

        They are not durable yet if `durable_before` has earlier ones with the same tensors.
        """
        adapter = folder / "adapter_model.safetensors"
        is_adapter = adapter.exists()
        data = (adapter if is_adapter else folder / "model.safetensors").read_bytes()
        record = PublishedWeights(
            lineage=lineage,
            version=version,
            sha256=sha256 or hashlib.sha256(data).hexdigest(),
            uri=str(durable_before or folder),
            size_bytes=len(data),
            kind="adapter" if is_adapter else "full",
            fast_paths=fast_paths,
            deadline_s=deadline_s,
            head=None if head is None else published_head(head),
            relayed_to=relayed_to,
            sampled=sampled,
            is_durable=durable_before is None,
        )
        await self.write(topics.PUBLISHED_WEIGHTS, 0, record)

    async def write(
        self, topic: topics.Topic, partition: int, record: msgspec.Struct, headers: Headers = ()
    ) -> int:
        if self._writer is None:
            self._writer = await self.log.writer()
        output = Output(topic=topic.name, partition=partition, record=record)
        offset: int = await self._writer.write(emit_of(output, headers=headers))
        return offset

    async def read(self, topic: str, partition: int) -> list[Any]:
        """All records of a partition, raw."""
        place = Place(topic, partition)
        end = (await self.log.end_positions([place]))[place]
        start = (await self.log.first_positions([place]))[place]
        reader = await self.log.reader({place: start})
        records: list[Any] = []
        while start < end and reader.position(place) < end:
            records += await reader.read(timeout_s=0.2, records_max=1000)
        await reader.close()
        return records

    async def _at_least(self, count: int, topic: topics.Topic, partition: int) -> list[Any]:
        while True:
            records = await self.read(topic.name, partition)
            if len(records) >= count:
                return records
            await asyncio.sleep(0.02)

    async def finished(
        self, *, count: int = 0, timeout_s: float = 20.0
    ) -> list[FinishedCompletion]:
        """Wait for `count` finished completions and return all."""
        partition = group_partition(GROUP, partitions=PARTITIONS)
        topic = topics.FINISHED_COMPLETIONS
        async with asyncio.timeout(timeout_s):
            records = await self._at_least(count, topic, partition)
        return [topics.decode(topic, record.value) for record in records]  # type: ignore[misc]

    async def loaded(self, *, count: int = 0, timeout_s: float = 20.0) -> list[LoadedWeights]:
        """Wait for `count` records of loaded weights and return all of the lane."""
        topic = topics.LOADED_WEIGHTS
        async with asyncio.timeout(timeout_s):
            records = await self._at_least(count, topic, self.lane)
        return [topics.decode(topic, record.value) for record in records]  # type: ignore[misc]

    async def report(self, *, is_serving: bool, timeout_s: float = 20.0) -> ReportedEngine:
        """Wait until the lane's newest report says so, and return it."""
        topic = topics.REPORTED_ENGINES
        async with asyncio.timeout(timeout_s):
            while True:
                records = await self.read(topic.name, self.lane)
                if records:
                    report = topics.decode(topic, records[-1].value)
                    assert isinstance(report, ReportedEngine)
                    if report.is_serving == is_serving:
                        return report
                await asyncio.sleep(0.02)

    async def until_running(self) -> None:
        """Return once the lane reports a request in its engine."""
        while True:
            if (await self.report(is_serving=True)).running:
                return
            await asyncio.sleep(0.02)

    async def until_measured(self, *, timeout_s: float) -> EngineLoad:
        """Wait until the lane reports how long a decoding step takes, and return its load."""
        async with asyncio.timeout(timeout_s):
            while True:
                load = (await self.report(is_serving=True)).load
                if load is not None and load.step_s:
                    return load
                await asyncio.sleep(0.1)

    async def until_queued(self) -> None:
        """Return once the lane reports a request that waits for its engine."""
        while True:
            if (await self.report(is_serving=True)).queued:
                return
            await asyncio.sleep(0.02)

    async def until_event(self, event: str) -> None:
        """Return once the service's log has such an event."""
        while True:
            if self.events_named(event):
                return
            await asyncio.sleep(0.02)

    def events_named(self, event: str) -> list[dict[str, Any]]:
        """Events of this name in the service's log."""
        lines = [json.loads(line) for line in self.events.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]
