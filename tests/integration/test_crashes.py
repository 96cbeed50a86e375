"""kill -9 of every service during a run, on the real broker."""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.launched_run import DIALOGUE, LaunchedRun
from tests.integration.run_log import accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PARTITIONS = 2
SERVICES = ("trainer", "scheduler", "merger", "reward", "inference", "gateway", "agents")
STEPS = 2 * len(SERVICES)


def kill_each_service(run: LaunchedRun) -> None:
    """One kill after every second step, so that each finds the run at work again."""
    for number, service in enumerate(SERVICES):
        run.said(rf"step {2 * number} trained", within_s=120)
        os.kill(run.pid_of(service, within_s=60), signal.SIGKILL)


def restarts(story: str) -> Counter[str]:
    """Deaths of services that the launcher saw, by service and manner."""
    lines = re.findall(r"s  (\S+) (was killed by \S+|ended with status \d+);", story)
    return Counter(f"{name.removesuffix('-0')} {how}" for name, how in lines)


@pytest.mark.timeout(600)
def test_a_run_survives_one_kill_of_every_service_and_accounts_for_every_group(
    kafka_bootstrap: str, new_run_id, tmp_path: Path
):
    name = new_run_id()
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        run = LaunchedRun(tmp_path, environ)
        try:
            run.start(DIALOGUE, f"run={name}", f"trainer.steps={STEPS}")
            kill_each_service(run)
            run.ended(within_s=240)
            assert run.left_behind() == []
        finally:
            run.close()
    assert restarts(run.output()) == {f"{each} was killed by SIGKILL": 1 for each in SERVICES}

    log = accounts(
        kafka_bootstrap, run=name, blobs=str(run.runs / name / "blobs"), partitions=PARTITIONS
    )
    log.assert_exactly_once()
    assert len(log.surviving_steps()) == STEPS
    report = json.loads((run.runs / name / "report.json").read_text())
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, and the audit has to see it.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    assert (report["steps"], report["groups_open"]) == (STEPS, 0)
