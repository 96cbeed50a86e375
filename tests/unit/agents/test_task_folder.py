"""Folders of tasks with splits: which files are meant, and that held-out tasks never train."""

import json
from pathlib import Path

import msgspec
import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from forgemq_agents.errors import TaskFileError
from forgemq_agents.task_file import read_tasks, repeated
from forgemq_agents.user_code import UserCodeError, load_domains
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer


def rows_of(name: str, *, count: int = 2) -> list[dict[str, object]]:
    return [{"question": f"{name} {number}", "answer": number} for number in range(count)]


def write(folder: Path, *names: str) -> Path:
    """Files whose tasks say the file that they are from."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows_of(name)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    return folder


def read(folder: Path, split: str = "", *, usual_split: str = "train") -> list[str]:
    """The files that the tasks are from, in their order."""
    tasks = read_tasks(folder, split=split, usual_split=usual_split)
    return list(dict.fromkeys(task["question"].rpartition(" ")[0] for task in tasks))


SHARDS = (
    "train-00000-of-00002.parquet",
    "train-00001-of-00002.parquet",
    "test-00000-of-00001.parquet",
    "validation-00000-of-00001.parquet",
)


@pytest.mark.parametrize("place", ["", "data/"])
def test_the_folder_of_a_data_set_gives_the_split_that_is_meant_and_no_other(tmp_path, place):
    folder = write(tmp_path, *(place + name for name in SHARDS))
    (tmp_path / "README.md").write_text("splits")
    train, test = [place + name for name in SHARDS[:2]], [place + SHARDS[2]]
    assert read(folder) == train
    assert read(folder, usual_split="test") == read(folder, "test") == test
    assert read(folder, "validation") == [place + SHARDS[3]]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("maths_train.jsonl", "maths_test.jsonl"),
        ("training/a.jsonl", "eval/a.jsonl"),
        ("data/train/0000.parquet", "data/test/0000.parquet"),
    ],
)
def test_a_split_is_a_word_in_the_name_of_a_file_or_of_its_folder(tmp_path, names):
    folder = write(tmp_path, *names)
    assert read(folder) == [names[0]]
    assert read(folder, usual_split="test") == [names[1]]


def test_a_split_of_shards_has_its_whole_name(tmp_path):
    names = ("train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet")
    folder = write(tmp_path, *names)
    assert read(folder, "train_sft") == [names[0]]
    with pytest.raises(TaskFileError, match=r"splits train_gen, train_sft and not 'train': name"):
        read(folder)


def test_a_folder_whose_names_have_no_split_is_read_whole(tmp_path):
    """contest and trainer have no word that stands by itself."""
    names = ("contest.jsonl", "data-00000-of-00001.parquet", "trainer.jsonl")
    assert read(write(tmp_path, *names), usual_split="test") == list(names)
    with pytest.raises(TaskFileError, match="has no splits in the names of its files, got 'dev'"):
        read(tmp_path, "dev")
    with pytest.raises(TaskFileError, match=r"is no folder, so it has no splits, got 'dev'"):
        read(tmp_path / "contest.jsonl", "dev")


def test_a_file_of_no_split_beside_splits_is_refused(tmp_path):
    write(tmp_path, "train.jsonl", "test.jsonl", "more.jsonl")
    with pytest.raises(TaskFileError, match=r"splits test, train, and more\.jsonl is of none"):
        read(tmp_path)


def test_a_data_set_of_several_configurations_is_refused_with_their_folders(tmp_path):
    write(tmp_path, *(f"{name}/{SHARDS[0]}" for name in ("main", "socratic")))
    with pytest.raises(TaskFileError, match="name one of its folders main, socratic"):
        read(tmp_path)
    assert read(tmp_path / "main") == [f"main/{SHARDS[0]}"]


def test_what_datasets_saved_to_disk_is_read_with_and_without_splits(tmp_path):
    parts = {name: rows_of(name, count=5) for name in ("train", "odd")}
    splits = DatasetDict({name: Dataset.from_list(rows) for name, rows in parts.items()})
    splits.save_to_disk(tmp_path / "splits", num_shards={"train": 2, "odd": 1})
    splits["odd"].save_to_disk(tmp_path / "one")
    assert read_tasks(tmp_path / "splits") == parts["train"]
    assert read_tasks(tmp_path / "splits", split="odd") == parts["odd"]
    assert read_tasks(tmp_path / "one", usual_split="test") == parts["odd"]


def test_tasks_are_the_same_if_all_their_fields_are_whatever_their_order():
    training = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert repeated([{"b": 2, "a": 1}, {"a": 1}, {"a": 3, "b": 4}], training=training) == [0, 2]


def run_of(**files: str) -> RunConfiguration:
    queue = Queue(domain="d", task_source="", agent="forgemq_agents.supervised:play", **files)
    return RunConfiguration(
        run="r",
        seed=3,
        model=Model(path="m"),
        queues=(queue,),
        trainer=Trainer(steps=1),
        evaluation=Evaluation(tasks=2, task_offset=1000),
    )


def test_one_folder_as_both_trains_one_split_and_holds_out_the_other(tmp_path):
    folder = str(write(tmp_path, *SHARDS[1:]))
    source = load_domains(run_of(task_file=folder, held_out_file=folder))["d"].task_source
    asked = [source(3, "d", number)["question"] for number in (*range(20), 1000, 1001)]
    assert set(asked[:20]) == {row["question"] for row in rows_of(SHARDS[1])}
    assert asked[20:] == [row["question"] for row in rows_of(SHARDS[2])]


def test_a_run_whose_held_out_tasks_train_is_refused_with_the_field(tmp_path):
    folder = write(tmp_path, *SHARDS[1:3])
    (tmp_path / "more").mkdir()
    leaking = [*rows_of("new"), rows_of(SHARDS[2])[1]]
    (tmp_path / "more" / "leak.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, leaking)))
    run = run_of(task_file=str(tmp_path / "more"), held_out_file=str(folder))
    message = (
        r"^queues\.d\.held_out_file: 1 of its 2 tasks are among those of task_file, which train; "
        r"the first is task 1, counted from 0: .*'test-00000-of-00001\.parquet 1'"
    )
    with pytest.raises(UserCodeError, match=message):
        load_domains(run)
    same = run_of(task_file=str(folder), held_out_file=str(folder), held_out_split="train")
    with pytest.raises(UserCodeError, match=r"held_out_file: 2 of its 2 tasks"):
        load_domains(same)
