"""Tasks from files: their order, which of them are held out, and what a wrong file says."""

import datetime
import json
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from forgemq_agents.core.task_order import order_of_pass
from forgemq_agents.errors import TaskFileError
from forgemq_agents.task_file import TaskFile, read_tasks
from forgemq_agents.task_size import TASK_BYTES_MAX
from forgemq_agents.user_code import UserCodeError, load_domains
from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.supervised import Supervised


@given(st.integers(1, 60), st.integers(0, 3), st.integers(0, 5))
def test_every_pass_has_each_line_once(count, seed, number):
    order = order_of_pass(count, seed=seed, domain="d", number=number)
    assert sorted(order) == list(range(count))


def test_the_order_of_a_pass_is_the_same_on_every_machine_and_differs_by_what_names_it():
    first = list(order_of_pass(8, seed=0, domain="d", number=0))
    others = [
        list(order_of_pass(8, seed=seed, domain=domain, number=number))
        for seed, domain, number in ((1, "d", 0), (0, "e", 0), (0, "d", 1))
    ]
    assert first == [4, 7, 2, 0, 5, 3, 6, 1]
    assert first not in others


def test_passes_follow_one_another_and_held_out_tasks_come_in_file_order():
    tasks = TaskFile(["a", "b", "c"], ["x", "y"], evaluation=Evaluation(tasks=2, task_offset=100))
    passes = [[tasks(7, "d", 3 * number + place) for place in range(3)] for number in range(20)]
    assert all(sorted(each) == ["a", "b", "c"] for each in passes)
    assert len({tuple(each) for each in passes}) > 1
    assert [tasks(7, "d", 100), tasks(7, "d", 101)] == ["x", "y"]


def test_passes_go_on_behind_the_held_out_tasks():
    tasks = TaskFile(["a", "b", "c"], ["x", "y"], evaluation=Evaluation(tasks=2, task_offset=4))
    numbers = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    trained = [tasks(7, "d", number) for number in numbers]
    assert [sorted(trained[start : start + 3]) for start in (0, 3, 6)] == [["a", "b", "c"]] * 3
    assert [tasks(7, "d", 4), tasks(7, "d", 5)] == ["x", "y"]


def test_lines_rows_and_folders_of_both_are_read(tmp_path):
    rows = [{"question": "1+1", "answer": 2}, {"question": "1+2", "answer": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("not a task")
    assert read_tasks(tmp_path / "a.jsonl") == rows
    assert read_tasks(tmp_path / "b.parquet") == rows[::-1]
    assert read_tasks(tmp_path) == [*rows, *rows[::-1]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: Input data was truncated"),
        ("a.jsonl", b"\xff\n", r"a\.jsonl, line 1: "),
        ("a.jsonl", b'1\n{"a": "\xff"}\n', r"a\.jsonl, line 2: 'utf-8' codec can't decode"),
        ("a.jsonl", b"1\n" + b"[" * 100_000, r"a\.jsonl, line 2: maximum recursion depth"),
        ("a.csv", b"a,b", r"a\.csv must end in \.jsonl, \.parquet or \.arrow"),
        ("a.parquet", b"PAR1", r"a\.parquet is no Parquet file"),
        ("a.arrow", b"ARROW1", r"a\.arrow is no stream of Arrow"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskFileError, match=message):
        read_tasks(tmp_path / name)


def test_a_byte_order_mark_ahead_of_the_lines_is_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": 1}\n{"a": 2}\n')
    assert read_tasks(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}]


def test_half_an_emoji_is_the_replacement_character_and_a_whole_one_stays(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"cut": "a\\ud83d", "whole": "\\ud83d\\ude00"}\n')
    assert read_tasks(tmp_path / "a.jsonl") == [{"cut": "a\ufffd", "whole": "\U0001f600"}]


def test_values_of_a_row_that_json_lacks_come_in_the_form_that_json_has_for_them(tmp_path):
    row = {
        "day": pyarrow.array([datetime.date(2026, 5, 4)]),
        "second": pyarrow.array([0], pyarrow.timestamp("s")),
        "nanosecond": pyarrow.array([1], pyarrow.timestamp("ns", "UTC")),
        "span": pyarrow.array([1], pyarrow.duration("ns")),
        "price": pyarrow.array([Decimal("1.50")]),
        "bytes": pyarrow.array([b"\xff"]),
    }
    parquet.write_table(pyarrow.table(row), tmp_path / "a.parquet")
    [task] = read_tasks(tmp_path / "a.parquet")
    assert msgspec.json.decode(msgspec.json.encode(task)) == task
    assert task == {
        "day": "2026-05-04",
        "second": "1970-01-01T00:00:00",
        "nanosecond": "1970-01-01T00:00:00.000000001+00:00",
        "span": "P0DT0H0M0.000000001S",
        "price": "1.50",
        "bytes": "/w==",
    }


def test_a_value_of_a_row_that_cannot_be_read_is_named_by_row_and_column(tmp_path):
    text = pyarrow.array([b"a", b"\xff"])
    column = pyarrow.StringArray.from_buffers(2, *text.buffers()[1:])
    parquet.write_table(
        pyarrow.table({"n": pyarrow.array([1, 2]), "said": column}), tmp_path / "a.parquet"
    )
    with pytest.raises(TaskFileError, match=r"a\.parquet, row 1, column said: 'utf-8' codec"):
        read_tasks(tmp_path / "a.parquet")


def test_a_task_that_no_request_takes_is_refused_by_file_place_and_size(tmp_path):
    longest, longer = {"a": "x" * (TASK_BYTES_MAX - 8)}, {"a": "x" * (TASK_BYTES_MAX - 7)}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(longest)}\n\n{json.dumps(longer)}\n")
    size = f"has {TASK_BYTES_MAX + 1} bytes, a task has at most {TASK_BYTES_MAX}"
    with pytest.raises(TaskFileError, match=rf"a\.jsonl, line 3 {size}"):
        read_tasks(tmp_path / "a.jsonl")
    parquet.write_table(pyarrow.Table.from_pylist([longest, longer]), tmp_path / "a.parquet")
    with pytest.raises(TaskFileError, match=rf"a\.parquet, row 1 {size}"):
        read_tasks(tmp_path / "a.parquet")


def test_a_task_counts_by_its_length_as_it_is_sent(tmp_path):
    """Written out, 1e15 is a number of 18 characters."""
    numbers = ",".join(["1e15"] * (TASK_BYTES_MAX // 10))
    assert len(numbers) < TASK_BYTES_MAX
    (tmp_path / "a.jsonl").write_text(f"[{numbers}]\n")
    with pytest.raises(TaskFileError, match=r"a\.jsonl, line 1 has \d+ bytes, a task has"):
        read_tasks(tmp_path / "a.jsonl")


def test_a_folder_without_a_file_of_tasks_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("not a task")
    with pytest.raises(TaskFileError, match=r"has no file that ends in \.jsonl, \.parquet"):
        read_tasks(tmp_path)


@pytest.fixture
def code_path(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path)
    (tmp_path / "file_player.py").write_text("async def play(episode):\n    pass\n")
    yield tmp_path
    sys.path[:] = before


def run_of(folder: Path, *, evaluated: int = 0, **files: str) -> RunConfiguration:
    paths = {name: str(folder / file) for name, file in files.items()}
    return RunConfiguration(
        run="r",
        seed=3,
        model=Model(path="m"),
        queues=(Queue(domain="d", task_source="", agent="file_player:play", **paths),),
        trainer=Trainer(steps=1),
        evaluation=Evaluation(tasks=evaluated, task_offset=1000),
        code_paths=(str(folder),),
    )


def test_a_queue_may_name_files_in_place_of_a_task_source(code_path):
    (code_path / "train.jsonl").write_text('"a"\n"b"\n')
    (code_path / "test.jsonl").write_text('"x"\n')
    run = run_of(code_path, evaluated=1, task_file="train.jsonl", held_out_file="test.jsonl")
    source = load_domains(run)["d"].task_source
    assert sorted([source(3, "d", 0), source(3, "d", 1)]) == ["a", "b"]
    assert source(3, "d", 1000) == "x"


@pytest.mark.parametrize(
    ("files", "evaluated", "message"),
    [
        ({"task_file": "no.jsonl"}, 0, r"queues\.d\.task_file: .* cannot be read"),
        ({"task_file": "empty.jsonl"}, 0, r"queues\.d\.task_file: .*empty\.jsonl has no task"),
        (
            {"task_file": "one.jsonl", "held_out_file": "two.jsonl"},
            2,
            r"queues\.d\.held_out_file: .* has 1 tasks, and evaluation\.tasks is 2",
        ),
        (
            {"task_file": "one.jsonl", "held_out_file": "one.jsonl"},
            1,
            r"queues\.d\.held_out_file: 1 of its 1 tasks are among those of task_file, which train",
        ),
    ],
)
def test_a_file_that_cannot_serve_the_run_is_refused_with_its_field(
    code_path, files, evaluated, message
):
    (code_path / "one.jsonl").write_text("1\n")
    (code_path / "two.jsonl").write_text("2\n")
    (code_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserCodeError, match=message):
        load_domains(run_of(code_path, evaluated=evaluated, **files))


def test_a_file_as_a_pool_that_reaches_into_the_held_out_numbers_is_refused(code_path):
    (code_path / "train.jsonl").write_text("1\n" * 1001)
    run = run_of(code_path, task_file="train.jsonl")
    (queue,) = run.queues
    pooled = msgspec.structs.replace(queue, curriculum=Curriculum(sampler="age"))
    with pytest.raises(UserCodeError, match=r"^queues\.d\.curriculum: .* 1001 .* got 1000$"):
        load_domains(msgspec.structs.replace(run, queues=(pooled,)))


def test_a_supervised_queue_has_the_conversations_of_its_file_as_imports(code_path):
    talk = (
        '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "y"}]}'
    )
    (code_path / "talks.jsonl").write_text("".join(f"{talk % n}\n" for n in range(2)))
    run = run_of(code_path, task_file="talks.jsonl")
    (queue,) = run.queues
    changed = msgspec.structs.replace(queue, agent="", supervised=Supervised(fraction=1.0))
    code = load_domains(msgspec.structs.replace(run, queues=(changed,)))["d"]
    given = [code.task_source(3, "d", number)["messages"][0]["content"] for number in range(4)]
    assert sorted(given[:2]) == sorted(given[2:]) == ["0?", "1?"]
    assert code.source == "import"
    (code_path / "talks.jsonl").write_text(f"{talk % 1}\n" + '{"messages": []}\n')
    with pytest.raises(UserCodeError, match=r"queues\.d\.task_file: .*talks\.jsonl:2: messages"):
        load_domains(msgspec.structs.replace(run, queues=(changed,)))
