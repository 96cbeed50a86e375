"""Ready samplers: which task of a pool is asked for next, by what is known of all.

Each is a pure function of its arguments, so a choice can be made again from the log. None asks for
a task that is being played already, unless all are.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from forgemq_agents.core.known_tasks import KnownTask, KnownTasks
from forgemq_contracts.curriculum import Curriculum

Sampler: TypeAlias = Callable[..., int]
"""(tasks, *, key, curriculum) -> task number. `key` differs for each choice of a run."""


def success_band(tasks: KnownTasks, *, key: str, curriculum: Curriculum) -> int:
    """Any task whose success is in the band, or that has none yet; all are equally likely.

    Source of the idea: groups without variance teach nothing; Kimi k1.5 (arXiv 2501.12599) and DAPO
    (arXiv 2503.14476) leave tasks of success 0 and 1 out.
    """
    low, high = curriculum.success_min, curriculum.success_max
    fit = [
        number
        for number, task in _free(tasks)
        if task.success is None or low <= task.success <= high
    ]
    return _explored(tasks, fit, key=key, explore=curriculum.explore)


def age(tasks: KnownTasks, *, key: str, curriculum: Curriculum) -> int:  # noqa: ARG001
    """The task that was not asked for the longest; of those that never were, any."""
    return _oldest(tasks, key=key)


def hardest_first(tasks: KnownTasks, *, key: str, curriculum: Curriculum) -> int:
    """The task that is solved least often, of those that are not always or never solved.

    A task without results counts as one that is solved in half of the tries.
    """
    known = {number: task.success for number, task in _free(tasks)}
    rates = {n: 0.5 if rate is None else rate for n, rate in known.items() if rate not in (0, 1)}
    lowest = min(rates.values(), default=0.0)
    fit = [number for number, rate in rates.items() if rate == lowest]
    return _explored(tasks, fit, key=key, explore=curriculum.explore)


READY: dict[str, Sampler] = {
    "success_band": success_band,
    "age": age,
    "hardest_first": hardest_first,
}


def _explored(tasks: KnownTasks, fit: Sequence[int], *, key: str, explore: float) -> int:
    """One of these, or in a share of the choices the oldest of all."""
    if not fit or _unit(f"{key}/explore") < explore:
        return _oldest(tasks, key=key)
    return fit[int(_unit(key) * len(fit))]


def _oldest(tasks: KnownTasks, *, key: str) -> int:
    asked = {number: task.asked for number, task in _free(tasks)}
    first = min(asked.values())
    oldest = [number for number, when in asked.items() if when == first]
    return oldest[int(_unit(key) * len(oldest))]


def _free(tasks: KnownTasks) -> list[tuple[int, KnownTask]]:
    """Tasks that nobody plays; all tasks if there is none."""
    numbered = [(number, tasks[number]) for number in range(len(tasks))]
    return [(number, task) for number, task in numbered if not task.open] or numbered


def _unit(text: str) -> float:
    """A number from 0 to below 1 that the text decides, on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=6, person=b"task-sampler").digest()
    return int.from_bytes(digest, "big") / 2**48
