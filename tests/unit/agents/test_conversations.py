"""Lines of finished conversations: which are good, and what is sent of each."""

import json
import os
import tracemalloc
from codecs import BOM_UTF8
from pathlib import Path

import msgspec
import pytest

from forgemq_agents.conversation_import import FAULTS_SHOWN_MAX, FileRefusedError, check_file
from forgemq_agents.core.conversations import LINE_BYTES_MAX, ConversationError, conversation_of
from forgemq_contracts.admin import RewardRequest
from forgemq_contracts.asked_keys import KEYS_MAX

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{"}}
GOOD = {"messages": [QUESTION, ANSWER]}


def line(*messages: object, **fields: object) -> bytes:
    return json.dumps({"messages": messages or GOOD["messages"], **fields}).encode()


def test_a_line_becomes_the_request_for_a_group_of_one_that_never_trains():
    made = conversation_of(
        line(tools=[{"type": "function", "function": {"name": "add"}}], metadata={"id": 7})
    )
    group = made.group("math")
    assert (group.domain, group.source, group.purpose) == ("math", "import", "eval")
    assert (group.group_size, group.round_name) == (1, "")
    assert msgspec.json.decode(group.task) == {
        **GOOD,
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "metadata": {"id": 7},
    }


def test_rewards_are_sent_by_name_and_the_result_with_the_end():
    made = conversation_of(line(reward=1, rewards={"speed": 0.5, "style": -2}, result={"n": [4]}))
    assert made.rewards == tuple(
        RewardRequest(reward_id=f"import/{name}", name=name, value=value)
        for name, value in (("outcome", 1.0), ("speed", 0.5), ("style", -2.0))
    )
    assert msgspec.json.decode(made.end.result) == {"n": [4]}
    assert msgspec.json.decode(made.task) == GOOD


def test_a_conversation_has_one_key_in_whatever_order_its_fields_are_and_another_with_a_change():
    key = conversation_of(b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": 1.0}').key  # noqa: E501  # fmt: skip
    same = b'{"reward":1.0,"messages":[{"content":"a","role":"user"},{"content":"\\u0062","role":"assistant"}]}'  # noqa: E501  # fmt: skip
    assert conversation_of(same).key == key
    others = [same.replace(b"1.0", b"0.5"), same.replace(b'"a"', b'"c"')]
    assert len({key, *(conversation_of(each).key for each in others)}) == 3
    assert key.startswith("import/")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, ANSWER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER],
        [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ],
        [QUESTION, {"role": "assistant", "content": None, "refusal": "no"}],
        [QUESTION, {**ANSWER, "reasoning_content": "easy"}],
    ],
)
def test_what_openais_clients_send_is_taken_as_it_is(messages):
    assert msgspec.json.decode(conversation_of(line(*messages)).task) == {"messages": messages}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"nope", "not one JSON object: JSON is malformed"),
        (b"\xff", "not one JSON object: 'utf-8' codec can't decode"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field `messages`"),
        (b'{"messages": []}', "messages: Expected `array` of length >= 1"),
        (line(rewrad=1), "Object contains unknown field `rewrad`"),
        (line(reward="1"), "reward: Expected `float | null`, got `str`"),
        (line(reward=1e13), "reward: Expected `float` <= 1000000000000.0"),
        (line(reward=1, rewards={"outcome": 1}), "reward: is the outcome, which `rewards` names"),
        (line(tools=[{"name": "f"}]), "tools[0]: Object missing required field `type`"),
        (line(QUESTION, {"role": "bot", "content": "a"}), "messages[1].role: Invalid value 'bot'"),
        (line(QUESTION, {"content": "a"}), "messages[1]: Object missing required field `role`"),
        (line({"role": "user"}, ANSWER), "messages[0]: Object missing required field `content`"),
        (line(QUESTION), "messages: must have one of the assistant"),
        (line(QUESTION, {"role": "assistant"}), "messages[1]: has no content, no refusal and no"),
        (
            line(QUESTION, ANSWER, {"role": "tool", "content": "4", "tool_call_id": "c1"}),
            "messages[2].tool_call_id: no assistant message before it has a call 'c1'",
        ),
        (b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "messages[0]: Expected `object`"),
        (
            line()[:-1] + b', "result": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            "not one JSON object: maximum recursion depth",
        ),
        (line({"role": "x" * 10_000}), f"messages[0].role: Invalid value '{'x' * 185}..."),
        (b" " * (LINE_BYTES_MAX + 1), f"has more than {LINE_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_line_is_refused_by_its_field_and_rule(bad, said):
    with pytest.raises(ConversationError) as refused:
        conversation_of(bad)
    assert str(refused.value).startswith(said)


def test_a_file_is_refused_as_a_whole_by_line_number_and_field(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(line() + b"\r\n\n" + line(reward="1") + b"\n" + line(QUESTION))
    with pytest.raises(FileRefusedError) as refused:
        check_file(file)
    assert str(refused.value).splitlines() == [
        f"{file}:3: reward: Expected `float | null`, got `str`",
        f"{file}:4: messages: must have one of the assistant, as its answer",
        "nothing is imported",
    ]


def test_of_many_bad_lines_the_first_are_named_and_the_others_counted(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(b"nope\n" * (FAULTS_SHOWN_MAX + 5))
    with pytest.raises(FileRefusedError, match="and 5 more") as refused:
        check_file(file)
    assert len(str(refused.value).splitlines()) == FAULTS_SHOWN_MAX + 2


def test_a_file_without_a_line_is_refused_and_blank_lines_count_as_none(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(b"\n \n")
    with pytest.raises(FileRefusedError, match="has no conversation"):
        check_file(file)
    file.write_bytes(b"\n" + line() + b"\n\n" + line(reward=1))
    assert check_file(file) == 2


def test_more_lines_than_a_run_takes_are_refused_before_one_is_checked(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(b"nope\n" * (KEYS_MAX + 1))
    with pytest.raises(FileRefusedError) as refused:
        check_file(file)
    assert str(refused.value) == (
        f"{file}: has 49,153 conversations, and a run takes 49,152 in all its imports: import a "
        "part, and the rest into another run; a supervised domain trains on more if its queue has "
        "them as its task_file\nnothing is imported"
    )


def test_a_byte_order_mark_ahead_of_the_lines_is_skipped(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    file.write_bytes(BOM_UTF8 + line() + b"\n" + line(reward=1) + b"\n")
    assert check_file(file) == 2


def test_the_longest_line_is_taken_whatever_ends_it(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    longest = line(result="x" * (LINE_BYTES_MAX - len(line(result=""))))
    file.write_bytes(longest + b"\r\n" + line() + b"\n")
    assert (len(longest), check_file(file)) == (LINE_BYTES_MAX, 2)


@pytest.mark.slow
def test_a_line_of_any_length_is_refused_by_its_number_and_not_held_in_memory(tmp_path: Path):
    file = tmp_path / "talks.jsonl"
    with file.open("wb") as written:
        for _ in range(8):
            written.write(b"x" * LINE_BYTES_MAX)
        written.write(b"\n" + line(reward="1"))
    tracemalloc.start()
    try:
        with pytest.raises(FileRefusedError) as refused:
            check_file(file)
        held_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(refused.value).splitlines() == [
        f"{file}:1: has more than {LINE_BYTES_MAX} bytes, which is the most that a line may have",
        f"{file}:2: reward: Expected `float | null`, got `str`",
        "nothing is imported",
    ]
    assert held_bytes < 5 * LINE_BYTES_MAX


def test_what_can_be_read_only_once_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "talks.jsonl")
    with pytest.raises(FileRefusedError, match=r"talks\.jsonl: must be a file or a folder"):
        check_file(tmp_path / "talks.jsonl")
