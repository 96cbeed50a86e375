"""The archive desk on a broker and an engine of its own: the policy's notes are its actions."""

import subprocess
from pathlib import Path

import pytest

from forgemq_episode_files.arrow_rows import from_arrow
from forgemq_episode_files.reading import read_rows
from forgemq_episode_files.rows import EpisodeRow
from tests.integration.launched_run import FORGEMQ, ROOT, LaunchedRun

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]

ARCHIVE = "deploy/archive_desk/run.toml"
STEPS = 2
TASKS = 8
GROUPS = 4
"""Of a step: half of the run file's."""
SMALLER = tuple(
    f"queues.archive_desk.{field}" for field in (f"groups_per_step={GROUPS}", "slots=9", "window=3")
)


def exported(run: LaunchedRun, run_id: str, folder: Path) -> list[EpisodeRow]:
    command = [str(FORGEMQ), "export", run_id, "--to", str(folder)]
    subprocess.run(command, cwd=ROOT, env=run.environ, check=True, timeout=120)
    return [from_arrow(each) for path in sorted(folder.iterdir()) for each in read_rows(path)]


def notes_of(row: EpisodeRow) -> int:
    """Calls of `note` that the policy wrote."""
    calls = (call for turn in row.turns for call in turn.reply.get("tool_calls") or ())
    return sum(call["function"]["name"] == "note" for call in calls)


def test_notes_cut_the_context_are_trained_and_earn_what_comes_after_them(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        changes = (f"trainer.steps={STEPS}", f"evaluation.tasks={TASKS}")
        run.start(ARCHIVE, f"run={run_id}", *changes, *SMALLER)
        assert run.wait_for_end(within_s=1200) == 0, run.story()
        rows = exported(run, run_id, tmp_path / "rows")
    finally:
        run.close()
    report = run.report(run_id)
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert report["groups_retired"]["trained"] == STEPS * GROUPS
    noted = [row for row in rows if notes_of(row)]
    assert len(noted) > len(rows) / 2
    # Every note is followed by a shorter context, except one that ends its episode.
    compactions = {
        row.episode_id: sum(each.count for each in row.fork_reasons if each.reason == "compaction")
        for row in noted
    }
    assert all(notes_of(row) - 1 <= compactions[row.episode_id] <= notes_of(row) for row in noted)
    # Only the last turn earns something here, so every turn before it has the same return.
    for row in (row for row in noted if row.process == 0 and row.not_trainable == ""):
        returns = [turn.return_to_go for turn in row.turns if turn.return_to_go is not None]
        assert returns == pytest.approx([row.outcome] * len(returns))
