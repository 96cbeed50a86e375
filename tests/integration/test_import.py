"""Conversations that were finished elsewhere, imported into a run with two gateways that is up."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.launched_run import DIALOGUE, FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

CONVERSATIONS = 200
RATED_EVERY = 4
"""Every fourth one has an outcome: 1."""
STEPS = 30
"""The run is up for longer than the imports take."""
IMPORT_WITHIN_S = 60


def write_conversations(path: Path) -> None:
    lines = []
    for number in range(CONVERSATIONS):
        messages = [
            {"role": "user", "content": f"How much is {number} + 1?"},
            {"role": "assistant", "content": str(number + 1)},
        ]
        rated = {"reward": 1.0} if number % RATED_EVERY == 0 else {}
        lines.append(json.dumps({"messages": messages, **rated}))
    path.write_text("\n".join(lines) + "\n")


class Tool:
    """`forgemq` for one run, as a user calls it in another terminal."""

    def __init__(self, run: LaunchedRun, run_id: str) -> None:
        self._run, self._run_id = run, run_id

    def begin(self, file: Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(FORGEMQ), "import", self._run_id, str(file), "--domain", "dialogue"],
            cwd=ROOT,
            env=self._run.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop_import(self, file: Path) -> tuple[int, str]:
        """Press Ctrl-C when the first conversations are on their way."""
        process = self.begin(file)
        assert process.stdout is not None
        begun = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=IMPORT_WITHIN_S)
        return process.returncode, begun + said

    def import_file(self, file: Path) -> tuple[int, str]:
        process = self.begin(file)
        said, _ = process.communicate(timeout=IMPORT_WITHIN_S)
        return process.returncode, said.splitlines()[-1]

    def say(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(FORGEMQ), *arguments],
            cwd=ROOT,
            env=self._run.environ | {"COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=IMPORT_WITHIN_S,
            check=False,
        )
        return done.stdout


def test_an_import_that_is_stopped_and_repeated_is_in_the_run_once_and_is_not_trained(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id, file = new_run_id(), tmp_path / "talks.jsonl"
    write_conversations(file)
    with stand_in_engine(latency_s=0.3, tokens=16) as engine_url:
        environ = {
            "FORGEMQ_KAFKA": kafka_bootstrap,
            "FORGEMQ_ENGINE_URL": engine_url,
            "FORGEMQ_LAUNCHER_GATEWAYS": "2",
        }
        run = LaunchedRun(tmp_path, environ)
        tool = Tool(run, run_id)
        try:
            run.start(DIALOGUE, f"run={run_id}", f"trainer.steps={STEPS}")
            run.wait_for_line(r"starting \d+ services", within_s=90)
            stopped = tool.stop_import(file)
            again = tool.import_file(file)
            repeated = tool.import_file(file)
            shown = tool.say("inspect", run_id)
            group_id = re.findall(r"(g-\w+) . import ", shown)[0]
            conversation = tool.say("inspect", run_id, group_id)
            run.wait_for_end(within_s=240)
        finally:
            run.close()
    assert stopped[0] == 130, stopped
    added = [int(re.search(r"(\d+) added", said)[1]) for _, said in (stopped, again, repeated)]
    assert sum(added) == CONVERSATIONS
    assert 0 < added[0] < CONVERSATIONS
    assert (again[0], repeated[0], added[2]) == (0, 0, 0)
    assert len(re.findall(". import ", shown)) == CONVERSATIONS
    assert re.search(
        r"user \(imported\)\nHow much is \d+ \+ 1\?\nassistant \(imported\)\n\d+\n", conversation
    )
    report = run.report(run_id)
    [imported] = report["imported"]
    assert (imported["domain"], imported["conversations"]) == ("dialogue", CONVERSATIONS)
    rated = CONVERSATIONS // RATED_EVERY
    assert (imported["tally"]["episodes"], imported["tally"]["success"]) == (rated, 1.0)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    assert {each["round_name"] for each in report["evaluations"]} == {
        f"{when}-{how}" for when in ("start", "end") for how in ("sampled", "greedy")
    }
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    ids = {group.group_id for group in log.admitted if group.source == "import"}
    assert len(ids) == CONVERSATIONS
    taken = {group.group_id for step in log.scheduled for group in step.groups}
    assert not ids & taken
    assert {group.reason for group in log.retired if group.group_id in ids} == {"evaluated"}
