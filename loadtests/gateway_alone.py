"""A gateway as a process of its own, on the log in memory: no broker and no other service.

    agents --HTTP--> gateway <--records--> lane and scheduler, stand-ins in the same process

Code, settings and event loop are those of `python -m forgemq_gateway`. The stand-ins write the same
records as the services do; the CPU time of their steps is measured in the process, and taken from
its own (`meter.py`). The lane answers every request after the same time with as many tokens; the
scheduler admits every group at once.
"""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import uvloop
from data_path_system import HOST
from gateway_passing import until_serving
from meter import Meter
from msgspec import Struct
from pinning import cpu_s
from stand_in_answers import Context, Speed, sampled_after

from forgemq_bus.log import Log, Place, Reader, Record, Writer
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_ids
from forgemq_contracts.completions import (
    FinishedCompletion,
    RequestedCompletion,
    SampledChunk,
    WeightSpan,
)
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.app import serve
from forgemq_gateway.http_server import allow_connections
from forgemq_gateway.large_work import favour_event_loop
from forgemq_gateway.settings import GatewaySettings
from forgemq_launcher.upkeep.machine import port
from forgemq_settings.environment import parse
from forgemq_shell.records import emit_of
from forgemq_telemetry.telemetry import Telemetry

_REPORT_EVERY_S = 0.5
_CHUNK_EVERY_S = 0.1
_LANE, _EPOCH = 0, 1
# Different enough that no two turns of an episode say the same.
_ANSWERS = 256


class AloneSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process serves.

    Attributes:
        run_file: The run's configuration, JSON.
        tokens: Length of every answer.
        engine_s: Time from a request to its answer.
        meter_file: Gets the CPU time of the stand-ins.
    """

    run_file: str
    tokens: int
    engine_s: float
    meter_file: str


class Target(Struct, frozen=True, kw_only=True):
    """A gateway that agents can be sent to.

    Attributes:
        gateway: Its process.
        inference: The process of the lane, if there is one.
        stand_ins: Counts what other services use of the gateway's process, if they are in it.
    """

    url: str
    admin_key: str
    gateway: int
    inference: int | None = None
    stand_ins: Meter | None = None

    def gateway_cpu_s(self) -> float:
        """CPU time that the gateway has used so far."""
        return cpu_s(self.gateway) - (self.stand_ins.cpu_s() if self.stand_ins else 0.0)


@asynccontextmanager
async def alone(
    folder: Path, configuration: RunConfiguration, *, speed: Speed
) -> AsyncIterator[Target]:
    """Run this file until the block ends, with the answers of an engine of this speed."""
    run_file, number = folder / "run.json", port(HOST, wanted=0)
    stand_ins = Meter(folder / "stand_ins")
    run_file.write_bytes(msgspec.json.encode(configuration))
    key = secrets.token_hex(16)
    own = {
        "FORGEMQ_LOAD_ALONE_RUN_FILE": str(run_file),
        "FORGEMQ_LOAD_ALONE_TOKENS": str(speed.tokens),
        "FORGEMQ_LOAD_ALONE_ENGINE_S": str(speed.latency_s),
        "FORGEMQ_LOAD_ALONE_METER_FILE": str(stand_ins.path),
        "FORGEMQ_GATEWAY_ADMIN_KEY": key,
        "FORGEMQ_GATEWAY_PORT": str(number),
    }
    command = (sys.executable, str(Path(__file__)))
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | own)
    url = f"http://{HOST}:{number}"
    try:
        await until_serving(url)
        yield Target(url=url, admin_key=key, gateway=process.pid, stand_ins=stand_ins)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class Participant:
    """Reads one topic of the log and writes to others, as a service does."""

    def __init__(self, log: Log, writer: Writer, *, partitions: int) -> None:
        self._log = log
        self._writer = writer
        self._partitions = partitions

    async def reader(self, topic: topics.Topic, *, partitions: int) -> Reader:
        """A reader of all that is written from now on."""
        places = [Place(topic.name, partition) for partition in range(partitions)]
        return await self._log.reader(await self._log.end_positions(places))

    async def write(self, topic: topics.Topic, record: Struct, *, group: str = "") -> None:
        """Write a record to the partition of its group, or to partition 0."""
        partition = group_partition(group, partitions=self._partitions) if group else 0
        output = Output(topic=topic.name, partition=partition, record=record)
        await self._writer.write(emit_of(output))


class StandInLane(Participant):
    """Answers every request of its lane after a fixed time."""

    def __init__(
        self, log: Log, writer: Writer, *, partitions: int, settings: AloneSettings, meter: Meter
    ) -> None:
        super().__init__(log, writer, partitions=partitions)
        speed = Speed(tokens=settings.tokens)
        sampled = [
            sampled_after(Context(tokens=number, end=[]), count=speed.tokens, speed=speed)
            for number in range(_ANSWERS)
        ]
        self._answers = [(pack_ids(ids), pack_floats(logprobs)) for ids, logprobs in sampled]
        self._settings = settings
        self._meter = meter
        self._answered = 0
        self._working: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until it is cancelled."""
        reader = await self.reader(topics.REQUESTED_COMPLETIONS, partitions=1)
        while True:
            for record in await reader.read(timeout_s=1.0, records_max=1000):
                task = asyncio.create_task(self._meter.counting(self._answer(record)))
                self._working.add(task)
                task.add_done_callback(self._working.discard)

    async def report(self) -> None:
        """Say that the lane serves, again and again."""
        while True:
            report = ReportedEngine(
                lane=_LANE,
                epoch=_EPOCH,
                url="",
                is_serving=True,
                lineage=0,
                version=0,
                running=0,
                queued=0,
                reported_ms=time.time_ns() // 1_000_000,
            )
            await self.write(topics.REPORTED_ENGINES, report)
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _answer(self, record: Record) -> None:
        asked = topics.decode(topics.REQUESTED_COMPLETIONS, record.value)
        assert isinstance(asked, RequestedCompletion)
        self._answered += 1
        output, logprobs = self._answers[self._answered % _ANSWERS]
        if asked.is_live:
            await self._sample(asked, output)
        else:
            await asyncio.sleep(self._settings.engine_s)
        finished = FinishedCompletion(
            request_id=asked.request_id,
            attempt=asked.attempt,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            lane=_LANE,
            epoch=_EPOCH,
            finish_reason="length",
            turn=asked.turn,
            parent_id=asked.parent_id,
            shared_prefix_tokens=asked.shared_prefix_tokens,
            context=_after_shared(asked),
            output=output,
            logprobs=logprobs,
            spans=(WeightSpan(start=0, end=self._settings.tokens, lineage=0, version=0),),
            engine_s=self._settings.engine_s,
        )
        await self.write(topics.FINISHED_COMPLETIONS, finished, group=asked.group_id)

    async def _sample(self, asked: RequestedCompletion, output: bytes) -> None:
        """Tell the gateway ten times a second what is sampled, as an inference process does."""
        ids, told = unpack_ids(output), 0
        pieces = max(1, round(self._settings.engine_s / _CHUNK_EVERY_S))
        for piece in range(1, pieces + 1):
            await asyncio.sleep(self._settings.engine_s / pieces)
            done = len(ids) * piece // pieces
            chunk = SampledChunk(
                request_id=asked.request_id,
                attempt=asked.attempt,
                group_id=asked.group_id,
                start=told,
                tokens=pack_ids(ids[told:done]),
            )
            await self.write(topics.SAMPLED_CHUNKS, chunk, group=asked.group_id)
            told = done


def _after_shared(asked: RequestedCompletion) -> bytes:
    """The context's tokens behind those that the parent has."""
    if asked.is_delta or not asked.shared_prefix_tokens:
        return asked.context
    return pack_ids(unpack_ids(asked.context)[asked.shared_prefix_tokens :])


class StandInScheduler(Participant):
    """Admits every group at once, and retires it when its episodes have ended."""

    async def admit(self) -> None:
        """Admit until it is cancelled."""
        reader = await self.reader(topics.REQUESTED_GROUPS, partitions=1)
        while True:
            for record in await reader.read(timeout_s=1.0, records_max=1000):
                asked = topics.decode(topics.REQUESTED_GROUPS, record.value)
                assert isinstance(asked, RequestedGroup)
                admitted = AdmittedGroup(
                    group_id=asked.group_id,
                    domain=asked.domain,
                    purpose=asked.purpose,
                    group_size=asked.group_size,
                    task=asked.task,
                    version_at_admission=0,
                    queue_index=record.offset,
                )
                await self.write(topics.ADMITTED_GROUPS, admitted)

    async def retire(self) -> None:
        """Retire until it is cancelled."""
        reader = await self.reader(topics.FINISHED_EPISODES, partitions=self._partitions)
        ended: Counter[str] = Counter()
        while True:
            for record in await reader.read(timeout_s=1.0, records_max=1000):
                episode = topics.decode(topics.FINISHED_EPISODES, record.value)
                assert isinstance(episode, FinishedEpisode)
                ended[episode.group_id] += 1
                if ended[episode.group_id] == episode.group_size:
                    await self._retire(episode)

    async def _retire(self, episode: FinishedEpisode) -> None:
        retired = RetiredGroup(
            group_id=episode.group_id,
            domain=episode.domain,
            purpose=episode.purpose,
            reason="zero_variance",
            queue_index=0,
        )
        await self.write(topics.RETIRED_GROUPS, retired, group=episode.group_id)


@asynccontextmanager
async def _until_over(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def configured(settings: AloneSettings) -> RunConfiguration:
    """The run's configuration."""
    return msgspec.json.decode(Path(settings.run_file).read_bytes(), type=RunConfiguration)


async def main(settings: AloneSettings) -> None:
    """Serve until SIGTERM."""
    favour_event_loop()
    allow_connections()
    configuration = await asyncio.to_thread(configured, settings)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    log = MemoryLog(run=configuration.run, clock_ms=lambda: time.time_ns() // 1_000_000)
    await log.create_topics(
        {topic.name: topics.partition_count(topic, configuration) for topic in topics.OF_RUN}
    )
    writer, partitions = await log.writer(), configuration.log.group_partitions
    meter = Meter(Path(settings.meter_file))
    lane = StandInLane(log, writer, partitions=partitions, settings=settings, meter=meter)
    scheduler = StandInScheduler(log, writer, partitions=partitions)
    works = lane.run(), lane.report(), scheduler.admit(), scheduler.retire()
    async with _until_over(*(meter.counting(work) for work in works)):
        await serve(
            configuration=configuration,
            settings=parse(GatewaySettings, prefix="FORGEMQ_GATEWAY_", environ=os.environ),
            log=log,
            telemetry=Telemetry(service="gateway"),
            stop=stop,
        )


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse(AloneSettings, prefix="FORGEMQ_LOAD_ALONE_", environ=os.environ)))
