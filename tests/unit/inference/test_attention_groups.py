"""Which group of an engine's processes attends for an episode."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_inference.core.attention_groups import AttentionGroups

EPISODES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40)


def place(groups: AttentionGroups, episode: str) -> int:
    with groups.attending(episode) as fields:
        return int(fields["routed_dp_rank"])


def test_an_engine_of_one_group_is_told_nothing() -> None:
    with AttentionGroups(1).attending("a") as fields:
        assert fields == {}


@given(EPISODES, st.integers(2, 5))
def test_every_turn_of_an_episode_is_in_one_group(turns: list[str], count: int) -> None:
    groups = AttentionGroups(count)
    seen: dict[str, set[int]] = {}
    for episode in turns:
        seen.setdefault(episode, set()).add(place(groups, episode))
    assert all(len(places) == 1 for places in seen.values())
    assert set().union(*seen.values()) == set(range(min(count, len(seen))))


def test_episodes_that_run_nothing_between_turns_are_spread_evenly() -> None:
    groups = AttentionGroups(3)
    places = [place(groups, f"e-{number}") for number in range(9)]
    assert places == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_a_new_episode_goes_where_the_fewest_requests_run() -> None:
    groups = AttentionGroups(2)
    with ExitStack() as running:
        for episode in ("a", "b", "a", "a"):
            running.enter_context(groups.attending(episode))
        assert [place(groups, new) for new in ("c", "d")] == [1, 1]
    assert place(groups, "e") == 0
    assert place(groups, "a") == 0


def fail() -> None:
    raise ConnectionError


def test_a_request_that_fails_runs_no_longer() -> None:
    groups = AttentionGroups(2)
    for _ in range(5):
        with pytest.raises(ConnectionError), groups.attending("a"):
            fail()
    assert place(groups, "b") == 1
    assert place(groups, "c") == 0
