"""The shell in its own processes on a real broker: start, kill -9, stop, and clear failures."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_shell.records import emit_of
from tests.simulation.harness import records_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PARTITIONS = 2
READY_S = 60


class Process:
    """One process of the service and its stderr."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.path = folder / f"stderr-{len(list(folder.iterdir()))}"
        with self.path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.counting_service", *arguments],
                cwd=ROOT,
                env={**clean_environment(), **environ},
                stderr=stderr,
            )

    def events(self) -> list[dict]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def until(self, event: str) -> None:
        deadline_s = time.monotonic() + READY_S
        while not any(line["event"] == event for line in self.events()):
            assert self.process.poll() is None, self.path.read_text(encoding="utf-8")
            assert time.monotonic() < deadline_s, f"no {event} within {READY_S} s"
            await asyncio.sleep(0.05)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, READY_S)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FORGEMQ_")}


@contextmanager
def killed_at_the_end(*processes: Process):
    try:
        yield
    finally:
        for process in processes:
            if process.process.poll() is None:
                process.process.kill()
                process.process.wait(10)


@pytest.fixture
async def run(kafka_log: KafkaLog, kafka_bootstrap: str, tmp_path: Path) -> dict:
    """Environment of a service whose run is on the log."""
    name = kafka_log._run
    names = [topics.SCORED_GROUPS.name, topics.MERGED_GROUPS.name, topics.MERGER_JOURNAL.name]
    single = [topics.STARTED_RUNS.name, topics.SCORED_GROUPS.dlq_name]
    await kafka_log.create_topics(dict.fromkeys(single, 1) | dict.fromkeys(names, PARTITIONS))
    configuration = RunConfiguration(
        run=name,
        seed=1,
        model=Model(path="model"),
        queues=(Queue(domain="d", task_source="m:t", agent="m:a", slots=64),),
        trainer=Trainer(steps=1),
        log=LogLayout(group_partitions=PARTITIONS),
    )
    blobs = str(tmp_path / "blobs")
    started = StartedRun(
        run=name,
        configuration=configuration,
        blobs=blobs,
        started_ms=1,
        has_blob_folder=await BlobStore(blobs, run=name).make_folder(makes_address=True),
    )
    writer = await kafka_log.writer()
    await writer.write(emit_of(Output(topic=topics.STARTED_RUNS.name, partition=0, record=started)))
    (tmp_path / "lines").mkdir()
    return {
        "FORGEMQ_RUN": name,
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_TRANSFORM_SNAPSHOT_EVERY_BATCHES": "5",
    }


async def score(log: KafkaLog, numbers: range) -> None:
    writer = await log.writer()
    await writer.write_all(
        [
            emit_of(
                Output(
                    topic=topics.SCORED_GROUPS.name,
                    partition=number % PARTITIONS,
                    record=ScoredGroup(
                        group_id=f"g-{number}", domain="d", purpose="train", episodes=()
                    ),
                )
            )
            for number in numbers
        ]
    )
    await writer.close()


async def merged(log: KafkaLog) -> dict[int, list[tuple[str, int]]]:
    places = [Place(topics.MERGED_GROUPS.name, number) for number in range(PARTITIONS)]
    written = await records_of(log, places, timeout_s=0.2)
    return {
        place.partition: [
            (record.group_id, record.loss_tokens)
            for record in (topics.decode(topics.MERGED_GROUPS, value) for _, value in records)
        ]
        for place, records in written.items()
    }


async def until_merged(log: KafkaLog, count: int) -> dict[int, list[tuple[str, int]]]:
    deadline_s = time.monotonic() + READY_S
    while sum(map(len, (found := await merged(log)).values())) < count:
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.2)
    return found


def expected(count: int) -> dict[int, list[tuple[str, int]]]:
    return {
        partition: [(f"g-{n}", i + 1) for i, n in enumerate(range(count)[partition::PARTITIONS])]
        for partition in range(PARTITIONS)
    }


async def test_killed_and_started_again_a_service_writes_every_output_exactly_once(
    kafka_log: KafkaLog, run: dict, tmp_path: Path
):
    first, second = (Process(tmp_path / "lines", **run) for _ in range(2))
    with killed_at_the_end(first, second):
        await first.until("assigned")
        await second.until("assigned")
        for start in range(0, 200, 20):
            await score(kafka_log, range(start, start + 20))
            await asyncio.sleep(0.03)
        first.process.send_signal(signal.SIGKILL)
        await score(kafka_log, range(200, 300))
        third = Process(tmp_path / "lines", **run)
        with killed_at_the_end(third):
            assert await until_merged(kafka_log, 300) == expected(300)
            second.process.send_signal(signal.SIGTERM)
            assert await second.ended() == 0
            await score(kafka_log, range(300, 340))
            assert await until_merged(kafka_log, 340) == expected(340)
            third.process.send_signal(signal.SIGINT)
            assert await third.ended() == 0
    assert third.events()[-1]["event"] == "ended"
    assert "Traceback" not in third.path.read_text(encoding="utf-8")


async def test_a_service_waits_at_its_start_for_a_blob_folder_that_is_not_mounted(
    kafka_log: KafkaLog, run: dict, tmp_path: Path
):
    (tmp_path / "blobs").rename(tmp_path / "away")
    (tmp_path / "blobs").mkdir()  # What a mount point is without its mount.
    process = Process(tmp_path / "lines", **run)
    with killed_at_the_end(process):
        await process.until("blob_store_silent")
        assert "started" not in [line["event"] for line in process.events()]
        (tmp_path / "blobs").rmdir()
        (tmp_path / "away").rename(tmp_path / "blobs")
        await process.until("assigned")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
    (silent,) = [line for line in process.events() if line["event"] == "blob_store_silent"]
    assert "is the blob store of the run mounted?" in silent["error"]


async def test_a_collector_that_never_answers_neither_slows_nor_holds_a_service(
    kafka_log: KafkaLog, run: dict, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects, nobody reads
        environ = {
            **run,
            "FORGEMQ_TELEMETRY_EXPORTER": "otlp",
            "FORGEMQ_TELEMETRY_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "FORGEMQ_TELEMETRY_EXPORT_EVERY_S": "0.5",
        }
        process = Process(tmp_path / "lines", **environ)
        with killed_at_the_end(process):
            await process.until("assigned")
            began_s = time.monotonic()
            for start in range(0, 3000, 500):  # more spans than the exporter keeps
                await score(kafka_log, range(start, start + 500))
            assert await until_merged(kafka_log, 3000) == expected(3000)
            assert time.monotonic() - began_s < 10
            process.process.send_signal(signal.SIGTERM)
            stopping_s = time.monotonic()
            assert await process.ended() == 0
            assert time.monotonic() - stopping_s < 8  # 3 of them for what is left to send
    assert process.events()[-1]["event"] == "ended"
    library = [line for line in process.events() if line["event"] == "library_log"]
    # The first group of a broker waits for its coordinator, which aiokafka reports.
    assert {line["logger"].split(".")[0] for line in library} <= {"aiokafka", "opentelemetry"}
    # How many depends on how often the exporter tries in the time that the machine takes.
    assert len(library) < 3000 / 100, "there is no line for each span that is lost"


async def test_a_broken_service_says_why_in_one_line_and_exits_with_1(run: dict, tmp_path: Path):
    process = Process(tmp_path / "lines", "broken", **run)
    with killed_at_the_end(process):
        assert await process.ended() == 1
    last = process.events()[-1]
    assert last["event"] == "failed"
    assert last["error"] == f"RuntimeError: the invariant of {run['FORGEMQ_RUN']} is broken"
    assert "Traceback" in process.path.read_text(encoding="utf-8")


async def test_a_service_that_does_not_hear_the_stop_is_ended_after_its_grace(
    run: dict, tmp_path: Path
):
    process = Process(tmp_path / "lines", "deaf", **run, FORGEMQ_SERVICE_STOP_GRACE_S="0.5")
    with killed_at_the_end(process):
        await process.until("deaf")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 0
    assert [line["event"] for line in process.events()][-2:] == ["stopping", "stopped_late"]


async def test_a_run_that_nobody_started_is_named(run: dict, tmp_path: Path):
    environ = {**run, "FORGEMQ_RUN": "nobody", "FORGEMQ_SERVICE_START_TIMEOUT_S": "1"}
    process = Process(tmp_path / "lines", **environ)
    with killed_at_the_end(process):
        assert await process.ended() == 1
    assert (
        "no record of run 'nobody' on started-runs-v1 within 1 s" in process.events()[-1]["error"]
    )


async def test_a_stop_while_waiting_for_the_run_ends_at_once(run: dict, tmp_path: Path):
    process = Process(tmp_path / "lines", **{**run, "FORGEMQ_RUN": "nobody"})
    with killed_at_the_end(process):
        await asyncio.sleep(2)
        process.process.send_signal(signal.SIGINT)
        assert await process.ended() == 0
