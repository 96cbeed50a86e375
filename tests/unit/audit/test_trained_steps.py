"""Steps that were trained again, twice, or in another order."""

import msgspec
import pytest

from forgemq_audit.guarantees import Ledger
from forgemq_contracts.topics import RETIRED_GROUPS, SCHEDULED_STEPS, TRAINED_STEPS
from tests.unit.audit.verdicts import audited, broken
from tests.unit.run_view.synthetic import SyntheticRun, configuration


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun().play(steps=3)


def test_a_group_that_retired_with_another_step_than_its_own_breaks_g1(run):
    def later(group):
        return msgspec.structs.replace(group, step=2) if group.group_id == "g-0" else group

    verdicts = audited(run.changed(RETIRED_GROUPS, later), is_ended=False)
    assert verdicts["G1"].violations == ("g-0: trained and retired as trained disagree",)


def test_a_step_recorded_twice_by_one_trainer_breaks_g2(run):
    trained = [message.record for message in run.of(TRAINED_STEPS)]
    run.put(TRAINED_STEPS, trained[1])
    verdicts = audited(run.messages)
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations == ("lineage 1: step 1 follows step 2",)


def test_steps_trained_in_another_order_than_scheduled_break_g2(run):
    swapped = {0: 1, 1: 0, 2: 2}
    records = {message.record.step: message.record for message in run.of(TRAINED_STEPS)}
    verdicts = audited(run.changed(TRAINED_STEPS, lambda step: records[swapped[step.step]]))
    assert broken(verdicts) == {"G2"}
    assert verdicts["G2"].violations[0] == "lineage 1: step 0 follows step 1"


def test_a_step_scheduled_twice_breaks_g2(run):
    scheduled = [message.record for message in run.of(SCHEDULED_STEPS)]
    run.put(SCHEDULED_STEPS, scheduled[1])
    verdicts = audited(run.messages)
    assert verdicts["G2"].violations == ("step 1 was scheduled 2 times",)


def test_groups_whose_steps_a_restarted_trainer_trains_again_break_nothing():
    run = SyntheticRun()
    groups = [[run.generate(2 * step + i, version=step) for i in range(2)] for step in range(3)]
    for step in range(3):
        run.train(step, groups[step])
    run.step_done(1, groups[1], lineage=2)  # From the checkpoint of step 0.
    assert broken(audited(run.messages, is_ended=False)) == set()
    verdicts = audited(run.messages)
    assert verdicts["G1"].violations == (
        "g-4: trained and retired as trained disagree",
        "g-5: trained and retired as trained disagree",
    )


def test_a_restarted_trainer_that_repeats_steps_trains_nothing_twice():
    run = SyntheticRun()
    groups = [[run.generate(2 * step + i, version=step) for i in range(2)] for step in range(3)]
    run.train(0, groups[0])
    run.schedule(1, groups[1])
    run.step_done(1, groups[1], lineage=1)
    run.step_done(1, groups[1], lineage=2)
    for group in groups[1]:
        run.retire(group.group_id, step=1)
    run.train(2, groups[2], lineage=2, is_last=True)
    assert broken(audited(run.messages)) == set()


def test_a_step_of_the_fenced_lineage_does_not_survive():
    run = SyntheticRun()
    groups = [[run.generate(2 * step + i, version=step) for i in range(2)] for step in range(3)]
    for step in range(3):
        run.schedule(step, groups[step])
        run.step_done(step, groups[step], lineage=1)
    run.step_done(1, groups[1], lineage=2)
    ledger = Ledger(configuration())
    for message in run.messages:
        ledger.apply(message)
    assert ledger.trained_group_ids() == ("g-0", "g-1", "g-2", "g-3")
