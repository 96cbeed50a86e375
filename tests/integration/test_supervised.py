"""A warm start on finished conversations, on the real broker and engine, and its control."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.careful_demonstrator import conversations, with_replies_of_others
from tests.integration.launched_run import FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import accounts

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

WARM_START = "tests/integration/warm_start/run.toml"
CONVERSATIONS = 240
"""A few more than the 12 steps of 16 and 2 of 12 train: 216."""
SUPERVISED_STEPS = 12
FRACTION = 0.25


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def success(report: dict[str, Any], round_name: str) -> float:
    (found,) = [each for each in report["evaluations"] if each["round_name"] == round_name]
    return float(found["tally"]["success"])


def test_a_warm_start_on_imported_conversations_lowers_their_loss_and_raises_success(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    file = write(tmp_path / "talks.jsonl", list(conversations(CONVERSATIONS, seed=7)))
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(WARM_START, f"run={run_id}")
        run.wait_for_line(r"starting \d+ services", within_s=90)
        imported = subprocess.run(
            [str(FORGEMQ), "import", run_id, str(file), "--domain", "demonstrations"],
            cwd=ROOT,
            env=run.environ,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert run.wait_for_end(within_s=600) == 0, run.story()
    finally:
        run.close()
    assert imported.returncode == 0, imported.stdout + imported.stderr
    said = re.search(r"(\d+) of 240 are in demonstrations: (\d+) added, 0 there", imported.stdout)
    assert said, imported.stdout
    report = run.report(run_id)
    assert set(report["guarantees"]) == {"G1", "G2", "G3", "G4", "G5"}
    assert all(report["guarantees"].values()), report["guarantees_checked"]
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    trained = [group.domain for step in log.scheduled for group in step.groups]
    assert (trained.count("demonstrations"), trained.count("shop_desk")) == (216, 8)
    steps = [each.metrics for each in log.trained]
    # Each conversation is trained once, so before its update it is one that was not seen.
    first, last = steps[0].nll_supervised, steps[SUPERVISED_STEPS - 1].nll_supervised
    assert last < 0.7 * first
    assert all(each.supervised_tokens == each.loss_tokens > 0 for each in steps[:SUPERVISED_STEPS])
    assert all(0 < each.supervised_tokens < each.loss_tokens for each in steps[SUPERVISED_STEPS:])
    [row] = report["imported"]
    assert (row["conversations"], row["training"]) == (int(said[2]), int(said[2]))
    before, after = success(report, "start-sampled"), success(report, "step-12-sampled")
    assert after > before + 0.15, (before, after)


def test_the_answers_of_other_conversations_raise_no_success(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    lines = with_replies_of_others(list(conversations(CONVERSATIONS, seed=7)))
    file = write(tmp_path / "talks.jsonl", lines)
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run = LaunchedRun(tmp_path, environ)
    try:
        run.start(WARM_START, f"run={run_id}", f"queues.0.task_file={file}")
        assert run.wait_for_end(within_s=900) == 0, run.story()
    finally:
        run.close()
    report = run.report(run_id)
    assert all(report["guarantees"].values()), report["guarantees_checked"]
    before, after = success(report, "start-sampled"), success(report, "step-12-sampled")
    assert after < before + 0.05, (before, after)
