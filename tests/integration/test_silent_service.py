"""A service that a signal stopped, in a run of `forgemq run`: it is named, and nothing is ended."""

import os
import signal

import pytest

from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_stopped_trainer_is_named_long_before_its_step_counts_as_a_stall(tmp_path):
    run = LaunchedRun(tmp_path, {})
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        stands_in = {"FORGEMQ_ENGINE_URL": engine_url}
        try:
            overrides = ("run=silent", "trainer.steps=1000", "evaluation.tasks=0")
            run.start(DIALOGUE, *overrides, environ=stands_in)
            run.wait_for_line("step 0 trained", within_s=200)
            trainer = run.pid_of("trainer", within_s=30)
            os.kill(trainer, signal.SIGSTOP)
            run.wait_for_line(rf"trainer has not worked .* kill -CONT {trainer} ", within_s=200)
            assert "STALLED" not in run.output()
            os.kill(trainer, signal.SIGCONT)
            run.wait_for_line("trainer is not silent any more", within_s=60)
            run.wait_for_line("step 9 trained", within_s=120)
            run.interrupt()
            assert run.wait_for_end(within_s=60) == 130, run.story()
            assert run.output().count("has not worked") == 1, "the others worked all the time"
            assert "restarting" not in run.output()
        finally:
            run.close()
