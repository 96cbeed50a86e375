"""`python -m forgemq_agents.check_tasks`: whether the files of a run's tasks can be played.

Question and answer are those of `forgemq_contracts.task_files`. The files are read as the agents
themselves read them; no code of the user runs.
"""

import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from forgemq_agents.errors import TaskFileError
from forgemq_agents.file_tasks import tasks_in_files
from forgemq_contracts.read_tasks import ReadTasks, TaskField
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.task_files import AskedTasks, FoundTasks

_CHECKSUM_BYTES = 16
"""It tells apart files that people change, and is kept for each of them."""


def main() -> None:
    """Answer the question on standard input."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=AskedTasks)
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


def answer(question: AskedTasks) -> FoundTasks:
    """What the files have, or why they cannot be played."""
    made, tasks, begin = question.configuration, list[ReadTasks](), list[ReadTasks]()
    known = {(each.domain, each.field): each for each in question.known}
    try:
        for queue in made.queues:
            if queue.domain not in question.domains:
                continue
            for field, values in _fields(queue, made):
                now = _read(values, domain=queue.domain, field=field)
                was = known.get((queue.domain, field))
                tasks.append(now)
                if was is not None and was == _first(values, now, was.count):
                    begin.append(was)
    except TaskFileError as error:
        return FoundTasks(refusal=str(error))
    return FoundTasks(tasks=tuple(tasks), begin_as_known=tuple(begin))


def _fields(queue: Queue, made: RunConfiguration) -> Iterator[tuple[TaskField, Sequence[Any]]]:
    """The fields of a queue that name files, and the tasks that a run plays of them."""
    found = tasks_in_files(queue, made.evaluation)
    yield "task_file", found.training
    if found.held_out:
        yield "held_out_file", found.held_out[: made.evaluation.tasks]


def _first(tasks: Sequence[Any], read: ReadTasks, count: int) -> ReadTasks:
    """The first `count` of these tasks, of which all are read; all, if there are no more."""
    if count >= read.count:
        return read
    return _read(tasks[:count], domain=read.domain, field=read.field)


def _read(tasks: Sequence[Any], *, domain: str, field: TaskField) -> ReadTasks:
    digest = blake2b(digest_size=_CHECKSUM_BYTES)
    for task in tasks:
        digest.update(msgspec.json.encode(task, order="deterministic"))
        digest.update(b"\n")
    return ReadTasks(domain=domain, field=field, count=len(tasks), checksum=digest.hexdigest())


if __name__ == "__main__":
    main()
