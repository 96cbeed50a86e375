"""Which groups to ask for, and when: pure functions of the run's configuration and progress."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from forgemq_contracts.run import Evaluation, Queue, RunConfiguration

START = "start"
END = "end"

Mode = Literal["sampled", "greedy"]


class EvaluationGroup(NamedTuple):
    """One held-out task in one round: a group of a single episode.

    `temperature` None is the one that the run pins for every episode.
    """

    domain: str
    task_number: int
    round_name: str
    temperature: float | None

    @property
    def idempotency_key(self) -> str:
        """The same for every process and after every restart."""
        return f"eval/{self.round_name}/{self.domain}/{self.task_number}"


def training_key(domain: str, task_number: int) -> str:
    """Idempotency key of a training group: task k of a domain is one group."""
    return f"{domain}/{task_number}"


def groups_ahead(queue: Queue) -> int:
    """Training groups asked for and not over: N in their slots and a few waiting for one.

    The waiting ones let a freed slot be given at once; a step frees P of them together.
    """
    return queue.slots + queue.groups_per_step


def evaluation_groups(
    configuration: RunConfiguration, *, round_name: str
) -> Iterator[EvaluationGroup]:
    """All groups of a round, by domain, mode and task."""
    evaluation = configuration.evaluation
    for queue in configuration.queues:
        for mode, temperature in _modes(evaluation):
            for number in range(evaluation.tasks):
                yield EvaluationGroup(
                    domain=queue.domain,
                    task_number=evaluation.task_offset + number,
                    round_name=f"{round_name}-{mode}",
                    temperature=temperature,
                )


def round_due(evaluation: Evaluation, *, steps_trained: int, steps: int) -> str | None:
    """The periodic round of the newest multiple of `every_steps`, None where there is none.

    Before the first and after the last step the rounds `start` and `end` are played instead.
    """
    every = evaluation.every_steps
    if evaluation.tasks == 0 or every == 0 or steps_trained >= steps:
        return None
    step = steps_trained // every * every
    return f"step-{step}" if step > 0 else None


def _modes(evaluation: Evaluation) -> tuple[tuple[Mode, float | None], ...]:
    modes: tuple[tuple[Mode, float | None, bool], ...] = (
        ("sampled", None, evaluation.sampled),
        ("greedy", 0.0, evaluation.greedy),
    )
    return tuple((mode, temperature) for mode, temperature, is_played in modes if is_played)
