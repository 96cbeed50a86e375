"""Ctrl-C twice ends a run at once: nothing waits for the broker, which is killed too."""

import os
import signal
import time

import pytest

from tests.integration.launched_run import DIALOGUE, FORGEMQ, LaunchedRun

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

RUN = "killed-by-hand"
WAIT_FOR_BROKER_S = 30
"""How long a request waits for a broker that does not answer."""


def test_ctrl_c_twice_kills_at_once_and_says_how_the_run_goes_on(tmp_path):
    run = LaunchedRun(tmp_path, {})
    try:
        run.start(DIALOGUE, f"run={RUN}")
        run.wait_for_line(r"starting \d+ services", within_s=90)
        # It does not end by itself, so the second signal comes while services are being stopped.
        os.kill(run.pid_of("trainer", within_s=30), signal.SIGSTOP)
        run.interrupt()
        run.wait_for_line("Ctrl-C again kills", within_s=10)
        time.sleep(1.1)  # Sooner, a second one is the echo of the first.
        began_s = time.monotonic()
        run.interrupt()
        assert run.wait_for_end(within_s=60) == 130, run.story()
        assert time.monotonic() - began_s < WAIT_FOR_BROKER_S / 2
        again = f"{FORGEMQ} run {DIALOGUE} --resume {RUN}"
        assert f"killed; continue with: {again}\n" in run.output()
        assert "failed" not in run.output()
        assert run.left_behind() == []
    finally:
        run.close()
