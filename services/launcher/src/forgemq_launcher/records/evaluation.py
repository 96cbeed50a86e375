"""What a run that judged a model found, from its records alone."""

from collections import defaultdict

from msgspec import Struct

from forgemq_bus.kept_records import messages_of, read_all
from forgemq_bus.log import Log
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.curriculum import SOLVED_OUTCOME_MIN
from forgemq_contracts.domains import sampling_of
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.groups import RequestedGroup, ScoredGroup
from forgemq_contracts.queues import played_queues
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import REQUESTED_GROUPS, SCORED_GROUPS
from forgemq_run_view.pass_at_k import CONFIDENCE, PassRate, TaskSamples, pass_rates


class DomainEvaluation(Struct, frozen=True, kw_only=True):
    """How a model did on the held-out tasks of one domain.

    Attributes:
        samples: Episodes asked for of each task.
        episodes_masked: Those without an honest number; they count in no rate.
        confidence: Of the intervals of `pass_at_k`.
    """

    run: str
    model: str
    domain: str
    samples: int
    temperature: float
    episodes: int
    episodes_masked: int
    confidence: float
    pass_at_k: tuple[PassRate, ...]
    tasks: tuple[TaskSamples, ...]


async def evaluation_of(
    log: Log, started: StartedRun, *, samples: int
) -> tuple[DomainEvaluation, ...]:
    """What the scored groups of each domain add up to, tasks by number.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    configuration = started.configuration
    numbers: dict[str, int] = {}
    scored: dict[str, ScoredGroup] = {}
    places = [
        place
        for topic in (REQUESTED_GROUPS, SCORED_GROUPS)
        for place in partitions_of(topic, configuration)
    ]
    async for records in read_all(log, places):
        for message in messages_of(records):
            match message.record:
                case RequestedGroup(idempotency_key=key, group_id=group_id):
                    numbers[group_id] = _number(key)
                case ScoredGroup() as group:
                    scored.setdefault(group.group_id, group)
                case _:
                    pass
    by_domain: dict[str, list[ScoredGroup]] = defaultdict(list)
    for group in sorted(scored.values(), key=lambda each: numbers.get(each.group_id, -1)):
        by_domain[group.domain].append(group)
    return tuple(
        _evaluation(
            started,
            queue.domain,
            by_domain[queue.domain],
            numbers=numbers,
            samples=samples,
        )
        for queue in played_queues(configuration)
    )


def _number(idempotency_key: str) -> int:
    """The task's number, at the end of the key; -1 of a group that others asked for."""
    last = idempotency_key.rpartition("/")[2]
    return int(last) if last.isdecimal() else -1


def _evaluation(
    started: StartedRun,
    domain: str,
    groups: list[ScoredGroup],
    *,
    numbers: dict[str, int],
    samples: int,
) -> DomainEvaluation:
    tasks = tuple(
        TaskSamples(
            task_number=numbers.get(group.group_id, -1),
            group_id=group.group_id,
            samples=sum(not score.is_masked for score in group.episodes),
            successes=sum(
                not score.is_masked and score.outcome >= SOLVED_OUTCOME_MIN
                for score in group.episodes
            ),
        )
        for group in groups
    )
    configuration = started.configuration
    episodes = sum(len(group.episodes) for group in groups)
    return DomainEvaluation(
        run=started.run,
        model=configuration.model.path,
        domain=domain,
        samples=samples,
        temperature=sampling_of(configuration, domain=domain).temperature,
        episodes=episodes,
        episodes_masked=episodes - sum(task.samples for task in tasks),
        confidence=CONFIDENCE,
        pass_at_k=pass_rates(tasks, samples=samples),
        tasks=tasks,
    )


def evaluation_values(found: tuple[DomainEvaluation, ...]) -> tuple[NamedValue, ...]:
    """What the run's last record says: each rate by domain and k."""
    return tuple(
        NamedValue(name=f"{each.domain}.pass_at_{rate.k}", value=rate.rate)
        for each in found
        for rate in each.pass_at_k
    )
