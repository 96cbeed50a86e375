"""A run's files of tasks are read and compared before anything is started."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.task_files import FoundTasks
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.core.task_changes import task_changes
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_launcher.task_files import found_tasks, unread_here
from tests.small_run import small_run
from tests.unit.launcher.test_commands import DEMO, tool

tool = tool

slow = partial(pytest.param, marks=pytest.mark.slow)
TASKS = [{"goal": f"g{number}", "id": number} for number in range(3)]


def write(path: Path, tasks: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))


def run_of(file: Path, **fields: object) -> RunConfiguration:
    """A run whose one queue has the tasks of this file."""
    made = small_run(group_partitions=1)
    own = {"domain": "desk", "agent": "desk:play", "task_source": ""}
    files = {**own, "task_file": str(file), **fields}
    queue = msgspec.structs.replace(made.queues[0], **files)
    evaluation = msgspec.structs.replace(
        made.evaluation, tasks=1 if "held_out_file" in files else 0
    )
    return msgspec.structs.replace(made, queues=(queue,), evaluation=evaluation)


def read(made: RunConfiguration, *, known: tuple[ReadTasks, ...] = ()) -> FoundTasks:
    return found_tasks(made, source="run.toml", environ=os.environ, known=known)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"goal": 1}\n\n{"goal": \n', r"queues\.desk\.task_file: .*t\.jsonl, line 3: Input data"),
        ("\n", r"queues\.desk\.task_file: .*t\.jsonl has no task"),
    ],
)
def test_a_file_that_the_agents_cannot_read_is_refused_with_file_line_and_rule(
    tmp_path, content, message
):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(ConfigurationError, match=rf"^run\.toml: {message}"):
        read(run_of(tmp_path / "t.jsonl"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t.jsonl")
    with pytest.raises(ConfigurationError, match=r"desk\.task_file: .*t\.jsonl is no file and no"):
        read(run_of(tmp_path / "t.jsonl"))


def test_the_python_that_plays_the_agents_reads_their_files(tmp_path):
    """It may lack what another one has to read them, as pyarrow."""
    write(tmp_path / "t.jsonl", TASKS)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no pyarrow here >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"read its files of tasks: no pyarrow here$"):
        found_tasks(
            run_of(tmp_path / "t.jsonl"),
            source="run.toml",
            environ=os.environ,
            agents_python=str(python),
        )


def test_a_conversation_that_is_none_is_refused_with_its_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"messages": []}\n')
    made = run_of(tmp_path / "t.jsonl", agent="", supervised={"fraction": 1.0})
    made = msgspec.json.decode(msgspec.json.encode(made), type=RunConfiguration)
    with pytest.raises(
        ConfigurationError, match=r"queues\.desk\.task_file: .*t\.jsonl:1: messages"
    ):
        read(made)


@pytest.mark.parametrize("command", ["run", "plan", "create"])
def test_a_run_with_a_bad_row_is_refused_before_anything_is_started(tool, tmp_path, command):
    (tmp_path / "t.jsonl").write_text('{"goal": 1}\nno JSON\n')
    status, printed = tool(
        *(command, str(DEMO / "run.toml"), "queues.shop_desk.task_source=", "evaluation.tasks=0"),
        f"queues.shop_desk.task_file={tmp_path / 't.jsonl'}",
        *(("--gpu", "h100") if command == "plan" else ()),
        **{**os.environ, "FORGEMQ_KAFKA": "127.0.0.1:1", "FORGEMQ_BLOBS": "blobs"},
    )
    assert (status, "t.jsonl, line 2: JSON is malformed" in printed) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_a_plan_for_other_machines_leaves_out_files_that_are_not_on_this_one(tmp_path):
    made = run_of(tmp_path / "none.jsonl")
    elsewhere = found_tasks(made, source="", environ=os.environ, is_elsewhere=True)
    assert elsewhere == FoundTasks()


def test_a_resume_over_an_outside_broker_compares_the_files_before_it_asks_the_broker(
    tool, tmp_path
):
    write(tmp_path / "t.jsonl", TASKS)
    made = msgspec.structs.replace(
        run_of(tmp_path / "t.jsonl", agent="shop_desk.agent:play"),
        model=msgspec.structs.replace(
            small_run(group_partitions=1).model, path=str(DEMO / "model")
        ),
        code_paths=(str(DEMO),),
    )
    folder = RunFolder(tmp_path / "runs" / made.run)
    folder.make(made)
    folder.keep_tasks(read(made).tasks)
    resume = ("run", str(DEMO / "run.toml"), "--resume", made.run)
    outside = {**os.environ, "FORGEMQ_KAFKA": "127.0.0.1:1"}
    write(tmp_path / "t.jsonl", TASKS[1:])
    status, printed = tool(*resume, **outside)
    assert (status, "the run has had 3 tasks, and there are 2 now" in printed) == (2, True)
    (tmp_path / "t.jsonl").write_text("no JSON\n")
    status, printed = tool(*resume, **outside)
    assert (status, "t.jsonl, line 1: JSON is malformed" in printed) == (2, True)


def test_a_machine_without_agents_leaves_out_files_of_a_run_for_other_machines(
    tmp_path, monkeypatch
):
    write(tmp_path / "t.jsonl", TASKS)
    made = run_of(tmp_path / "t.jsonl")
    assert unread_here(made) == ()
    monkeypatch.setitem(sys.modules, "forgemq_agents", None)
    assert unread_here(made) == ("desk",)
    elsewhere = found_tasks(made, source="", environ=os.environ, is_elsewhere=True)
    assert elsewhere == FoundTasks()


@pytest.mark.slow
def test_tasks_that_are_written_in_another_way_are_the_same(tmp_path):
    file = tmp_path / "t.jsonl"
    write(file, TASKS)
    known = read(run_of(file)).tasks
    write(file, [dict(sorted(task.items(), reverse=True)) for task in TASKS])
    found = read(run_of(file), known=known)
    assert (found.tasks, [*task_changes(known, found)]) == (known, [])


def test_a_resume_takes_tasks_that_were_added_and_says_how_many_there_are(tmp_path):
    file = tmp_path / "t.jsonl"
    write(file, TASKS[:2])
    known = read(run_of(file)).tasks
    write(file, TASKS)
    changes = task_changes(known, read(run_of(file), known=known))
    assert [*changes] == ["queues.desk.task_file: 2 tasks -> 3 tasks"]


@pytest.mark.parametrize(
    ("tasks", "difference"),
    [
        # Each starts Python twice; the fast suite keeps one.
        slow(TASKS[:1], "there are 1 now"),
        slow(TASKS[1::-1], "as many are there now, but they are not the same in the same order"),
        (TASKS[::-1], "the first 2 of the 3 that are there now are not the same"),
    ],
)
def test_a_resume_with_other_tasks_in_the_same_file_is_refused_with_the_difference(
    tmp_path, tasks, difference
):
    file = tmp_path / "t.jsonl"
    write(file, TASKS[:2])
    known = read(run_of(file)).tasks
    write(file, tasks)
    with pytest.raises(ConfigurationError) as refused:
        list(task_changes(known, read(run_of(file), known=known)))
    assert str(refused.value) == (
        f"queues.desk.task_file: the run has had 2 tasks, and {difference}: a task that is asked "
        "for again must be the same task; set them back, or start a new run"
    )


@pytest.mark.slow
def test_of_held_out_tasks_those_that_are_played_are_compared(tmp_path):
    file, held_out = tmp_path / "t.jsonl", tmp_path / "h.jsonl"
    write(file, TASKS[:1])
    write(held_out, TASKS[1:])
    made = run_of(file, held_out_file=str(held_out))
    known = read(made).tasks
    write(held_out, TASKS[1:2])
    assert [*task_changes(known, read(made, known=known))] == []
    write(held_out, TASKS[2:])
    with pytest.raises(ConfigurationError, match=r"held_out_file: .*all play the same tasks"):
        list(task_changes(known, read(made, known=known)))


def test_the_tasks_of_a_run_are_kept_in_its_folder(tmp_path):
    write(tmp_path / "t.jsonl", TASKS)
    made = run_of(tmp_path / "t.jsonl")
    folder, found = RunFolder(tmp_path / "runs" / made.run), read(made)
    folder.make(made)
    assert folder.tasks() == ()
    folder.keep_tasks(found.tasks)
    assert folder.tasks() == found.tasks
    (folder / "tasks.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"tasks\.json: "):
        folder.tasks()
