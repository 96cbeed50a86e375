"""How many completions a second pass through all topics on this machine?

Broker, gateway, inference, reward, merger and scheduler are real, each in its own process. Three
parts are stand-ins: the engine answers after a fixed time with a fixed number of tokens, the
trainer takes steps without computing, and agents do nothing between two turns.
`make load NAME=data_path`.

What it costs is compared with the least that could move the same bytes on the same machine in the
same run: `cpu_over_bare` (data_path_bare.py).

`small`: contexts of about 200 tokens. `context_196k`: contexts of 196,608 tokens, sent again as a
whole every turn; 12 completions a second are a million a day.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from data_path_agents import Played
from data_path_bare import Shape, bare_cpu_ms
from data_path_system import SERVICES, STAND_INS, RunningSystem, Workload, running
from measurement import Measurement, arguments
from msgspec import Struct

from forgemq_bus.broker import BrokerError
from forgemq_bus.errors import LogError
from forgemq_bus.log import Log, Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import MergedGroup, ScoredGroup
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.supervisor import ProcessFailedError
from forgemq_telemetry.causes import causes

WORKLOADS = {
    "small": Workload(
        agents=96,
        turns=4,
        prompt_messages=1,
        message_words=50,
        turn_words=16,
        output_tokens=32,
        engine_s=0.1,
        context_tokens_max=1024,
        group_size=8,
        groups_per_step=32,
        slots=64,
        warm_up_s=15.0,
        measure_s=40.0,
    ),
    "context_196k": Workload(
        agents=24,
        turns=24,
        prompt_messages=47,
        message_words=2_075,
        turn_words=32,
        output_tokens=64,
        engine_s=0.5,
        context_tokens_max=204_800,
        group_size=4,
        groups_per_step=2,
        slots=16,
        warm_up_s=45.0,
        measure_s=40.0,
    ),
}
# Kafka, five services and the first group, on a machine that others use too.
START_TIMEOUT_S = 120.0
FAILURES = (ProcessFailedError, BrokerError, LogError, MachineError, TimeoutError)
_READ_S = 0.5
_PROCESSES = (*SERVICES, "broker", "trainer", *STAND_INS)


class Window(Struct, frozen=True, kw_only=True):
    """The time of the measurement, and what the system used in it.

    Attributes:
        wall_ms: Start and end, Unix time.
        monotonic_s: Start and end on the monotonic clock, which the agents' process shares.
        cpu_s: CPU time by process.
        stored_bytes: Bytes written to segments and blobs.
        steps: Steps trained.
        load: One-minute load average at start and end.
    """

    wall_ms: tuple[int, int]
    monotonic_s: tuple[float, float]
    cpu_s: Mapping[str, float]
    stored_bytes: int
    steps: int
    load: tuple[float, float]

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return self.monotonic_s[1] - self.monotonic_s[0]


class Outcome(Struct, frozen=True, kw_only=True):
    """Results of a case: completions delivered and merged within the window.

    `bare_cpu_ms`: CPU time for the same bytes through a bare server and two topics.
    """

    window: Window
    delivered: int
    merged: int
    played: Sequence[Played]
    bare_cpu_ms: float


async def measure(name: str, workload: Workload, *, folder: Path) -> Outcome:
    """Start the system, let it warm up, measure it, and count its completions on the log."""
    async with running(name, workload, folder=folder) as system:
        await _wait_for_first_completion(system)
        await asyncio.sleep(workload.warm_up_s)
        window = await _measure_window(system, workload.measure_s)
        delivered = await _read_records(system, topics.DELIVERED_COMPLETIONS)
        scored = await _read_records(system, topics.SCORED_GROUPS)
        merged = await _read_records(system, topics.MERGED_GROUPS)
        await system.supervisor.stop()
        lines = await asyncio.to_thread(system.played.read_bytes)
        started_s, ended_s = window.monotonic_s
        played = [
            each
            for each in msgspec.json.Decoder(Played).decode_lines(lines)
            if started_s <= each.ended_s < ended_s
        ]
        count = sum(_is_within(record, window) for record in delivered)
        shape = _shape(workload, played, window=window, kafka=system.kafka)
        bare_ms = await bare_cpu_ms(shape, broker=system.broker)
    return Outcome(
        window=window,
        delivered=count,
        merged=_merged_completions(scored, [r for r in merged if _is_within(r, window)]),
        played=played,
        bare_cpu_ms=bare_ms,
    )


def _shape(workload: Workload, played: Sequence[Played], *, window: Window, kafka: str) -> Shape:
    """What a completion moved, for the baseline."""
    count = max(1, len(played))
    return Shape(
        kafka=kafka,
        body_bytes=round(_mean([each.body_bytes for each in played])),
        reply_bytes=round(_mean([each.reply_bytes for each in played])),
        log_bytes=window.stored_bytes // count,
        engine_s=workload.engine_s,
        clients=workload.agents,
    )


async def _wait_for_first_completion(system: RunningSystem) -> None:
    """Wait until the first completion is delivered.

    Raises:
        TimeoutError: none was delivered in time.
    """
    partitions = _partitions(system, topics.DELIVERED_COMPLETIONS)
    async with asyncio.timeout(START_TIMEOUT_S):
        reader = await system.log.reader(await system.log.first_positions(partitions))
        try:
            while not await reader.read(timeout_s=_READ_S, records_max=1):
                pass
        finally:
            await reader.close()


async def _measure_window(system: RunningSystem, duration_s: float) -> Window:
    cpu_s, stored, steps = system.cpu_s(), system.stored_bytes(), system.trainer.steps
    wall_ms, began_s, load = time.time_ns() // 1_000_000, time.monotonic(), os.getloadavg()[0]
    await asyncio.sleep(duration_s)
    ended = system.cpu_s()
    return Window(
        wall_ms=(wall_ms, time.time_ns() // 1_000_000),
        monotonic_s=(began_s, time.monotonic()),
        cpu_s={name: ended[name] - before for name, before in cpu_s.items()},
        stored_bytes=system.stored_bytes() - stored,
        steps=system.trainer.steps - steps,
        load=(load, os.getloadavg()[0]),
    )


async def _read_records(system: RunningSystem, topic: topics.Topic) -> list[Record]:
    """Read every record of the topic up to its present end."""
    return await _read_all(system.log, _partitions(system, topic))


async def _read_all(log: Log, partitions: Sequence[Place]) -> list[Record]:
    ends = await log.end_positions(partitions)
    reader = await log.reader(await log.first_positions(partitions))
    found: list[Record] = []
    try:
        while any(reader.position(partition) < end for partition, end in ends.items()):
            found += await reader.read(timeout_s=_READ_S, records_max=10_000)
    finally:
        await reader.close()
    return found


def _partitions(system: RunningSystem, topic: topics.Topic) -> list[Place]:
    count = system.configuration.log.group_partitions
    return [Place(topic.name, partition) for partition in range(count)]


def _is_within(record: Record, window: Window) -> bool:
    return window.wall_ms[0] <= record.timestamp_ms < window.wall_ms[1]


def _merged_completions(scored: Sequence[Record], merged: Sequence[Record]) -> int:
    """Number of completions in the merged groups that have a tree."""
    counts: dict[str, int] = {}
    for record in scored:
        group = topics.decode(topics.SCORED_GROUPS, record.value)
        assert isinstance(group, ScoredGroup), "the registry says so"
        counts[group.group_id] = len(group.completions)
    total = 0
    for record in merged:
        summary = topics.decode(topics.MERGED_GROUPS, record.value)
        assert isinstance(summary, MergedGroup), "the registry says so"
        total += 0 if summary.not_trainable else counts[summary.group_id]
    return total


def report(measurement: Measurement, case: str, outcome: Outcome, *, engine_s: float) -> None:
    """Add the rows of one case to the measurement."""
    window, delivered = outcome.window, outcome.delivered
    parts = (*SERVICES, "broker")
    system_ms = 1000 * sum(window.cpu_s.get(name, 0.0) for name in parts) / max(1, delivered)
    added_ms = sorted(1000 * (played.took_s - engine_s) for played in outcome.played)
    rows = [
        ("completions_per_second", delivered / window.duration_s, "1/s"),
        ("merged_completions_per_second", outcome.merged / window.duration_s, "1/s"),
        ("trained_steps", window.steps, "steps"),
        ("context_tokens", _mean([p.context_tokens for p in outcome.played]), "tokens, mean"),
        ("output_tokens", _mean([p.output_tokens for p in outcome.played]), "tokens, mean"),
        ("added_latency_p50", _percentile(added_ms, 50), "ms"),
        ("added_latency_p99", _percentile(added_ms, 99), "ms"),
        ("log_bytes_per_completion", window.stored_bytes / max(1, delivered), "bytes"),
        ("cpu_over_bare", system_ms / outcome.bare_cpu_ms, "x"),
        ("cpu_bare", outcome.bare_cpu_ms, "ms per completion"),
        ("cpu", 1000 * sum(window.cpu_s.values()) / max(1, delivered), "ms per completion"),
    ]
    rows += [
        (f"cpu_{name}", 1000 * window.cpu_s[name] / max(1, delivered), "ms per completion")
        for name in _PROCESSES
        if name in window.cpu_s
    ]
    for metric, value, unit in rows:
        measurement.row(case, metric, value, unit)
    load = "{:.1f} at the start, {:.1f} at the end".format(*window.load)
    measurement.conditions[f"{case}, load average"] = load


def _text_of(workload: Workload) -> str:
    return ", ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(workload).items())


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def main() -> int:
    """Measure the named cases, or all of them."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="data_path",
        question="How many completions a second pass through all topics on this machine?",
    )
    for case, workload in WORKLOADS.items():
        if options.case and case not in options.case:
            continue
        measurement.conditions[case] = _text_of(workload)
        try:
            with tempfile.TemporaryDirectory(prefix="forgemq-load-") as folder:
                outcome = asyncio.run(measure(case, workload, folder=Path(folder)))
        except* FAILURES as failures:
            lines = "\n".join(str(cause) or type(cause).__name__ for cause in causes(failures))
            sys.exit(f"{case}: the system under load failed: {lines}")
        report(measurement, case, outcome, engine_s=workload.engine_s)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
