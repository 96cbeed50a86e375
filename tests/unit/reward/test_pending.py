"""Which episodes can be graded, and what a restart must read again."""

import msgspec
import pytest

from forgemq_reward.core.pending import (
    PendingEpisode,
    PendingEpisodes,
    PendingPositions,
    take_oldest,
)
from tests.unit.reward.records import completion_id, finished_completion, finished_episode

TOOLS = b'[{"type":"function","function":{"name":"price"}}]'


def positions(episodes: int | None, completions: int | None, grades: int | None):
    return PendingPositions(episodes=episodes, completions=completions, grades=grades)


def take_ready(pending: PendingEpisodes) -> PendingEpisode | None:
    taken = take_oldest({0: pending})
    return None if taken is None else taken[1]


def test_the_episode_that_ended_first_is_next_whichever_partition_it_is_in():
    """Two partitions that always have another episode: neither waits for the other."""
    partitions = {number: PendingEpisodes() for number in (0, 1)}
    for index in range(6):
        partitions[index % 2].on_episode(
            finished_episode(index, turns=0), offset=index // 2, finished_ms=10 + index
        )
    taken = [take_oldest(partitions) for _ in range(7)]
    assert taken.pop() is None
    assert [(number, ready.episode.index) for number, ready in taken] == [
        (0, 0),
        (1, 1),
        (0, 2),
        (1, 3),
        (0, 4),
        (1, 5),
    ]


def test_an_episode_is_ready_when_its_last_completion_was_read():
    pending = PendingEpisodes()
    pending.on_episode(finished_episode(0, offsets=[4, 6]), offset=0)
    pending.on_completion(finished_completion(0, 0), offset=4)
    assert take_ready(pending) is None
    pending.on_completion(finished_completion(0, 1), offset=6)
    ready = take_ready(pending)
    assert ready is not None
    assert [held.offset for held in pending.completions_of(ready.episode)] == [4, 6]
    assert take_ready(pending) is None, "it is taken once"


def test_an_episode_without_completions_is_ready_at_once():
    pending = PendingEpisodes()
    pending.on_episode(finished_episode(0, turns=0), offset=0)
    assert take_ready(pending) is not None


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_masked_episodes_need_no_grader_and_hold_nothing(status):
    pending = PendingEpisodes()
    pending.on_completion(finished_completion(0, 0), offset=0)
    pending.on_episode(finished_episode(0, status=status), offset=0)
    assert take_ready(pending) is None
    assert pending.positions() == positions(1, 1, None)


def test_of_two_ends_of_an_episode_the_first_is_graded():
    """Its group waits for that grade: it counts the first end, too."""
    pending = PendingEpisodes()
    pending.on_completion(finished_completion(0, 0), offset=0)
    pending.on_episode(finished_episode(0), offset=0)
    pending.on_episode(finished_episode(0, status="failed"), offset=1)
    ready = take_ready(pending)
    assert ready is not None
    assert ready.episode.status == "completed"
    assert len(pending.completions_of(ready.episode)) == 1


def test_graders_see_that_an_output_repeated_itself():
    pending = PendingEpisodes()
    whole = finished_completion(0, 0, finish_reason="length")
    pending.on_completion(whole, offset=0)
    pending.on_completion(
        msgspec.structs.replace(
            finished_completion(0, 1, finish_reason="length"), repeated_tokens=3
        ),
        offset=1,
    )
    held = pending.completions_of(finished_episode(0, offsets=[0, 1]))
    assert [one.finish_reason for one in held] == ["length", "repetition"]


def test_errors_and_later_attempts_are_not_the_completion():
    pending = PendingEpisodes()
    pending.on_completion(finished_completion(0, 0, finish_reason="error"), offset=0)
    pending.on_completion(finished_completion(0, 0, output=[7]), offset=1)
    pending.on_completion(finished_completion(0, 0, output=[8]), offset=2)
    [held] = pending.completions_of(finished_episode(0, offsets=[1]))
    assert (held.offset, held.output) == (1, b"\x07\x00\x00\x00")
    with pytest.raises(LookupError, match="counts at offset 1, the manifest says 2"):
        pending.completions_of(finished_episode(0, offsets=[2]))


def test_a_completion_that_was_trimmed_away_is_named():
    pending = PendingEpisodes()
    pending.on_episode(finished_episode(0, offsets=[3]), offset=0)
    pending.on_completions_read(10)
    ready = take_ready(pending)
    assert ready is not None
    with pytest.raises(LookupError, match=f"{completion_id(0, 0)} is not on the log"):
        pending.completions_of(ready.episode)


@pytest.mark.parametrize("choice", ['"none"', '{"type": "none"}'])  # OpenAI's and Anthropic's
def test_tools_are_those_of_the_digest_unless_the_client_chose_no_tools(choice: str):
    pending = PendingEpisodes()
    pending.on_completion(finished_completion(0, 0, tools=TOOLS), offset=0)
    later = finished_completion(0, 1)
    turn = msgspec.structs.replace(later.turn, tools_digest="t")
    pending.on_completion(msgspec.structs.replace(later, turn=turn), offset=1)
    refused = msgspec.structs.replace(turn, asked=f'{{"tool_choice":{choice}}}'.encode())
    third = finished_completion(0, 2)
    pending.on_completion(msgspec.structs.replace(third, turn=refused), offset=2)
    held = pending.completions_of(finished_episode(0, turns=3))
    assert [one.tools for one in held] == [TOOLS, TOOLS, b"[]"]


def test_a_restart_reads_from_the_oldest_thing_that_is_not_graded():
    pending = PendingEpisodes()
    assert pending.positions() == positions(None, None, None)
    for index in range(3):
        pending.on_completion(finished_completion(index, 0), offset=10 + index)
        pending.on_episode(finished_episode(index, size=3, offsets=[10 + index]), offset=5 + index)
    assert pending.positions() == positions(5, 10, None)
    pending.on_graded("g-1.1.0", offset=20)
    assert pending.positions() == positions(5, 10, 20)
    pending.on_graded("g-1.0.0", offset=21)
    assert pending.positions() == positions(7, 12, 20)
    pending.on_retired("g-1")
    assert pending.positions() == positions(8, 13, 22)
    assert len(pending) == 0


def test_what_comes_after_the_grade_or_the_retirement_is_not_held():
    pending = PendingEpisodes()
    pending.on_graded("g-1.0.0", offset=3)
    pending.on_episode(finished_episode(0), offset=0)
    pending.on_completion(finished_completion(0, 0), offset=0)
    pending.on_retired("g-2")
    pending.on_completion(finished_completion(0, 0, group="g-2"), offset=1)
    pending.on_episode(finished_episode(0, group="g-2"), offset=1)
    pending.on_graded("g-2.0.0", offset=4)
    assert len(pending) == 0
    assert pending.positions() == positions(2, 2, 3)


def test_a_group_whose_id_begins_like_another_is_another_group():
    pending = PendingEpisodes()
    pending.on_episode(finished_episode(0, group="g-11", turns=0), offset=0)
    pending.on_retired("g-1")
    assert len(pending) == 1
