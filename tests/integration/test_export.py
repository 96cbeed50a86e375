"""A run's episodes as files: exported while it is up, imported into it, exported again."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_episode_files.arrow_rows import from_arrow
from forgemq_episode_files.reading import read_rows
from forgemq_episode_files.rows import EpisodeRow
from tests.integration.launched_run import DIALOGUE, FORGEMQ, ROOT, LaunchedRun
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 16
TOOL_WITHIN_S = 120


def say(run: LaunchedRun, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(FORGEMQ), *arguments],
        cwd=ROOT,
        env=run.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=TOOL_WITHIN_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def rows(folder: Path) -> dict[str, EpisodeRow]:
    made = [from_arrow(each) for path in sorted(folder.iterdir()) for each in read_rows(path)]
    by_id = {row.episode_id: row for row in made}
    assert len(by_id) == len(made)
    return by_id


def test_an_export_of_a_live_run_is_imported_and_comes_back_equal(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id, first, second = new_run_id(), tmp_path / "first", tmp_path / "second"
    with stand_in_engine(latency_s=0.3, tokens=16) as engine_url:
        environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        run = LaunchedRun(tmp_path, environ)
        try:
            run.start(
                DIALOGUE, f"run={run_id}", f"trainer.steps={STEPS}", "log.keep_for_replay=true"
            )
            run.wait_for_line(r"step 2 trained", within_s=120)
            exported = say(run, "export", run_id, "--to", str(first))
            imported = say(run, "import", run_id, str(first), "--domain", "dialogue")
            again = say(run, "import", run_id, str(first), "--domain", "dialogue")
            run.wait_for_end(within_s=240)
            finished = say(run, "export", run_id, "--to", str(second))
            refused = say(run, "export", run_id, "--to", str(second))
        finally:
            run.close()
    assert (exported[0], imported[0], again[0], finished[0]) == (0, 0, 0, 0), (exported, imported)
    assert refused[0] == 2
    assert "must be a folder without Parquet files" in refused[1]
    live, whole = rows(first), rows(second)
    played = [row for row in live.values() if row.source == "agent"]
    assert len(played) >= 20
    assert {row.purpose for row in played} == {"train", "eval"}
    assert f"{len(live)} added, 0 there already" in imported[1]
    assert f"0 added, {len(live)} there already" in again[1]
    # What was exported from the live run stands in the finished run's files too.
    assert all(whole[episode_id] == row for episode_id, row in live.items())
    back = [row for row in whole.values() if row.source == "import"]
    assert len(back) == len(live)
    for row in back:
        origin = run_origin(row)
        same = live[origin["episode_id"]]
        assert origin["run"] == run_id
        assert (row.messages, row.tools, row.turns) == (same.messages, same.tools, same.turns)
        assert (row.outcome, row.speed, row.rewards) == (same.outcome, same.speed, same.rewards)
        assert row.result == same.result
        assert row.turns
        assert all(turn.logprobs for turn in row.turns)
    trained = [row for row in played if row.purpose == "train" and not row.not_trainable]
    assert any(turn.advantage for row in trained for turn in row.turns)


def run_origin(row: EpisodeRow) -> dict[str, Any]:
    return msgspec.json.decode(row.metadata or "{}")["origin"]
