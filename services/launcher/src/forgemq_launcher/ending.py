"""The end of a run: audit from the log, report and plot."""

from forgemq_bus.log import Log, Place
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, STARTED_RUNS
from forgemq_launcher.follow import Follower
from forgemq_launcher.report_files import write_json, write_plot
from forgemq_launcher.run_folder import RunFolder
from forgemq_run_view.auditing import unaudited
from forgemq_run_view.reading import message_of, read_all
from forgemq_run_view.report import Report, report


async def audited(
    log: Log, started: StartedRun, *, reason: str, now_ms: int
) -> tuple[Report, Follower]:
    """The report of a run from its records alone, guarantees checked.

    Args:
        log: Of the run.
        started: Its newest record.
        reason: completed demands that nothing is left open; interrupted, failed or '' (it is up).
        now_ms: End of the time counted where the log has no end.
    """
    follower = Follower(log, started)
    # The order leaves no gap while the run goes on and is trimmed. Of a group that is trained by
    # now, tree and completions are on the log, and stay there until its audit is. So `unaudited`,
    # which begins after this, finds them all, or the audit is there by the time it has ended.
    await follower.catch_up()
    partitions = started.configuration.log.group_partitions
    compared = [facts async for facts in unaudited(log, partitions=partitions)]
    await follower.catch_up_on_audits()
    for facts in compared:
        # Of a group that was audited meanwhile, records may have been trimmed under `unaudited`.
        if not follower.ledger.is_audited(facts.group_id):
            follower.ledger.add_tree(facts)
    verdicts = follower.ledger.verdicts(is_ended=reason == "completed")
    result = report(
        follower.view.state(now_ms=now_ms),
        ledger=follower.ledger,
        verdicts=verdicts,
        duration_s=await up_s(log, started.configuration, now_ms=now_ms),
        reason=reason,
    )
    return result, follower


def write(folder: RunFolder, result: Report, follower: Follower, *, now_ms: int) -> None:
    """Write report.json and report.png."""
    write_json(result, folder / "report.json")
    write_plot(follower.view.state(now_ms=now_ms), result, folder / "report.png")


async def up_s(log: Log, configuration: RunConfiguration, *, now_ms: int) -> float:
    """Seconds the run was up, over all its starts; a start that never ended counts nothing."""
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
