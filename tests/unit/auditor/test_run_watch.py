"""What the records of a run add up to is exported, from a log in memory."""

import asyncio
import io
from pathlib import Path

import msgspec

from forgemq_auditor.run_metrics import export_state, export_verdicts
from forgemq_auditor.run_watch import RunWatch, keep_watched
from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.messages import Message
from forgemq_contracts.run import StartedRun
from forgemq_contracts.steps import Alarm, TrainedStep
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.metered import metered
from tests.unit.run_view import live_run
from tests.unit.run_view.live_run import LiveRun
from tests.unit.run_view.synthetic import SyntheticRun, started


class Clock:
    now_ms = 0


async def log_of(of: StartedRun, clock: Clock) -> MemoryLog:
    log = MemoryLog(run="r", clock_ms=lambda: clock.now_ms)
    await log.create_topics(
        {**partition_counts(of.configuration), "started-runs-v1": 1, "ended-runs-v1": 1}
    )
    return log


async def write(log: MemoryLog, messages: list[Message], clock: Clock) -> None:
    writer = await log.writer()
    for message in messages:
        clock.now_ms = message.timestamp_ms
        value = topics.encode(message.record)
        await writer.write(
            Emit(topic=message.topic, partition=message.partition, key=b"", value=value)
        )
    await writer.close()


async def read_run(run: SyntheticRun | LiveRun, of: StartedRun) -> RunWatch:
    clock = Clock()
    log = await log_of(of, clock)
    await write(log, run.messages, clock)
    watch = RunWatch(log, of)
    await watch.read_on()
    return watch


def checked(watch: RunWatch) -> dict[str, int]:
    return watch.confirmed(watch.ledger.verdicts(is_ended=False, is_audit_behind=True))


async def test_progress_queues_staleness_and_alarms_of_a_run_are_exported():
    run = SyntheticRun().play(steps=2)
    alarm = Alarm(metric="kl_k3", value=0.2, threshold=0.1)
    run.messages = [
        msgspec.structs.replace(m, record=msgspec.structs.replace(m.record, alarms=(alarm,)))
        if isinstance(m.record, TrainedStep)
        else m
        for m in run.messages
    ]
    watch = await read_run(run, started())
    telemetry, held = metered("auditor")
    export_state(watch.view.state(now_ms=20_000), telemetry)
    found = held()
    desk = ("domain", "shop_desk")
    assert found["run.steps_trained", ()] == 2
    assert found["run.success", ()] == 1.0
    assert found["run.groups_trained", (desk, ("staleness", 0))] == 4
    assert found["run.staleness", (desk,)] == 0
    assert found["run.staleness_limit", (desk,)] == 2
    assert (found["run.slots", (desk,)], found["run.slots_held", (desk,)]) == (4, 0)
    assert found["run.groups_retired", (("reason", "trained"),)] == 4
    assert found["run.alarms", (("metric", "kl_k3"),)] == 2
    assert {value for (name, _), value in found.items() if name == "run.stalled"} == {0}


async def test_the_reason_of_a_stall_is_1_and_every_other_one_is_0():
    run = LiveRun(0)
    run.play(200)
    run.stopped.add("merger")
    run.play(400)
    watch = await read_run(run, live_run.started())
    watch.view.state(now_ms=run.now_ms - 60_000)
    telemetry, held = metered("auditor")
    export_state(watch.view.state(now_ms=run.now_ms), telemetry)
    stalled = {
        dict(labels)["reason"]: value
        for (name, labels), value in held().items()
        if name == "run.stalled"
    }
    assert stalled.pop("service_silent") == 1
    assert len(stalled) == 7
    assert set(stalled.values()) == {0}


async def test_a_violation_counts_once_two_checks_have_found_it():
    run = SyntheticRun().play(steps=2)
    run.retire("g-0", reason="cancelled")
    watch = await read_run(run, started())
    assert checked(watch) == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), 0)
    violations = checked(watch)
    assert violations == {"G1": 1, "G2": 0, "G3": 0, "G4": 0, "G5": 0}
    telemetry, held = metered("auditor")
    export_verdicts(violations, telemetry)
    found = held()
    assert found["auditor.violations", (("guarantee", "G1"),)] == 1
    assert found["auditor.violations", (("guarantee", "G4"),)] == 0
    assert found["auditor.checks", (("guarantee", "G5"),)] == 1


async def test_trained_groups_that_no_auditor_has_come_to_yet_are_no_violation():
    watch = await read_run(SyntheticRun().play(steps=2), started())
    checked(watch)
    assert set(checked(watch).values()) == {0}
    unknown = watch.ledger.verdicts(is_ended=False)
    assert [verdict.name for verdict in unknown if not verdict.holds] == ["G2", "G3", "G4"]


async def test_what_is_written_later_is_read_by_the_next_look():
    run, clock = SyntheticRun().play(steps=2), Clock()
    log = await log_of(started(), clock)
    watch = RunWatch(log, started())
    for messages, steps in ((run.messages[:40], 1), (run.messages[40:], 2)):
        await write(log, messages, clock)
        await watch.read_on()
        assert watch.view.state(now_ms=0).steps_trained == steps


async def test_the_service_exports_until_it_stops_and_reads_nothing_without_an_exporter(
    tmp_path: Path,
):
    run, clock = SyntheticRun().play(steps=2), Clock()
    log = await log_of(started(), clock)
    await write(log, run.messages, clock)
    telemetry, held = metered("auditor")
    context = Context(
        started=started(),
        log=log,
        blobs=BlobStore(str(tmp_path), run="r"),
        telemetry=telemetry,
        stop=asyncio.Event(),
        environ={},
    )
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(keep_watched(context, every_s=0.05))
        for _ in range(500):
            if ("auditor.checks", (("guarantee", "G1"),)) in held():
                break
            await asyncio.sleep(0.01)
        context.stop.set()
    assert held()["run.steps_trained", ()] == 2
    await log.close()  # A read would fail now.
    silent = Telemetry(service="auditor", stream=io.StringIO())
    quiet = Context(
        started=started(),
        log=log,
        blobs=context.blobs,
        telemetry=silent,
        stop=asyncio.Event(),
        environ={},
    )
    await keep_watched(quiet, every_s=0.05)
