"""A whole run whose trainer has two ranks: kills of its processes, Ctrl-C, and going on."""

import os
import signal

import psutil
import pytest

from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

STEPS = 8
RANKS = 2


def has_trained(run: LaunchedRun, run_id: str, *, lineage: int) -> None:
    """Wait until this life of the trainer has trained a step."""
    pattern = rf'"restored","lineage":{lineage},.*"event":"trained"'
    run.wait_for_log(run_id, "trainer", pattern, within_s=90)


def kill_one_rank(run: LaunchedRun) -> None:
    """SIGKILL to the rank that follows; the trainer ends as a whole and is started again."""
    ranks = run.rank_pids(count=RANKS, within_s=60)
    os.kill(ranks[1], signal.SIGKILL)
    run.wait_for_line(r"trainer ended with status 1; restarting", within_s=40)
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def kill_torchrun(run: LaunchedRun) -> None:
    """SIGKILL to the process that started the ranks: they end with it."""
    ranks = run.rank_pids(count=RANKS, within_s=60)
    os.kill(psutil.Process(ranks[0]).ppid(), signal.SIGKILL)
    run.wait_for_line(r"trainer was killed by SIGKILL; restarting", within_s=20)
    psutil.wait_procs([psutil.Process(p) for p in ranks if psutil.pid_exists(p)], timeout=5)
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_a_run_of_two_ranks_survives_their_deaths_and_ctrl_c_and_trains_every_group_once(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        run = LaunchedRun(
            tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        )
        try:
            run.start(
                DIALOGUE, f"run={run_id}", f"trainer.steps={STEPS}", f"trainer.world_size={RANKS}"
            )
            has_trained(run, run_id, lineage=1)
            kill_one_rank(run)
            has_trained(run, run_id, lineage=2)
            kill_torchrun(run)
            has_trained(run, run_id, lineage=3)
            run.interrupt()
            assert run.wait_for_end(within_s=60) == 130
            assert run.left_behind() == []

            run.start(DIALOGUE, "--resume", run_id)
            status = run.wait_for_end(within_s=90)
            assert run.left_behind() == []
        finally:
            run.close()

    said = (run.runs / run_id / "logs" / "trainer.log").read_text()
    assert "rank 1 was killed by SIGKILL" in said
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    log.assert_exactly_once()
    steps = log.surviving_steps()
    assert list(steps) == list(range(STEPS))
    assert len({step.lineage for step in steps.values()}) == 4
    report = run.report(run_id)
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise: G5 fails, and with it the exit status.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    assert status == 1
    assert report["groups_open"] == 0
