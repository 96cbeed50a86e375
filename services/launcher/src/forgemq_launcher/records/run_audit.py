"""The report of a run from its log alone, with every guarantee checked."""

from forgemq_bus.log import Log, Place
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, STARTED_RUNS
from forgemq_launcher.records.follower import Follower
from forgemq_run_view.auditing import unaudited
from forgemq_run_view.reading import message_of, read_all
from forgemq_run_view.report import Report, report


async def audit_run(
    log: Log, started: StartedRun, *, reason: str, now_ms: int
) -> tuple[Report, Follower]:
    """The report of a run from its records alone, and the follower that read them.

    Args:
        log: Of the run.
        started: Its newest record.
        reason: How the run ended, '' while it is up; `completed` also demands that no group is
            open.
        now_ms: Until when time counts if the newest start has no end on the log.
    """
    follower = Follower(log, started)
    # The run may still be trimmed, so the order matters: read the log to its end, then the trees
    # not yet audited, then the audits written meanwhile. A tree is deleted only after its audit is
    # on the log, and the last read finds that audit.
    await follower.catch_up()
    partitions = started.configuration.log.group_partitions
    compared = [facts async for facts in unaudited(log, partitions=partitions)]
    await follower.catch_up_on_audits()
    for facts in compared:
        # If a group was audited meanwhile, `unaudited` may have missed records that were trimmed.
        if not follower.ledger.is_audited(facts.group_id):
            follower.ledger.add_tree(facts)
    verdicts = follower.ledger.verdicts(is_ended=reason == "completed")
    made = report(
        follower.view.state(now_ms=now_ms),
        ledger=follower.ledger,
        verdicts=verdicts,
        duration_s=await up_s(log, started.configuration, now_ms=now_ms),
        reason=reason,
    )
    return made, follower


def result_values(made: Report) -> tuple[NamedValue, ...]:
    """What the run's last record says of the report: success measured, guarantees as 0 or 1."""
    values = {
        "success_start": made.success_start,
        "success_end": made.success_end,
        "success_start_greedy": made.success_start_greedy,
        "success_end_greedy": made.success_end_greedy,
    }
    held = {name: float(holds) for name, holds in made.guarantees.items()}
    named = {name: value for name, value in (values | held).items() if value is not None}
    return tuple(NamedValue(name=name, value=value) for name, value in named.items())


async def up_s(log: Log, configuration: RunConfiguration, *, now_ms: int) -> float:
    """Seconds the run was up, over all its starts.

    A start whose end is missing counts nothing, unless it is the newest: that one is still up.
    """
    starts: list[int] = []
    ends: list[int] = []
    async for records in read_all(log, [Place(STARTED_RUNS.name, 0), Place(ENDED_RUNS.name, 0)]):
        for record in records:
            match message_of(record).record:
                case StartedRun() as each if each.run == configuration.run:
                    starts.append(each.started_ms)
                case EndedRun() as each if each.run == configuration.run:
                    ends.append(each.ended_ms)
                case _:
                    pass
    return _up_ms(sorted(starts), sorted(ends), now_ms=now_ms) / 1000


def _up_ms(starts: list[int], ends: list[int], *, now_ms: int) -> int:
    total = 0
    for index, start in enumerate(starts):
        following = starts[index + 1] if index + 1 < len(starts) else None
        limit = now_ms if following is None else following
        end = next((at for at in ends if start <= at <= limit), None)
        if end is not None:
            total += end - start
        elif following is None:
            total += max(0, now_ms - start)
    return total
