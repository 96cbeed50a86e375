"""What became of the tasks in a run's files between two of its starts."""

from collections.abc import Iterator, Sequence

from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.task_files import FoundTasks
from forgemq_launcher.core.configuration import ConfigurationError

_REASONS = {
    "task_file": "a task that is asked for again must be the same task",
    "held_out_file": "the rounds of a run are compared, so all play the same tasks",
}
"""The same for which a resume cannot name another file."""


def task_changes(known: Sequence[ReadTasks], found: FoundTasks) -> Iterator[str]:
    """What a resume says of files to which tasks were added, as `name: before -> after`.

    Args:
        known: As the run has had them.
        found: As they are now; files that the run has not had before are no change.

    Raises:
        ConfigurationError: the file no longer begins with the tasks that the run has had.
    """
    now = {(each.domain, each.field): each for each in found.tasks}
    for was in known:
        each = now.get((was.domain, was.field))
        if each is None or each == was:
            continue
        name = f"queues.{was.domain}.{was.field}"
        if was not in found.begin_as_known:
            raise ConfigurationError(
                f"{name}: the run has had {was.count} tasks, and {_difference(was, each)}: "
                f"{_REASONS[was.field]}; set them back, or start a new run"
            )
        yield f"{name}: {was.count} tasks -> {each.count} tasks"


def _difference(was: ReadTasks, now: ReadTasks) -> str:
    if now.count < was.count:
        return f"there are {now.count} now"
    if now.count == was.count:
        return "as many are there now, but they are not the same in the same order"
    return f"the first {was.count} of the {now.count} that are there now are not the same"
