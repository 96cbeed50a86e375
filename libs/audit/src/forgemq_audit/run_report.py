"""The report of a run from its log alone, with every guarantee checked."""

from forgemq_audit.guarantees import Ledger
from forgemq_audit.run_reader import RunReader
from forgemq_audit.unaudited import unaudited
from forgemq_bus.kept_records import messages_of, read_all
from forgemq_bus.log import Log, Place
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, STARTED_RUNS
from forgemq_run_view.report import Report, TrainedTrees, report


async def audit_run(
    log: Log, started: StartedRun, *, reason: str, now_ms: int
) -> tuple[Report, RunReader]:
    """The report of a run from its records alone, and the reader of them.

    Args:
        log: Of the run.
        started: Its newest record.
        reason: How the run ended, '' while it is up; `completed` also demands that no group is
            open.
        now_ms: Until when time counts if the newest start has no end on the log.
    """
    reader = RunReader(log, started)
    # The run may still be trimmed, so the order matters: read the log to its end, then the trees
    # not yet audited, then the audits written meanwhile. A tree is deleted only after its audit is
    # on the log, and the last read finds that audit.
    await reader.catch_up()
    compared = [facts async for facts in unaudited(log, configuration=started.configuration)]
    await reader.catch_up_on_audits()
    for facts in compared:
        # If a group was audited meanwhile, `unaudited` may have missed records that were trimmed.
        if not reader.ledger.is_audited(facts.group_id):
            reader.ledger.add_tree(facts)
    verdicts = reader.ledger.verdicts(is_ended=reason == "completed")
    made = report(
        reader.view.state(now_ms=now_ms),
        trees=_trained(reader.ledger),
        verdicts=verdicts,
        duration_s=await up_s(log, started.configuration, now_ms=now_ms),
        reason=reason,
    )
    return made, reader


async def report_from_audits(
    log: Log, started: StartedRun, reader: RunReader, *, reason: str, now_ms: int
) -> Report:
    """The report of what a reader has read; groups that no auditor has compared are left out.

    It costs no look at a tree, so a service may make it while people wait.

    Args:
        log: Of the run.
        started: Its newest record.
        reader: Has caught up.
        reason: As of `audit_run`.
        now_ms: As of `audit_run`.
    """
    verdicts = reader.ledger.verdicts(is_ended=reason == "completed", is_audit_behind=True)
    return report(
        reader.view.state(now_ms=now_ms),
        trees=_trained(reader.ledger),
        verdicts=verdicts,
        duration_s=await up_s(log, started.configuration, now_ms=now_ms),
        reason=reason,
    )


def _trained(ledger: Ledger) -> TrainedTrees:
    trees = ledger.trained_trees()
    return TrainedTrees(
        samples=sum(tree.samples for tree in trees),
        request_pairs=sum(tree.facts.request_pairs for tree in trees),
    )


async def up_s(log: Log, configuration: RunConfiguration, *, now_ms: int) -> float:
    """Seconds the run was up, over all its starts.

    A start whose end is missing counts nothing, unless it is the newest: that one is still up.
    """
    starts: list[int] = []
    ends: list[int] = []
    async for records in read_all(log, [Place(STARTED_RUNS.name, 0), Place(ENDED_RUNS.name, 0)]):
        for message in messages_of(records):
            match message.record:
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
