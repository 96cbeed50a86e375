"""Which groups to ask for, and when, by the run's configuration and progress."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from forgemq_contracts.mixture import Mixture
from forgemq_contracts.queues import played_queues
from forgemq_contracts.rounds import JUDGED_ROUND
from forgemq_contracts.run import Evaluation, Queue, RunConfiguration

STEPS_BEFORE_BASELINE_MAX = 1
"""Steps that can be trained while the round of the base model is played: the trainer publishes no
version before it is over. A restart that finds more has nothing of it left to play."""

Mode = Literal["sampled", "greedy"]


class EvaluationGroup(NamedTuple):
    """One held-out task in one round: a group of one episode, or of several to judge a model.

    A `temperature` of None stands for the run's own.
    """

    domain: str
    task_number: int
    round_name: str
    temperature: float | None
    samples: int = 1

    @property
    def idempotency_key(self) -> str:
        """The same in every process and after every restart."""
        return f"eval/{self.round_name}/{self.domain}/{self.task_number}"


def plays_start_round(*, steps_trained: int) -> bool:
    """Whether groups of the round of the base model may be left to play."""
    return steps_trained <= STEPS_BEFORE_BASELINE_MAX


def training_key(domain: str, task_number: int) -> str:
    """Idempotency key of a training group: each task of a domain is one group."""
    return f"{domain}/{task_number}"


def training_task(evaluation: Evaluation, number: int) -> int:
    """The task of a domain's training group of this number, from 0; it is never a held-out one.

    Example: with tasks 3 and 4 held out, groups 0, 1, 2, 3 have the tasks 0, 1, 2, 5.
    """
    return number if number < evaluation.task_offset else number + evaluation.tasks


def groups_ahead(queue: Queue, *, groups_max: int) -> int:
    """Number of training groups that are requested and not over: N in slots, P waiting for one.

    A step frees at most `groups_max` slots at once; each then goes to a waiting group without a
    round trip to us.
    """
    return queue.slots + groups_max


def stage_of_request(
    mixture: Mixture, queue: int, *, steps_trained: int, outstanding: int
) -> int | None:
    """The stage that trains a group that is asked for now, if all groups before it train.

    Args:
        mixture: Of the run.
        queue: Number of its queue.
        steps_trained: As the run says.
        outstanding: Groups of the queue that were asked for and are not over.
    """
    return mixture.stage_of_group(queue, mixture.taken(queue, steps_trained) + outstanding)


def evaluation_groups(
    configuration: RunConfiguration, *, round_name: str
) -> Iterator[EvaluationGroup]:
    """All groups of a round, ordered by domain, mode and task."""
    evaluation = configuration.evaluation
    for queue in played_queues(configuration):
        for mode, temperature in _modes(evaluation):
            for number in range(evaluation.tasks):
                yield EvaluationGroup(
                    domain=queue.domain,
                    task_number=evaluation.task_offset + number,
                    round_name=f"{round_name}-{mode}",
                    temperature=temperature,
                )


def judged_groups(configuration: RunConfiguration, *, samples: int) -> Iterator[EvaluationGroup]:
    """Each held-out task once, sampled as the run says, with so many episodes."""
    for queue in played_queues(configuration):
        for number in range(configuration.evaluation.tasks):
            yield EvaluationGroup(
                domain=queue.domain,
                task_number=configuration.evaluation.task_offset + number,
                round_name=JUDGED_ROUND,
                temperature=None,
                samples=samples,
            )


def round_due(evaluation: Evaluation, *, steps_trained: int, steps: int) -> str | None:
    """Name of the periodic round to play now, None if there is none.

    It is due at each multiple of `every_steps`, except before the first step and after the last:
    there the rounds `start` and `end` are played.
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
