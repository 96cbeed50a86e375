"""Supervised training on imported conversations, on the real broker and engine, and its control."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.careful_demonstrator import conversations, with_replies_of_others
from tests.integration.launched_run import FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import Accounts, accounts

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

WARM_START = "tests/integration/warm_start/run.toml"
FIRST, TAUGHT, LAST = 16, 176, 12
"""Conversations of step 0, of steps 1 to 11, and of step 12, which trains the desk beside them."""
SUPERVISED_STEPS = 12


def import_all(run: LaunchedRun, run_id: str, file: Path, lines: list[dict[str, Any]]) -> None:
    """Import these conversations; the run trains them in the order of the imports."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [str(FORGEMQ), "import", run_id, str(file), "--domain", "demonstrations"],
        cwd=ROOT,
        env=run.environ,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(lines)} of {len(lines)} are in demonstrations" in done.stdout


def trained(
    run: LaunchedRun, run_id: str, kafka: str, taught: list[dict[str, Any]], folder: Path
) -> Accounts:
    """The records of a run that was taught these conversations between two parts of right ones."""
    right = list(conversations(FIRST + LAST, seed=1))
    try:
        run.start(WARM_START, f"run={run_id}", "evaluation.tasks=0", "trainer.steps=13")
        run.wait_for_line(r"starting \d+ services", within_s=90)
        import_all(run, run_id, folder / "first.jsonl", right[:FIRST])
        import_all(run, run_id, folder / "taught.jsonl", taught)
        import_all(run, run_id, folder / "last.jsonl", right[FIRST:])
        assert run.wait_for_end(within_s=600) == 0, run.story()
    finally:
        run.close()
    report = run.report(run_id)
    assert set(report["guarantees"]) == {"G1", "G2", "G3", "G4", "G5"}
    assert all(report["guarantees"].values()), report["guarantees_checked"]
    return accounts(kafka, run=run_id, blobs=str(run.blobs(run_id)))


def test_supervised_training_on_imports_lowers_the_loss_of_conversations_not_seen(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run, taught = LaunchedRun(tmp_path, environ), list(conversations(TAUGHT, seed=7))
    log = trained(run, run_id, kafka_bootstrap, taught, tmp_path)
    domains = [group.domain for step in log.scheduled for group in step.groups]
    assert (domains.count("demonstrations"), domains.count("shop_desk")) == (204, 4)
    steps = [each.metrics for each in log.trained]
    assert all(each.supervised_tokens == each.loss_tokens > 0 for each in steps[:SUPERVISED_STEPS])
    assert 0 < steps[SUPERVISED_STEPS].supervised_tokens < steps[SUPERVISED_STEPS].loss_tokens
    # Before its update a step has not seen its conversations.
    assert steps[SUPERVISED_STEPS].nll_supervised < 0.8 * steps[0].nll_supervised
    [row] = run.report(run_id)["imported"]
    assert (row["conversations"], row["training"]) == (204, 204)


def test_the_replies_of_other_conversations_do_not_lower_it(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    run_id = new_run_id()
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run = LaunchedRun(tmp_path, environ)
    taught = with_replies_of_others(list(conversations(TAUGHT, seed=7)))
    log = trained(run, run_id, kafka_bootstrap, taught, tmp_path)
    steps = [each.metrics for each in log.trained]
    assert steps[SUPERVISED_STEPS].nll_supervised > 0.95 * steps[0].nll_supervised
