"""How long a batch collects records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_shell.transform_settings import TransformSettings

SETTINGS = TransformSettings(batch_linger_s=0.05, batch_linger_s_max=0.5, commit_share_max=0.1)


@pytest.mark.parametrize(
    ("commit_s", "linger_s"), [(0.0, 0.05), (0.005, 0.05), (0.02, 0.18), (0.05, 0.45), (3.0, 0.5)]
)
def test_a_batch_collects_longer_the_slower_commits_are_up_to_a_limit(commit_s, linger_s):
    assert SETTINGS.linger_s(commit_s=commit_s) == pytest.approx(linger_s)


@given(st.floats(0.001, 0.05))
def test_below_the_limit_commits_take_at_most_their_share_of_the_time(commit_s):
    linger_s = SETTINGS.linger_s(commit_s=commit_s)
    assert commit_s / (commit_s + linger_s) <= SETTINGS.commit_share_max + 1e-9


def test_a_linger_above_the_limit_of_slow_commits_is_kept():
    patient = TransformSettings(batch_linger_s=0.8, batch_linger_s_max=0.5)
    assert patient.linger_s(commit_s=1.0) == 0.8
