"""Ctrl-C at any moment stops everything; --resume continues the run."""

import itertools

import pytest

from forgemq_bus.broker import LocalBroker
from tests.integration.launched_run import DIALOGUE, FORGEMQ, LaunchedRun
from tests.integration.run_log import Accounts, accounts
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

RUN = "broken-off"
STEPS = 8


def interrupt_at_line(run: LaunchedRun, *, at: str, within_s: float) -> None:
    """Press Ctrl-C at this line: the status is 130 and no process is left."""
    run.wait_for_line(at, within_s=within_s)
    run.interrupt()
    assert run.wait_for_end(within_s=60) == 130
    assert run.left_behind() == []


def own_log(run: LaunchedRun) -> Accounts:
    """What the log says, read from the run's own broker started again on its folder."""
    broker = LocalBroker(run.runs / RUN / "kafka")
    try:
        return accounts(broker.start(), run=RUN, blobs=str(run.blobs(RUN)))
    finally:
        broker.stop()


def test_ctrl_c_during_set_up_rollouts_and_training_loses_nothing(tmp_path):
    run = LaunchedRun(tmp_path, {})
    with stand_in_engine(latency_s=0.2, tokens=16) as engine_url:
        stands_in = {"FORGEMQ_ENGINE_URL": engine_url}
        try:
            every_step = "trainer.checkpoint_share_max=1.0"
            run.start(DIALOGUE, f"run={RUN}", f"trainer.steps={STEPS}", every_step)
            interrupt_at_line(run, at="SGLang starts", within_s=60)
            assert f"continue with: {FORGEMQ} run {DIALOGUE} --resume {RUN}\n" in run.output()

            run.start(DIALOGUE, "--resume", RUN)
            interrupt_at_line(run, at=r"starting \d+ services", within_s=90)

            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            interrupt_at_line(run, at=r"version 0: success .* \(4 groups\)", within_s=120)
            open_groups = own_log(run).open_group_ids()
            assert f"continue with: {FORGEMQ} run {DIALOGUE} --resume {RUN}\n" in run.output()
            assert f"its own configuration: {DIALOGUE} is not read\n" in run.output()

            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            interrupt_at_line(run, at="step 3 trained", within_s=180)
            before = own_log(run)

            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            run.wait_for_end(within_s=240)
            assert run.left_behind() == []
            report = run.report(RUN)

            run.start(DIALOGUE, "--resume", RUN, environ=stands_in)
            assert run.wait_for_end(within_s=60) == 2
            assert f"forgemq: run {RUN} is completed, and nothing is left to play" in run.output()
            assert "using the engine" not in run.output()
            assert run.left_behind() == []
        finally:
            run.close()

    after = own_log(run)
    after.assert_exactly_once()
    assert list(after.surviving_steps()) == list(range(STEPS))
    # What was trained stays trained, in the same bytes of the same record.
    known = [step.step for step in before.trained]
    assert after.trained[: len(known)] == before.trained
    assert known == list(range(len(known)))
    assert [step.step for step in after.trained] == list(range(STEPS))
    ended = {group.group_id: group.reason for group in after.retired}
    for group_id in itertools.chain(open_groups, before.open_group_ids()):
        assert ended[group_id] in ("trained", "zero_variance", "stale", "cancelled", "evaluated")
    held = {guarantee for guarantee, holds in report["guarantees"].items() if holds}
    # The stand-in's log-probabilities are noise, so G5 cannot hold.
    assert held == {"G1", "G2", "G3", "G4"}, report["guarantees_checked"]
    assert report["groups_open"] == 0
