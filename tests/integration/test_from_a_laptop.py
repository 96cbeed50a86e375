"""Every command against a run that plays elsewhere: only its broker and its object store are named.

The commands run in an empty folder of their own, as processes.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.launched_run import DIALOGUE, ROOT, LaunchedRun
from tests.integration.object_store import ObjectStore, object_store
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

TOOL = (sys.executable, "-m", "forgemq_launcher")
ANSWER_S = 180.0
LARGE = "log.inline_bytes_max=1024"
"""Completions of this size and above lie in the store, so commands need it."""


@dataclass(frozen=True)
class Laptop:
    """An empty folder, and the environment of its commands."""

    folder: Path
    environ: Mapping[str, str]
    processes: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*TOOL, *arguments],
            cwd=self.folder,
            env={**self.environ, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End the commands that a failed test left."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status of a command, and what it printed."""
        process = self.start(*arguments)
        printed, _ = process.communicate(timeout=ANSWER_S)
        return process.returncode, printed

    def without(self, store: ObjectStore) -> "Laptop":
        """The same laptop where the object store does not answer."""
        away = {**store.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_MAX_ATTEMPTS": "1"}
        return Laptop(self.folder, {**self.environ, **away}, self.processes)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def laptop(kafka_bootstrap: str, store: ObjectStore, tmp_path: Path) -> Iterator[Laptop]:
    (tmp_path / "laptop").mkdir()
    path = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    named = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_BLOBS": store.uri}
    laptop = Laptop(tmp_path / "laptop", {**path, **store.environ, **named})
    yield laptop
    laptop.close()


def test_a_run_elsewhere_is_created_watched_stopped_looked_at_and_deleted(
    laptop, store, kafka_bootstrap, new_run_id, tmp_path
):
    run_id, created = new_run_id(), new_run_id()
    check_create(laptop, run_id=created)
    elsewhere = LaunchedRun(
        tmp_path / "elsewhere",
        {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_BLOBS": store.uri, **store.environ},
    )
    with stand_in_engine(latency_s=0.1, tokens=16) as engine:
        try:
            # More steps than it has time for: `stop` ends it.
            long = ("trainer.steps=400", "evaluation.tasks=0", "log.keep_for_replay=true", LARGE)
            named = {"FORGEMQ_ENGINE_URL": engine}
            elsewhere.start(DIALOGUE, f"run={run_id}", *long, environ=named)
            elsewhere.wait_for_line("step 1 trained", within_s=240)
            watching = laptop.start("watch", run_id)
            status, printed = laptop.run("delete", run_id, "--yes")
            assert (status, "is up on" in printed) == (2, True), printed
            trained = next(line for line in watching.stdout if " trained: " in line)
            check_left_alone(laptop, run_id=run_id)
            stopped = laptop.run("stop", run_id, "--reason", "seen enough")
            assert stopped == (
                0,
                f"run {run_id} is asked to end\nrun {run_id} has ended: interrupted\n",
            )
            assert elsewhere.wait_for_end(within_s=120) == 130
            assert elsewhere.left_behind() == []
        finally:
            elsewhere.close()
    watched, _ = watching.communicate(timeout=ANSWER_S)
    detail = "asked to end by `forgemq stop`: seen enough"
    assert f"run {run_id} was interrupted: {detail}" in watched
    assert (watching.returncode, "staleness" in trained) == (130, True)
    report = elsewhere.report(run_id)
    assert (report["reason"], report["steps"] >= 3) == ("interrupted", True)
    check_looks(laptop, run_id=run_id, steps=report["steps"])
    check_without_blobs(laptop.without(store), run_id=run_id)
    check_delete(laptop, store, run_id=run_id)
    assert laptop.run("delete", created, "--yes")[0] == 0
    assert list(laptop.folder.iterdir()) == [laptop.folder / f"{run_id}-report"]


def check_create(laptop: Laptop, *, run_id: str) -> None:
    """The run file and what it names are on the laptop; the run is where the settings say."""
    file = laptop.folder.parent / "run.toml"
    text = (ROOT / DIALOGUE).read_text()
    file.write_text(text.replace("deploy/", f"{ROOT}/deploy/").replace("tests/", f"{ROOT}/tests/"))
    status, printed = laptop.run("create", str(file), f"run={run_id}")
    assert (status, f"run {run_id} is announced, its blobs are in s3://" in printed) == (0, True)
    again = laptop.run("stop", run_id, "--timeout", "1")
    assert (again[0], "has not ended within 1 s: is its `forgemq run`" in again[1]) == (1, True)


def check_left_alone(laptop: Laptop, *, run_id: str) -> None:
    """Ctrl-C ends the watcher, and the run goes on: `stop` finds it up."""
    watching = laptop.start("watch", run_id)
    next(line for line in watching.stdout if "in flight" in line)
    watching.send_signal(signal.SIGINT)
    printed, _ = watching.communicate(timeout=ANSWER_S)
    assert (watching.returncode, f"run {run_id} is left as it is" in printed) == (130, True)


def check_looks(laptop: Laptop, *, run_id: str, steps: int) -> None:
    status, printed = laptop.run("audit", run_id)
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert (status, printed.count("DID NOT HOLD")) == (1, 1), printed
    status, printed = laptop.run("inspect", run_id)
    assert status == 0
    group = next(line.split()[0] for line in printed.splitlines() if " trained " in line)
    status, printed = laptop.run("inspect", run_id, group)
    assert (status, printed.count(f"episode {group}.")) == (0, 4), printed
    status, printed = laptop.run("replay", run_id)
    assert (status, "equal" in printed, "differ" in printed) == (0, True, False), printed
    assert laptop.run("dlq", run_id) == (0, "no dead letters\n")
    assert laptop.run("report", run_id)[0] == 1
    report = json.loads((laptop.folder / f"{run_id}-report" / "report.json").read_text())
    assert (report["reason"], report["steps"]) == ("interrupted", steps)
    over = laptop.run("stop", run_id)
    assert over == (0, f"run {run_id} is over: interrupted\n")
    assert laptop.run("watch", run_id)[0] == 130


def check_without_blobs(laptop: Laptop, *, run_id: str) -> None:
    """What needs no payloads works; what does says which store is missing, and how to name it."""
    for command in ("watch", "inspect"):
        status, printed = laptop.run(command, run_id)
        assert status == {"watch": 130, "inspect": 0}[command], printed
        assert "what lies in the blob store is left out, set FORGEMQ_BLOBS: " in printed
    assert laptop.run("dlq", run_id) == (0, "no dead letters\n")
    for command in ("audit", "report"):
        status, printed = laptop.run(command, run_id)
        assert status == 2, printed
        assert printed.startswith("forgemq: blobs: ")
        assert "http://127.0.0.1:1/" in printed
        assert "FORGEMQ_BLOBS names where this machine reaches the run's blobs" in printed
    status, printed = laptop.run("delete", run_id, "--yes")
    assert (status, printed.count("forgemq: blobs: "), "removed" in printed) == (2, 1, False)


def check_delete(laptop: Laptop, store: ObjectStore, *, run_id: str) -> None:
    assert any(f"/{run_id}/" in key for key in store.objects)
    status, printed = laptop.run("delete", run_id, "--yes")
    assert (status, "removed its blobs and weights in s3://" in printed) == (0, True), printed
    assert f"removed topic {run_id}.requested-ends-v1\n" in printed
    assert not any(f"/{run_id}/" in key for key in store.objects)
    status, printed = laptop.run("watch", run_id)
    assert (status, f"run {run_id} has no topics on" in printed) == (1, True), printed
