"""When a checkpoint is due."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.run import Trainer
from forgemq_trainer.core.checkpoint_pace import CheckpointPace

seconds = st.floats(0.01, 1000.0)


@given(
    step_s=st.lists(seconds, min_size=1, max_size=200),
    cost_s=seconds,
    share=st.sampled_from([0.01, 0.05, 0.5]),
)
def test_writing_takes_at_most_its_share_and_a_crash_costs_at_most_that_and_a_step(
    step_s: list[float], cost_s: float, share: float
) -> None:
    pace = CheckpointPace(Trainer(steps=300, checkpoint_share_max=share))
    now_s, due_s = 0.0, list[float]()
    for step, duration_s in enumerate(step_s):
        now_s += duration_s
        if pace.is_due(step, is_last=False, now_s=now_s):
            due_s.append(now_s)
            pace.took(cost_s)
        assert now_s - due_s[-1] < cost_s / share * (1 + 1e-9)
    assert due_s[0] == step_s[0]
    assert cost_s * (len(due_s) - 1) <= share * (due_s[-1] - due_s[0]) * (1 + 1e-9)


def test_a_share_of_one_is_a_checkpoint_after_each_step_that_waits_for_the_one_before() -> None:
    pace = CheckpointPace(Trainer(steps=9, checkpoint_share_max=1.0))
    due = []
    for step in range(5):
        due.append(pace.is_due(step, is_last=False, now_s=30.0 * step))
        pace.took(30.0)
    assert due == [True] * 5


def test_a_number_of_steps_is_kept_whatever_a_checkpoint_costs() -> None:
    pace = CheckpointPace(Trainer(steps=9, checkpoint_every_steps=3))
    pace.took(1e9)
    due = [pace.is_due(step, is_last=step == 7, now_s=0.0) for step in range(8)]
    assert due == [False, False, True, False, False, True, False, True]
