"""Which task a curriculum chooses, and what tasks that teach nothing cost with it and without."""

import hashlib
from collections import Counter, deque
from fractions import Fraction

import pytest

from forgemq_agents.core.known_tasks import KnownTasks
from forgemq_agents.core.samplers import READY, age, hardest_first, success_band
from forgemq_contracts.curriculum import Curriculum, TaskResult

GROUP_SIZE = 8
OPEN = 6  # groups asked for before the first result comes


def curriculum_of(**fields: object) -> Curriculum:
    return Curriculum(**{"sampler": "success_band", "tasks": 6, "explore": 0.0, **fields})


def tasks_of(*solved: int | None, versions: int = 50) -> KnownTasks:
    """A pool in which task n was solved so often in 4 tries; None: it was never played."""
    tasks = KnownTasks(len(solved), versions=versions)
    known = [(n, each) for n, each in enumerate(solved) if each is not None]
    for index, (number, count) in enumerate(known):
        tasks.ask(index, number)
        tasks.learn([result_of(index, number, solved=count, scored=4)])
    return tasks


def result_of(
    index: int, task_number: int, *, solved: int, scored: int = GROUP_SIZE, version: int = 0
) -> TaskResult:
    return TaskResult(
        index=index,
        number=index,
        task_number=task_number,
        version=version,
        scored=scored,
        solved=solved,
    )


def chosen(sampler, tasks: KnownTasks, **fields: object) -> set[int]:
    """All tasks that 200 choices from the same state take."""
    curriculum = curriculum_of(**fields)
    return {sampler(tasks, key=f"0/d/{n}", curriculum=curriculum) for n in range(200)}


def test_the_band_has_what_is_solved_sometimes_and_what_was_never_tried():
    tasks = tasks_of(0, 1, 2, 3, 4, None)
    assert chosen(success_band, tasks) == {1, 2, 3, 5}
    assert chosen(success_band, tasks, success_min=0.4, success_max=0.6) == {2, 5}


def test_hardest_first_takes_the_lowest_success_above_none():
    assert chosen(hardest_first, tasks_of(0, 2, 1, 3, 4, None)) == {2}
    assert chosen(hardest_first, tasks_of(0, 3, 4, None)) == {3}


def test_by_age_every_task_is_asked_for_before_any_is_again():
    tasks = KnownTasks(5, versions=50)
    curriculum = curriculum_of(sampler="age")
    asked = []
    for number in range(15):
        asked.append(age(tasks, key=f"0/d/{number}", curriculum=curriculum))
        tasks.ask(number, asked[-1])
        tasks.learn([result_of(number, asked[-1], solved=0)])
    assert [sorted(asked[start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert asked[:5] != [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sampler", READY.values(), ids=READY)
def test_no_task_is_asked_for_while_it_is_played_unless_all_are(sampler):
    tasks = tasks_of(2, 2, 2)
    for number, task in enumerate((0, 2)):
        tasks.ask(10 + number, task)
    assert chosen(sampler, tasks) == {1}
    tasks.ask(12, 1)
    assert chosen(sampler, tasks) <= {0, 1, 2}


def test_a_share_of_the_choices_goes_to_the_oldest_task():
    tasks = tasks_of(0, 2, 4)  # task 0 was asked for first, and is out of the band
    curriculum = curriculum_of(explore=0.25)
    counts = Counter(
        success_band(tasks, key=f"0/d/{n}", curriculum=curriculum) for n in range(4000)
    )
    assert set(counts) == {0, 1}
    assert counts[0] / 4000 == pytest.approx(0.25, abs=0.03)


def test_results_of_old_versions_are_forgotten():
    tasks = tasks_of(0, 2, versions=10)
    assert (tasks[0].success, tasks[0].tries) == (0.0, 4)
    tasks.learn([result_of(2, 1, solved=4, version=10)])
    assert tasks[0].success is None
    assert (tasks[1].tries, tasks[1].solved) == (GROUP_SIZE, 4)
    assert tasks[0].asked == 0


# Twenty tasks each that are never, always and sometimes solved.
RATES = [Fraction(0)] * 20 + [Fraction(1)] * 20 + [Fraction(2 + n % 5, 8) for n in range(20)]


def share_without_variance(name: str, *, groups: int, seed: int) -> float:
    """Share of the groups in which all episodes are solved, or none: they train nothing.

    Whether an episode is solved is a keyed hash; groups end in the order in which they began.
    """
    tasks = KnownTasks(len(RATES), versions=50)
    curriculum = curriculum_of(sampler=name, tasks=len(RATES), explore=0.1)
    open_groups: deque[tuple[int, int]] = deque()
    flat = 0
    for number in range(groups):
        task = READY[name](tasks, key=f"{seed}/d/{number}", curriculum=curriculum)
        tasks.ask(number, task)
        open_groups.append((number, task))
        if len(open_groups) < OPEN:
            continue
        ended, task = open_groups.popleft()
        solved = sum(is_solved(seed, ended, n, rate=RATES[task]) for n in range(GROUP_SIZE))
        flat += solved in (0, GROUP_SIZE)
        result = result_of(tasks.results, task, solved=solved, version=ended // 8)
        tasks.learn([result])
    return flat / (groups - OPEN + 1)


def is_solved(seed: int, group: int, episode: int, *, rate: Fraction) -> bool:
    text = f"{seed}/{group}/{episode}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") < rate * 2**32


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_tasks_that_are_always_or_never_solved_cost_little(seed):
    """Two thirds of the pool teach nothing. In passes over it, two thirds of the groups are flat.

    With a sampler by success each such task is seen once to be known; then a tenth of the choices
    goes to the oldest task, and two thirds of those are flat.
    """
    assert 0.64 < share_without_variance("age", groups=600, seed=seed) < 0.76
    assert share_without_variance("success_band", groups=600, seed=seed) < 0.23
    assert share_without_variance("hardest_first", groups=600, seed=seed) < 0.23
