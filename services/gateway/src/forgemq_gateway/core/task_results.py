"""Results of each domain's curriculum, from its retired groups."""

from array import array
from collections.abc import Iterator

from forgemq_contracts.curriculum import TaskResult

_FIELDS = ("number", "task_number", "version", "scored", "solved")


class TaskResults:
    """The results of one domain, by index: 40 bytes each, for the life of the run.

    Partitions are read in any order. A result that comes before one of a lower index waits, so
    what `after` gives has no gaps.

    Example: 0 and 2 are added: one result. 1 is added: three.
    """

    def __init__(self) -> None:
        self._columns = {name: array("q") for name in _FIELDS}
        self._waiting: dict[int, TaskResult] = {}

    def __len__(self) -> int:
        return len(self._columns["number"])

    def add(self, result: TaskResult) -> None:
        """Note a result; one that is known changes nothing."""
        if result.index < len(self):
            return
        self._waiting[result.index] = result
        while (following := self._waiting.pop(len(self), None)) is not None:
            for name, column in self._columns.items():
                column.append(getattr(following, name))

    def after(self, index: int, *, count_max: int) -> Iterator[TaskResult]:
        """The results from this index on, at most so many."""
        for number in range(index, min(len(self), index + count_max)):
            row = {name: column[number] for name, column in self._columns.items()}
            yield TaskResult(index=number, **row)
