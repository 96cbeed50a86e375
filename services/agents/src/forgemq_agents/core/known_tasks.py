"""What a run knows of the tasks of a pool, as the results of its groups add up."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forgemq_contracts.curriculum import TaskResult


@dataclass(slots=True)
class KnownTask:
    """One task of the pool.

    Attributes:
        by_version: Of the newest versions: version -> [episodes scored, of these solved].
        asked: Number of the newest group that was asked for with it; -1: never.
        open: Groups that were asked for with it and whose result is not known.
    """

    by_version: dict[int, list[int]] = field(default_factory=dict)
    asked: int = -1
    open: int = 0

    @property
    def tries(self) -> int:
        """Episodes scored."""
        return sum(scored for scored, _ in self.by_version.values())

    @property
    def solved(self) -> int:
        """Episodes that solved it."""
        return sum(solved for _, solved in self.by_version.values())

    @property
    def success(self) -> float | None:
        """Share of the episodes that solved it; None if it has no result."""
        return self.solved / self.tries if self.tries else None


class KnownTasks:
    """All tasks of a pool, by their number.

    A pure fold: the same results and the same groups asked for give the same state, so a choice can
    be made again from the log.

    Attributes:
        results: How many results are in it.
    """

    def __init__(self, count: int, *, versions: int) -> None:
        """A pool of `count` tasks; only results under the `versions` newest versions count."""
        self.results = 0
        self._tasks = [KnownTask() for _ in range(count)]
        self._versions = versions
        self._newest = 0
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, task_number: int) -> KnownTask:
        task = self._tasks[task_number]
        oldest = self._newest - self._versions + 1
        for version in [version for version in task.by_version if version < oldest]:
            del task.by_version[version]
        return task

    def ask(self, number: int, task_number: int) -> None:
        """Note that group `number` of the domain was asked for with this task."""
        self._open[number] = task_number
        task = self._tasks[task_number]
        task.asked, task.open = number, task.open + 1

    def learn(self, results: Sequence[TaskResult]) -> None:
        """Add the results that follow those that are in it."""
        for result in results:
            assert result.index == self.results, "results come without gaps"
            self.results += 1
            self._newest = max(self._newest, result.version)
            task = self._tasks[result.task_number]
            sums = task.by_version.setdefault(result.version, [0, 0])
            sums[0] += result.scored
            sums[1] += result.solved
            if self._open.pop(result.number, None) is not None:
                task.open -= 1
            task.asked = max(task.asked, result.number)
