"""A group's records become rows: conversations, tokens, what each turn earned."""

from collections.abc import Sequence

import msgspec
import pytest

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.episodes import FinishedEpisode, ReportedReward
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.recorded_turns import RecordedTurn
from forgemq_episode_files.conversation import conversation_to
from forgemq_episode_files.rows import rows_of
from tests.unit.episode_files.played import (
    LOST,
    PARTS,
    REPLIES,
    SYSTEM,
    TITLE,
    TOOL,
    A,
    B,
    C,
    group,
    reply,
    rows,
)


def test_a_row_has_the_conversation_of_the_last_turn_that_is_no_side_request():
    first, second = rows()
    assert first.messages == (SYSTEM, PARTS, REPLIES[A], TOOL, REPLIES[B])
    assert [each["function"]["name"] for each in first.tools] == ["look"]
    assert second.messages == (PARTS, REPLIES[C])


def test_turns_that_nobody_got_are_there_if_another_continues_them_and_do_not_count():
    turns = rows()[0].turns
    assert [(turn.completion_id, turn.counts) for turn in turns] == [
        (A, True),
        (LOST, False),
        (B, True),
        (TITLE, True),
    ]
    assert conversation_to(turns[1], turns)[0][-2:] == (TOOL, REPLIES[LOST])


def test_every_turn_has_its_tokens_versions_and_what_it_earned():
    first = rows()[0].turns[0]
    assert unpack_ids(first.output_ids) == [20, 30, 2, 40]
    assert unpack_ids(first.versions) == [3, 4, 4, 4]
    assert unpack_floats(first.logprobs)[3] == -87.5
    assert (first.return_to_go, first.advantage, first.process) == (1.05, 0.1, None)
    assert rows()[0].turns[2].process == -0.2


def context_of(turn: RecordedTurn, turns: Sequence[RecordedTurn]) -> list[int]:
    """The whole context of a turn, put together from its ancestors as a reader of a row does it."""
    own = list(unpack_ids(turn.context_ids))
    if not turn.shared_prefix_tokens:
        return own
    (parent,) = (each for each in turns if each.completion_id == turn.parent_id)
    before = [*context_of(parent, turns), *unpack_ids(parent.output_ids)]
    return before[: turn.shared_prefix_tokens] + own


def test_the_whole_context_of_a_turn_follows_from_its_ancestors():
    turns = rows()[0].turns
    assert context_of(turns[2], turns) == [0, 8, 20, 30, 2, 40, 1, 8]


def test_rewards_are_by_part_and_a_masked_episode_has_none():
    first, second = rows()
    assert (first.outcome, first.speed, first.process, first.total) == (1.0, 0.25, -0.2, 0.85)
    assert first.rewards == (NamedValue(name="style", value=0.75),)
    assert (second.outcome, second.speed, second.total) == (None, None, None)
    assert (second.is_masked, second.truncated_by) == (True, "too_many_turns")


@pytest.mark.parametrize("choice", ['"none"', '{"type": "none"}'])
def test_a_turn_whose_client_chose_no_tools_had_none_to_call(choice: str):
    records = group()
    turn = msgspec.structs.replace(
        records.completions[A].turn, asked=f'{{"tool_choice":{choice}}}'.encode()
    )
    chosen = {A: msgspec.structs.replace(records.completions[A], turn=turn)}
    changed = msgspec.structs.replace(records, completions={**records.completions, **chosen})
    first, _ = rows_of(changed, run="r", reply=reply)
    assert [len(each.tools) for each in first.turns[:2]] == [0, 1]


def test_a_group_whose_completions_are_gone_has_no_rows():
    records = msgspec.structs.replace(group(), completions={})
    with pytest.raises(KeyError):
        tuple(rows_of(records, run="r", reply=reply))


def test_an_import_says_what_its_file_said_though_it_is_masked():
    told = {"messages": [SYSTEM, PARTS, REPLIES[C]], "metadata": {"id": 7}}
    records = group()
    changed = {
        each: msgspec.structs.replace(
            episode,
            source="import",
            manifest=(),
            task=msgspec.json.encode(told),
            rewards=(ReportedReward(reward_id="1", name="speed", value=0.5),),
        )
        for each, episode in records.episodes.items()
    }
    _, masked = rows_of(
        msgspec.structs.replace(records, episodes=changed, completions={}), run="r", reply=reply
    )
    assert masked.messages == tuple(told["messages"])
    assert (masked.task, masked.metadata) == (None, '{"id":7}')
    assert (masked.outcome, masked.speed, masked.total, masked.is_masked) == (None, 0.5, None, True)
    assert isinstance(changed["g.0.0"], FinishedEpisode)
