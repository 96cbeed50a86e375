"""Curricula that cannot work are refused by name."""

import pytest

from forgemq_contracts.curriculum import Curriculum
from forgemq_contracts.run import Evaluation, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.run_rules import check


def run_of(queue: dict[str, str], **curriculum: object) -> RunConfiguration:
    own = Curriculum(**{"sampler": "age", **curriculum})
    fields = {"task_source": "m:f", "agent": "m:g", **queue}
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="a", curriculum=own, **fields),),
        trainer=Trainer(steps=1),
        evaluation=Evaluation(task_offset=1000),
    )


@pytest.mark.parametrize(
    ("queue", "curriculum", "message"),
    [
        (
            {"agent": "", "task_source": ""},
            {"tasks": 5},
            r"^queues\.a\.curriculum must be left out",
        ),
        ({}, {}, r"^queues\.a\.curriculum\.tasks must be given with a task_source"),
        (
            {"task_source": "", "task_file": "t.jsonl"},
            {"tasks": 5},
            r"^queues\.a\.curriculum\.tasks must be left out if task_file is given",
        ),
        (
            {"task_source": "", "agent": "verifiers:e"},
            {"tasks": 5},
            r"^queues\.a\.curriculum\.tasks must be left out if agent is an environment",
        ),
        (
            {},
            {"sampler": "success_band", "tasks": 5, "success_min": 0.6, "success_max": 0.5},
            r"^queues\.a\.curriculum\.success_min must be at most success_max, got 0\.6 and 0\.5$",
        ),
        (
            {},
            {"sampler": "hardest_first", "tasks": 5, "success_min": 0.3},
            r"^queues\.a\.curriculum\.success_min .* sampler is hardest_first: it is for success",
        ),
        (
            {},
            {"tasks": 5, "explore": 0.3},
            r"\.explore .* if sampler is age: it is for success_band and hardest_first, got 0\.3$",
        ),
        ({}, {"tasks": 1001}, r"^queues\.a\.curriculum\.tasks .* got 1001 and 1000$"),
    ],
)
def test_wrong_curricula_are_refused_by_name(queue, curriculum, message):
    with pytest.raises(ValueError, match=message):
        check(run_of(queue, **curriculum))


def test_a_curriculum_stays_when_a_run_is_resumed():
    check(run_of({}, tasks=5))
    with pytest.raises(ValueError, match=r"^queues\.a\.curriculum\.tasks was 5 .* chosen with it"):
        check_changes(run_of({}, tasks=5), run_of({}, tasks=6))


@pytest.mark.parametrize("sampler", ["success_band", "age", "hardest_first", "own.module:choose"])
def test_every_sampler_is_taken_and_ones_own_may_read_every_field(sampler):
    check(run_of({}, sampler=sampler, tasks=5))
    own = {"success_min": 0.3, "success_max": 0.5, "explore": 0.3}
    check(run_of({}, sampler="own.module:choose", tasks=5, **own))
