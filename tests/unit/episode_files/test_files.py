"""Files of episodes: rows come back equal, `datasets` reads them, and what is wrong is named."""

import itertools

import datasets
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_floats
from forgemq_episode_files.arrow_rows import SCHEMA, RowError, from_arrow, to_arrow
from forgemq_episode_files.reading import FileError, read_rows
from forgemq_episode_files.writing import EpisodeWriter
from tests.unit.episode_files.played import CALL, LOGPROBS, rows


def write(folder, made, **limits):
    with EpisodeWriter(folder, **limits) as writer:
        for row in made:
            writer.write(row)
    return writer


def read(path):
    return tuple(from_arrow(values) for values in read_rows(path))


def test_rows_come_back_equal_and_log_probabilities_bit_for_bit(tmp_path):
    writer = write(tmp_path, rows())
    assert [path.name for path in writer.files] == ["episodes-00000.parquet"]
    back = read(writer.files[0])
    assert back == rows()
    assert back[0].turns[0].logprobs == pack_floats(LOGPROBS)
    assert [path.name for path in tmp_path.iterdir()] == ["episodes-00000.parquet"]


def test_datasets_loads_the_folder_and_what_it_saves_is_read_again(tmp_path):
    write(tmp_path / "", rows())
    loaded = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 2
    assert loaded[0]["messages"][1]["role"] == "user"
    assert loaded[0]["turns"][0]["output_ids"] == [20, 30, 2, 40]
    assert loaded[0]["turns"][0]["logprobs"] == unpack_floats(pack_floats(LOGPROBS))
    saved = tmp_path / "saved.parquet"
    loaded.filter(lambda row: not row["is_masked"]).to_parquet(saved)
    assert read(saved) == rows()[:1]


def test_files_and_row_groups_are_cut_at_their_tokens_and_keep_the_order(tmp_path):
    first, second = rows()
    made = [
        msgspec.structs.replace(row, episode_id=f"g.{number}.0")
        for number, row in enumerate(itertools.islice(itertools.cycle((first, second)), 10))
    ]
    # A row of the first has 22 tokens, one of the second 6: a row group is a pair of them.
    writer = write(tmp_path, made, held_tokens_max=25, file_tokens_max=50)
    assert writer.rows == 10
    assert [parquet.ParquetFile(path).num_row_groups for path in writer.files] == [2, 2, 1]
    assert tuple(row for path in writer.files for row in read(path)) == tuple(made)


def test_an_export_that_fails_leaves_no_file_that_is_not_whole(tmp_path):
    def broken():
        yield rows()[0]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write(tmp_path, broken(), held_tokens_max=1)
    assert list(tmp_path.iterdir()) == []


def test_calls_are_in_the_column_of_calls_and_rest_has_only_what_it_cannot_hold():
    odd = {**CALL, "index": 0}
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": [odd]},
    )
    made = to_arrow(msgspec.structs.replace(rows()[0], messages=messages))["messages"]
    assert [each.get("tool_calls") for each in made] == [[CALL], [], None]
    assert [each["rest"] and msgspec.json.decode(each["rest"]) for each in made] == [
        None,
        {"content": None},
        {"tool_calls": [odd]},
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
CALLS = st.fixed_dictionaries(
    {"id": TEXTS, "type": st.just("function"),
     "function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})},
    optional={"index": st.integers(0, 3)},
)  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": st.none() | TEXTS | st.lists(st.fixed_dictionaries({"text": TEXTS})),
        "reasoning_content": st.none() | TEXTS,
        "tool_calls": st.none() | st.lists(CALLS, max_size=2),
        "tool_call_id": TEXTS,
        "name": TEXTS,
        "x": st.integers(-(2**40), 2**40)
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False, width=32),
    },
)


@given(st.lists(MESSAGES, max_size=4), st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))  # noqa: E501  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_message_and_any_finite_log_probability_comes_back_equal(messages, logprobs):
    count = len(logprobs)
    turn = msgspec.structs.replace(
        rows()[0].turns[0],
        logprobs=pack_floats(logprobs),
        output_ids=pack_ids([5] * count),
        versions=pack_ids([0] * count),
        messages=tuple(messages),
    )
    made = msgspec.structs.replace(rows()[0], messages=tuple(messages), turns=(turn,))
    batch = pa.RecordBatch.from_pylist([to_arrow(made)], schema=SCHEMA)
    assert from_arrow(batch.to_pylist()[0]) == made


def values(**changes):
    batch = pa.RecordBatch.from_pylist([to_arrow(rows()[0])], schema=SCHEMA)
    return {**batch.to_pylist()[0], **changes}


def turn_with(**changes):
    made = values()
    return [{**made["turns"][0], **changes}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "moon"}, "source: Invalid enum value 'moon'"),
        ({"run": None}, "run: Expected `str`, got `null`"),
        ({"outcome": float("nan")}, "outcome: must be finite, got nan"),
        ({"result": "{"}, "result: no JSON"),
        ({"task": "[" * 100_000}, "task: no JSON: maximum recursion depth exceeded"),
        ({"metadata": "[1]"}, "metadata: Expected `object | null`, got `array`"),
        ({"tools": "{}"}, "tools: no JSON array of objects"),
        ({"messages": [None]}, "messages[0]: must not be null"),
        ({"turns": None}, "turns: must not be null"),
        ({"turns": turn_with(logprobs=[-1.0])}, "turns[0]: logprobs: must have 4 items, has 1"),
        (
            {"turns": turn_with(logprobs=[float("inf")] * 4)},
            "turns[0]: logprobs: an item is not finite",
        ),
        (
            {"turns": turn_with(output_ids=[1, None, 2, 3])},
            "turns[0].output_ids: item 1 must not be null",
        ),
        ({"turns": turn_with(output_ids=[1, -1, 2, 3])}, "turns[0]: output_ids: a token id is negative"),  # noqa: E501
        ({"turns": turn_with(versions=[1])}, "turns[0]: versions: must have 4 items"),
        ({"turns": turn_with(sequence=-1)}, "turns[0].sequence: Expected `int` >= 0"),
        ({"turns": turn_with(fork_reason="whim")}, "turns[0].fork_reason: Invalid enum value"),
        ({"turns": turn_with(advantage=float("nan"))}, "turns[0]: advantage: must be finite"),
        ({"turns": turn_with(shared_prefix_tokens=3)}, "turns[0]: shared_prefix_tokens: 3 are shared with no parent_id"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_by_its_field_and_rule(changes, said):
    with pytest.raises(RowError) as refused:
        from_arrow(values(**changes))
    assert str(refused.value).startswith(said)


def table(**columns):
    made = pa.Table.from_pylist([to_arrow(rows()[0])], schema=SCHEMA)
    for name, column in columns.items():
        if column is None:
            made = made.drop_columns([name])
        elif name in made.schema.names:
            made = made.set_column(made.schema.get_field_index(name), name, column)
        else:
            made = made.append_column(name, column)
    return made


def test_a_file_with_other_columns_is_refused_by_the_column_and_its_type(tmp_path):
    path = tmp_path / "e.parquet"
    doubles = pa.schema(
        [
            field if field.name != "outcome" else pa.field("outcome", pa.float32())
            for field in SCHEMA
        ]
    )
    for made, said in (
        (table(is_masked=None), "column is_masked: is missing"),
        (table(mine=pa.array([1])), "column mine: no column of episodes has this name"),
        (table(turns=pa.array([[{"sequence": 1}]])), "column turns[].completion_id: is missing"),
        (table().cast(doubles), "column outcome: must be double, is float"),
    ):
        parquet.write_table(made, path)
        with pytest.raises(FileError) as refused:
            tuple(read_rows(path))
        assert str(refused.value) == f"{path}: {said}"
    path.write_bytes(b"no parquet")
    with pytest.raises(FileError, match="no Parquet file"):
        tuple(read_rows(path))


def test_a_file_with_text_that_is_no_utf_8_is_refused(tmp_path):
    path = tmp_path / "e.parquet"
    text = pa.array([b"\xff"])
    parquet.write_table(table(detail=pa.StringArray.from_buffers(1, *text.buffers()[1:])), path)
    with pytest.raises(FileError, match=r"e\.parquet: no Parquet file: 'utf-8' codec"):
        tuple(read_rows(path))
