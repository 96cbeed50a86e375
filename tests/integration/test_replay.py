"""`forgemq replay` over a whole run: the same bytes, or the first difference."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.broker import LocalBroker
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.records.run_topics import create_topics, write_start
from forgemq_launcher.run_folder import RunFolder
from forgemq_shell.records import emit_of
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import GROUP_PARTITIONS, Accounts, accounts, records_of
from tests.integration.stand_in import stand_in_engine
from tests.unit.merger.records import finished, scored

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS = 3
LINE = re.compile(
    r"(?P<task>\w+ \d): (?P<inputs>\d+) inputs, (?P<ticks>\d+) ticks, (?P<outputs>\d+) outputs in "
    r"batches (?P<first>\d+) to (?P<last>\d+): (?P<verdict>.*)"
)


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that has ended, and the command line tool for it."""

    runs: Path
    run_id: str
    kafka: str

    @property
    def configuration(self) -> RunConfiguration:
        return RunFolder(self.runs / self.run_id).configuration()

    @property
    def blobs(self) -> str:
        return str(self.runs / self.run_id / "blobs")

    def accounts(self) -> Accounts:
        return accounts(self.kafka, run=self.run_id, blobs=self.blobs)

    def replay(self, *arguments: str, is_up: bool = True) -> tuple[int, list[str]]:
        """Exit status and lines of `forgemq replay`; if no broker is up it starts the run's own."""
        environ = {"FORGEMQ_LAUNCHER_RUNS": str(self.runs), "PATH": os.environ["PATH"]}
        if is_up:
            environ["FORGEMQ_KAFKA"] = self.kafka
        console = Console(file=io.StringIO(), width=200)
        status = run_tool(("replay", self.run_id, *arguments), environ=environ, console=console)
        return status, console.file.getvalue().splitlines()

    def ends(self) -> dict[Place, int]:
        """End position of every partition of the run."""

        async def read() -> dict[Place, int]:
            log = KafkaLog(KafkaConnection(bootstrap=self.kafka), run=self.run_id)
            try:
                of_run = [partitions_of(topic, self.configuration) for topic in topics.OF_RUN]
                return await log.end_positions([place for places in of_run for place in places])
            finally:
                await log.close()

        return asyncio.run(read())

    def write_start(self, configuration: RunConfiguration) -> None:
        """Put the run on the log again, as a resume does."""
        started = StartedRun(
            run=self.run_id, configuration=configuration, blobs=self.blobs, started_ms=2**41
        )
        asyncio.run(write_start(KafkaConnection(bootstrap=self.kafka), started))


def lines_by_task(lines: Sequence[str]) -> Mapping[str, re.Match[str]]:
    """The result line of each task that had something to replay."""
    return {found["task"]: found for line in lines if (found := LINE.fullmatch(line))}


@pytest.fixture(scope="module")
def run(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> EndedRun:
    """A dialogue run that keeps everything, with a snapshot after every fifth batch."""
    run_id = new_run_id()
    launched = LaunchedRun(
        tmp_path_factory.mktemp("replay"),
        {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_TRANSFORM_SNAPSHOT_EVERY_BATCHES": "5"},
    )
    chosen = (f"trainer.steps={STEPS}", "evaluation.tasks=0", "log.keep_for_replay=true")
    with stand_in_engine(latency_s=0.05, tokens=8) as engine:
        try:
            launched.start(
                DIALOGUE, f"run={run_id}", *chosen, environ={"FORGEMQ_ENGINE_URL": engine}
            )
            launched.wait_for_end(within_s=200)
            assert launched.report(run_id)["steps"] == STEPS, launched.story()
        finally:
            launched.close()
    return EndedRun(runs=launched.runs, run_id=run_id, kafka=kafka_bootstrap)


def test_every_service_writes_the_bytes_that_stand_on_the_log_and_adds_none(run: EndedRun):
    before = run.ends()
    status, lines = run.replay()
    assert status == 0, lines
    tasks = lines_by_task(lines)
    assert {found["verdict"] for found in tasks.values()} == {"equal"}
    idle = [line for line in lines if line.endswith("nothing journalled that could be replayed")]
    assert len(tasks) + len(idle) == len(lines) == 2 * GROUP_PARTITIONS + 1
    assert run.ends() == before

    log = run.accounts()
    written = {
        "reward": len(log.scored),
        "merger": len(log.merged) + len(log.trees),
        "scheduler": len(log.admitted) + len(log.scheduled) + len(log.retired),
    }
    for service, outputs in written.items():
        of_service = [found for task, found in tasks.items() if task.startswith(service)]
        assert sum(int(found["outputs"]) for found in of_service) == outputs
        assert max(int(found["last"]) for found in of_service) >= 5  # snapshots were compared too
        assert {found["first"] for found in of_service} == {"0"}


def test_one_partition_of_one_service_is_replayed_alone(run: EndedRun):
    status, lines = run.replay("merger", "--partition", "1")
    assert (status, len(lines)) == (0, 1)
    assert lines[0].startswith("merger 1: ")


def test_a_recording_of_the_run_replays_without_the_run(run: EndedRun, tmp_path: Path):
    status, lines = run.replay("scheduler", "--to", str(tmp_path / "incident"))
    assert (status, len(lines)) == (0, 1), lines
    file = tmp_path / "incident" / "scheduler-0.recording"
    assert lines[0].endswith(f" records in {file}")
    done = subprocess.run(
        [sys.executable, "-m", "forgemq_scheduler", "replay", str(file)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, run.replay("scheduler")[1][0] + "\n")


def test_another_core_is_told_by_the_first_record_that_differs_with_both_values(run: EndedRun):
    """Another baseline changes what reward's core writes, and nothing in the merger's output."""
    right = run.configuration
    rewards = msgspec.structs.replace(right.rewards, baseline="leave_one_out")
    run.write_start(msgspec.structs.replace(right, rewards=rewards))
    try:
        status, lines = run.replay("reward")
        others = run.replay("merger")
    finally:
        run.write_start(right)
    assert status == 1, lines
    assert others[0] == 0, others
    where, on_log, replayed = next(
        lines[at : at + 3] for at, line in enumerate(lines) if "first difference" in line
    )
    found = re.search(
        r"first difference at scored-groups-v1/(?P<partition>\d)@(?P<offset>\d+) \(batch \d+\) in "
        r"completions\.0\.advantage \((?P<written>\S+) on the log, (?P<replayed>\S+) replayed\)$",
        where,
    )
    assert found, where
    assert on_log.startswith("  on the log: {")
    assert replayed.startswith("  replayed:   {")
    (group,) = re.findall(r'"group_id":"([^"]+)"', on_log)
    assert [group] == re.findall(r'"group_id":"([^"]+)"', replayed)
    (record,) = [each for each in run.accounts().scored if each.group_id == group]
    size = right.queues[0].group_size
    assert record.completions[0].advantage == float(found["written"])
    assert float(found["replayed"]) == pytest.approx(
        float(found["written"]) * size / (size - 1), rel=1e-6
    )


def test_a_partition_or_a_service_that_is_not_there_is_refused_by_name(run: EndedRun):
    assert run.replay("merger", "--partition", "7") == (
        2,
        ["merger: --partition 7: the journal has partitions 0 to 1"],
    )
    with pytest.raises(SystemExit) as refused:
        run.replay("trainer")
    assert refused.value.code == 2


def test_inputs_that_are_gone_are_named_and_a_run_that_is_down_gets_its_own_broker_back(
    tmp_path: Path,
):
    configuration = RunConfiguration(
        run="small",
        seed=0,
        model=Model(path="unused"),
        queues=(Queue(domain="shop", task_source="", agent=""),),
        trainer=Trainer(steps=1),
        log=LogLayout(group_partitions=1),
    )
    folder = RunFolder(tmp_path / "small")
    folder.make(configuration)
    broker = LocalBroker(folder / "kafka")
    try:
        run = EndedRun(runs=tmp_path, run_id="small", kafka=broker.start())
        asyncio.run(merged_by_a_merger(run))
        assert run.replay("merger") == (
            0,
            ["merger 0: 2 inputs, 1 ticks, 2 outputs in batches 0 to 2: equal"],
        )
        elsewhere = EndedRun(runs=tmp_path / "another-machine", run_id="small", kafka=run.kafka)
        assert elsewhere.replay("merger") == run.replay("merger")
        asyncio.run(trimmed(run, topics.FINISHED_COMPLETIONS))
    finally:
        broker.stop()
    status, (line,) = run.replay("merger", is_up=False)
    assert status == 2
    assert line == (
        "merger 0: cannot be replayed: finished-completions-v1/0: record 0 is needed but the "
        "oldest one kept is 1; a run with log.keep_for_replay = true keeps every input"
    )
    assert not broker.is_running()


async def merged_by_a_merger(run: EndedRun) -> None:
    """A run of one completion, merged by the service in its own process."""
    log = KafkaLog(KafkaConnection(bootstrap=run.kafka), run=run.run_id)

    async def write(topic: topics.Topic, record: msgspec.Struct) -> int:
        writer = await log.writer()
        return await writer.write(emit_of(Output(topic=topic.name, partition=0, record=record)))

    async def until(topic: topics.Topic) -> None:
        for _ in range(600):
            if await records_of(log, topic.name, partitions=1):
                return
            await asyncio.sleep(0.1)
        pytest.fail(f"nothing on {topic.name} within a minute")

    environ = {**os.environ, "FORGEMQ_RUN": run.run_id, "FORGEMQ_KAFKA": run.kafka}
    try:
        await create_topics(log, run.configuration)
        await write_start(
            KafkaConnection(bootstrap=run.kafka),
            StartedRun(
                run=run.run_id, configuration=run.configuration, blobs=run.blobs, started_ms=0
            ),
        )
        merger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forgemq_merger"),
            env={**environ, "FORGEMQ_MERGER_TICK_S": "30"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            offset = await write(topics.FINISHED_COMPLETIONS, finished(0, None, 0, [1, 2], [3, 4]))
            await until(topics.MERGER_JOURNAL)
            await write(topics.SCORED_GROUPS, scored(0, offsets={0: offset}))
            await until(topics.MERGED_GROUPS)
            merger.send_signal(signal.SIGTERM)
            assert await merger.wait() == 0
        finally:
            if merger.returncode is None:
                merger.kill()
                await merger.wait()
    finally:
        await log.close()


async def trimmed(run: EndedRun, topic: topics.Topic) -> None:
    log = KafkaLog(KafkaConnection(bootstrap=run.kafka), run=run.run_id)
    try:
        await log.trim(await log.end_positions(partitions_of(topic, run.configuration)))
    finally:
        await log.close()
