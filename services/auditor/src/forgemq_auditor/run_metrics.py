"""The state of a run as metrics. A total is a gauge: an auditor that takes over counts from 0."""

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from forgemq_run_view.state import Position, QueueState, RunState, StallReason
from forgemq_telemetry.telemetry import Telemetry

_SHOWN: tuple[Position, ...] = ("playing", "complete", "ready", "scheduled")


def export_state(state: RunState, telemetry: Telemetry) -> None:
    """Set the gauges of the run."""
    telemetry.gauge("run.steps_trained", state.steps_trained)
    telemetry.gauge("run.groups_open", state.groups_open)
    if state.versions:
        newest = state.versions[-1].tally
        telemetry.gauge("run.success", newest.success)
        telemetry.gauge("run.reward", newest.reward)
    for end in state.episode_ends:
        telemetry.gauge("run.episodes_ended", end.episodes, end=end.end)
    for retired in state.retired:
        telemetry.gauge("run.groups_retired", retired.groups, reason=retired.reason)
    for metric, alarms in Counter(alarm.metric for alarm in state.alarms).items():
        telemetry.gauge("run.alarms", alarms, metric=metric)
    for trained in state.trained:
        telemetry.gauge(
            "run.groups_trained",
            trained.groups,
            domain=trained.domain,
            staleness=trained.staleness,
        )
    for queue in state.queues:
        _export_queue(queue, telemetry)
    for reason in get_args(StallReason):
        is_stalled = state.stall is not None and state.stall.reason == reason
        telemetry.gauge("run.stalled", int(is_stalled), reason=reason)


def _export_queue(queue: QueueState, telemetry: Telemetry) -> None:
    domain = queue.domain
    telemetry.gauge("run.slots", queue.slots, domain=domain)
    telemetry.gauge("run.slots_held", queue.in_flight, domain=domain)
    telemetry.gauge("run.groups_waiting", queue.waiting, domain=domain)
    telemetry.gauge("run.staleness", queue.staleness, domain=domain)
    telemetry.gauge("run.staleness_limit", queue.staleness_limit, domain=domain)
    if queue.head is not None:
        telemetry.gauge("run.head", queue.head, domain=domain)
    counted = Counter(place.position for place in queue.positions)
    for position in _SHOWN:
        telemetry.gauge("run.queue_groups", counted[position], domain=domain, position=position)


def export_verdicts(violations: Mapping[str, int], telemetry: Telemetry) -> None:
    """Count a check of each guarantee, and set how many violations it found."""
    for guarantee, count in violations.items():
        telemetry.count("auditor.checks", guarantee=guarantee)
        telemetry.gauge("auditor.violations", count, guarantee=guarantee)
