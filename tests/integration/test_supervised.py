"""Supervised training on imported conversations, on the real broker and engine, and its control."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forgemq_launcher.commands.new_head import write_new_head
from tests.engine_fixture import ENGINE_MODEL, reset_engine
from tests.integration.careful_demonstrator import conversations, with_replies_of_others
from tests.integration.launched_run import FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import Accounts, accounts

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(2400)]

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
    run: LaunchedRun,
    run_id: str,
    kafka: str,
    taught: list[dict[str, Any]],
    folder: Path,
    *overrides: str,
) -> Accounts:
    """The records of a run that was taught these conversations between two parts of right ones."""
    right = list(conversations(FIRST + LAST, seed=1))
    try:
        run.start(WARM_START, f"run={run_id}", "evaluation.tasks=0", "trainer.steps=13", *overrides)
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
    kafka_bootstrap, base_engine_url, engine_model, new_run_id, tmp_path
):
    """Against its control: as many updates on the replies of other conversations."""
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    own = list(conversations(TAUGHT, seed=7))
    run_id, run = new_run_id(), LaunchedRun(tmp_path / "own", environ)
    log = trained(run, run_id, kafka_bootstrap, own, tmp_path)
    domains = [group.domain for step in log.scheduled for group in step.groups]
    assert (domains.count("demonstrations"), domains.count("shop_desk")) == (204, 4)
    steps = [each.metrics for each in log.trained]
    assert all(each.supervised_tokens == each.loss_tokens > 0 for each in steps[:SUPERVISED_STEPS])
    assert 0 < steps[SUPERVISED_STEPS].supervised_tokens < steps[SUPERVISED_STEPS].loss_tokens
    [row] = run.report(run_id)["imported"]
    assert (row["conversations"], row["training"]) == (204, 204)
    reset_engine(base_engine_url, engine_model)
    run_id, run = new_run_id(), LaunchedRun(tmp_path / "others", environ)
    control = trained(run, run_id, kafka_bootstrap, with_replies_of_others(own), tmp_path)
    # Before its update a step has not seen its conversations, which are the same in both runs.
    learned = steps[SUPERVISED_STEPS].nll_supervised
    assert learned < 0.8 * steps[0].nll_supervised
    assert learned < 0.75 * control.trained[SUPERVISED_STEPS].metrics.nll_supervised


def test_a_draft_head_trains_on_replies_that_were_given(kafka_bootstrap, new_run_id, tmp_path):
    """An engine that guesses reads each reply; the head learns what the policy learns."""
    head = tmp_path / "head"
    write_new_head(ENGINE_MODEL, head, seed=0)
    run_id, run = new_run_id(), LaunchedRun(tmp_path / "run", {"FORGEMQ_KAFKA": kafka_bootstrap})
    guesses = (f"speculation.head={head}", "speculation.learning_rate=5e-3")
    own = list(conversations(TAUGHT, seed=7))
    log = trained(run, run_id, kafka_bootstrap, own, tmp_path, *guesses)
    steps = [each.metrics for each in log.trained]
    assert steps[SUPERVISED_STEPS].nll_supervised < 0.8 * steps[0].nll_supervised
    overlaps = [each.draft_overlap for each in steps]
    assert overlaps[SUPERVISED_STEPS - 1] > 2 * overlaps[0] > 0, overlaps
