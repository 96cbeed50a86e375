"""Rows of an export as conversations to import: equal to what was exported, or refused by place."""

import json

import msgspec
import pytest

from forgemq_agents.conversation_files import entries, entry_count, read_conversations
from forgemq_agents.conversation_import import FileRefusedError, check_file
from forgemq_agents.core.conversations import ConversationError, conversation_of
from forgemq_contracts.arrays import pack_floats
from forgemq_contracts.episodes import FinishedEpisode, ReportedReward
from forgemq_contracts.groups import EpisodeScore, ScoredGroup
from forgemq_episode_files.rows import EpisodeRow, ScoredRecords, rows_of
from forgemq_episode_files.writing import EpisodeWriter
from tests.unit.episode_files.played import LOGPROBS, A, reply, rows


def write(folder, made):
    with EpisodeWriter(folder) as writer:
        for row in made:
            writer.write(row)
    return writer.files[0]


def imported(line: bytes) -> EpisodeRow:
    """The row of the episode that the gateway would record for this line."""
    made = conversation_of(line)
    asked = made.group("shop")
    episode = FinishedEpisode(
        episode_id="g-new.0.0",
        group_id="g-new",
        domain="shop",
        purpose="eval",
        group_size=1,
        index=0,
        attempt=0,
        status="completed",
        manifest=(),
        task=bytes(asked.task),
        result=bytes(made.end.result),
        rewards=tuple(
            ReportedReward(reward_id=each.reward_id, name=each.name, value=each.value)
            for each in made.rewards
        ),
        source="import",
    )
    score = EpisodeScore(episode_id="g-new.0.0", outcome=1.0, speed=0.25, process=0.0, total=1.0)
    records = ScoredRecords(
        scored=ScoredGroup(group_id="g-new", domain="shop", purpose="eval", episodes=(score,)),
        episodes={"g-new.0.0": episode},
        grades={},
        completions={},
    )
    [row] = rows_of(records, run="shop-2", reply=reply)
    return row


def test_an_exported_episode_is_the_same_after_an_import_and_says_where_it_was_played(tmp_path):
    first = rows()[0]
    [entry, _] = entries(write(tmp_path, rows()))
    row = imported(entry.line)
    for name in ("messages", "tools", "turns", "outcome", "speed", "process", "rewards", "result"):
        assert getattr(row, name) == getattr(first, name), name
    assert row.turns[0].logprobs == pack_floats(LOGPROBS)
    origin = msgspec.json.decode(row.metadata)["origin"]
    assert (origin["run"], origin["episode_id"], origin["task"]) == (
        "shop-1",
        "g.0.0",
        {"apples": 2},
    )
    [again] = entries(write(tmp_path / "again", [row]))
    assert imported(again.line).metadata == row.metadata


def test_a_masked_episode_is_imported_without_an_outcome(tmp_path):
    made = [conversation_of(each.line) for each in entries(write(tmp_path, rows()))]
    assert [[reward.name for reward in each.rewards] for each in made] == [
        ["outcome", "speed", "style"],
        [],
    ]
    assert len({each.key for each in made}) == 2


def test_a_bad_row_is_named_by_file_row_and_field_and_nothing_is_imported(tmp_path):
    first, second = rows()
    orphan = msgspec.structs.replace(first, turns=first.turns[1:])
    silent = msgspec.structs.replace(second, messages=second.messages[:1])
    path = write(tmp_path, [first, orphan, silent])
    with pytest.raises(FileRefusedError) as refused:
        check_file(tmp_path)
    assert str(refused.value) == (
        f"{path}, row 1: turns[0].parent_id: no turn before it has this completion_id\n"
        f"{path}, row 2: messages: must have one of the assistant, as its answer\n"
        "nothing is imported"
    )
    path.write_bytes(b"")
    with pytest.raises(FileRefusedError, match="no Parquet file"):
        check_file(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileRefusedError, match=r"has no file that ends in \.parquet"):
        check_file(tmp_path / "empty")


def test_rows_are_counted_over_all_files_of_a_folder_without_being_read(tmp_path):
    first, second = rows()
    orphan = msgspec.structs.replace(first, turns=first.turns[1:])
    write(tmp_path, [first, orphan]).rename(tmp_path / "other.parquet")
    assert entry_count(write(tmp_path, [second])) == 1
    assert entry_count(tmp_path) == 3


def test_turns_of_a_line_must_follow_their_parents_and_share_no_more_than_these_have():
    turn = msgspec.to_builtins(rows()[0].turns[0])
    said = {"messages": [{"role": "assistant", "content": "4"}]}
    child = {**turn, "completion_id": "d" * 32, "parent_id": A, "shared_prefix_tokens": 7}
    for turns, fault in (
        ([turn, turn], r"turns\[1\].completion_id: a turn before it has the same one"),
        ([turn, child], r"turns\[1\].shared_prefix_tokens: 7 are shared with a parent of 6 tokens"),
        ([{**turn, "logprobs": "AAAA"}], r"turns\[0\]: logprobs: 3 bytes are no array"),
    ):
        with pytest.raises(ConversationError, match=fault):
            conversation_of(msgspec.json.encode({**said, "turns": turns}))


def test_half_an_emoji_in_a_line_is_the_replacement_character(tmp_path):
    turns = [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    [conversation] = read_conversations(tmp_path / "a.jsonl")
    assert conversation["messages"][0]["content"] == "a\ufffd"
