"""A run whose two engines share a pool of K/V: they file theirs, and every guarantee holds.

Whether an engine fetches depends on who gets which turn; `test_pool.py` makes one fetch.
"""

from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_contracts.completions import FinishedCompletion
from forgemq_launcher.commands.new_head import write_new_head
from tests.engine_fixture import ENGINE_MODEL
from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.test_lanes_of_a_run import records_of_lanes

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 4
PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    write_new_head(ENGINE_MODEL, folder, seed=0)
    return folder


@pytest.mark.parametrize("has_drafts", [False, True], ids=["alone", "8-bit weights, a draft head"])
def test_engines_file_their_kv_in_the_pool_and_every_guarantee_holds(
    kafka_bootstrap, new_run_id, tmp_path, head, has_drafts
):
    run_id = new_run_id()
    beside = (f"speculation.head={head}", "model.engine_quantization=fp8_blocks")
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        run.start(
            DIALOGUE,
            f"run={run_id}",
            f"trainer.steps={STEPS}",
            "evaluation.tasks=0",
            "queues.dialogue.agent=dialogue:play_instructed",
            "model.context_tokens_max=1000",
            "log.lanes=2",
            "log.keep_for_replay=true",
            "pool.storage=file",
            f"pool.folder={tmp_path / 'kv'}",
            f"pool.page_tokens={PAGE_TOKENS}",
            "pool.prefetch=wait_complete",
            "pool.fetch_tokens_per_s=20000",
            *(beside if has_drafts else ()),
        )
        status = run.wait_for_end(within_s=1200)
        assert run.left_behind() == []
    finally:
        run.close()
    assert status == 0, run.story()
    # SGLang refuses new weights while K/V is on its way to the pool, unless that is waited for.
    assert "restarting" not in run.output()
    logs = (run.runs / run_id / "logs").glob("inference-*.log")
    assert [log.name for log in logs if '"event":"load_failed"' in log.read_text()] == []
    report = run.report(run_id)
    # Of K/V in float32 that other weights computed, G5 would see the difference.
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert (report["steps"], report["groups_open"]) == (STEPS, 0)
    written = records_of_lanes(
        kafka_bootstrap,
        topics.FINISHED_COMPLETIONS,
        run_id=run_id,
        blobs=str(run.blobs(run_id)),
    )
    finished: list[FinishedCompletion] = [each for _, each in written]
    assert {each.lane for each in finished} == {0, 1}
    assert any(page.stat().st_size for page in (tmp_path / "kv").iterdir())
    # What guesses has K/V of its own, filed beside the policy's.
    assert any(".draft_" in page.name for page in (tmp_path / "kv").iterdir()) == has_drafts
    assert any(each.verifications for each in finished) == has_drafts
    for each in [one for one in finished if one.cached_tokens_storage]:
        assert each.cached_tokens_storage <= each.cached_tokens
        assert each.cached_tokens_storage % PAGE_TOKENS == 0
        assert each.cached_tokens < each.shared_prefix_tokens + len(each.context) // 4
