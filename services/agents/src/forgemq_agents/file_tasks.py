"""The tasks that the files of a queue have, refused by field if they cannot be played."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from forgemq_agents.conversation_files import read_conversations
from forgemq_agents.errors import TaskFileError
from forgemq_agents.task_file import read_tasks, repeated
from forgemq_contracts.run import Evaluation, Queue

_SHOWN_CHARACTERS = 200
"""Of a task in an error."""


class FileTasks(NamedTuple):
    """Tasks in the order of their files; held-out ones of which the first are played."""

    training: Sequence[Any]
    held_out: Sequence[Any] = ()


def tasks_in_files(queue: Queue, evaluation: Evaluation) -> FileTasks:
    """The tasks of a queue that names files; at least one trains.

    Raises:
        TaskFileError: naming the field, the file, the line or row and the rule.
    """
    name = f"queues.{queue.domain}"
    if queue.supervised is not None:
        return FileTasks(_conversations(queue.task_file, field=f"{name}.task_file"))
    training = _tasks(
        queue.task_file, queue.task_split, usual_split="train", field=f"{name}.task_file"
    )
    held_out = []
    if queue.held_out_file:
        field = f"{name}.held_out_file"
        held_out = _tasks(
            queue.held_out_file, queue.held_out_split, usual_split="test", field=field
        )
        _check_apart(training, held_out, field=field)
    if len(held_out) < evaluation.tasks:
        raise TaskFileError(
            f"{name}.held_out_file: {queue.held_out_file} has {len(held_out)} tasks, and "
            f"evaluation.tasks is {evaluation.tasks}"
        )
    if queue.curriculum is not None and (why := pool_refusal(queue, evaluation, len(training))):
        raise TaskFileError(why)
    return FileTasks(training, held_out)


def pool_refusal(queue: Queue, evaluation: Evaluation, pool: int) -> str:
    """Why a curriculum cannot choose from so many tasks; "" if it can."""
    if pool <= evaluation.task_offset:
        return ""
    return (
        f"queues.{queue.domain}.curriculum: its pool has {pool} tasks, and evaluation.task_offset "
        "must be at least that: tasks are held out from there on, got "
        f"{evaluation.task_offset}"
    )


def _check_apart(training: Sequence[Any], held_out: Sequence[Any], *, field: str) -> None:
    both = repeated(held_out, training=training)
    if both:
        raise TaskFileError(
            f"{field}: {len(both)} of its {len(held_out)} tasks are among those of task_file, "
            f"which train; the first is task {both[0]}, counted from 0: "
            f"{str(held_out[both[0]])[:_SHOWN_CHARACTERS]}"
        )


def _place(path: str) -> Path:
    place = Path(path)
    if place.exists() and not (place.is_file() or place.is_dir()):
        # Opening a pipe waits for one that writes, without end.
        raise TaskFileError(f"{path} is no file and no folder, but a pipe or a device")
    return place


def _conversations(path: str, *, field: str) -> list[Any]:
    try:
        conversations = read_conversations(_place(path))
    except TaskFileError as error:
        raise TaskFileError(f"{field}: {error}") from error
    if not conversations:
        raise TaskFileError(f"{field}: {path} has no conversation")
    return conversations


def _tasks(path: str, split: str, *, usual_split: str, field: str) -> list[Any]:
    try:
        tasks = read_tasks(_place(path), split=split, usual_split=usual_split)
    except TaskFileError as error:
        raise TaskFileError(f"{field}: {error}") from error
    if not tasks:
        raise TaskFileError(f"{field}: {path} has no task")
    return tasks
