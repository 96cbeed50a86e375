"""What happened between two states of a run, a line each."""

from forgemq_run_view.state import RunState


def headlines(before: RunState | None, after: RunState) -> list[str]:
    """Lines about new steps, alarms, stalls, weights and rounds; [] for the first state."""
    if before is None:
        return []
    return [
        *_steps(before, after),
        *_alarms(before, after),
        *_stalls(before, after),
        *_weights(before, after),
        *_rounds(before, after),
    ]


def _steps(before: RunState, after: RunState) -> list[str]:
    known = {(point.step, point.lineage) for point in before.points}
    return [
        f"step {p.step} trained: {p.loss_tokens} tokens, staleness {p.staleness_max}, "
        f"gradient {p.grad_norm:.3f}, {p.duration_s:.1f} s"
        for p in after.points
        if (p.step, p.lineage) not in known
    ]


def _alarms(before: RunState, after: RunState) -> list[str]:
    known = {(each.step, each.lineage, each.metric) for each in before.alarms}
    return [
        f"ALARM step {each.step}: {each.metric} {each.value:.3g} {each.side} {each.threshold:g}"
        for each in after.alarms
        if (each.step, each.lineage, each.metric) not in known
    ]


def _stalls(before: RunState, after: RunState) -> list[str]:
    if after.stall is None:
        return ["the run goes on"] if before.stall and not after.ended else []
    if before.stall and before.stall.waits_for == after.stall.waits_for:
        return []
    return [f"STALLED: waits for {after.stall.waits_for}. {after.stall.detail}"]


def _weights(before: RunState, after: RunState) -> list[str]:
    # A heartbeat may be read before the record that says how the weights arrived.
    known = {(e.lane, e.lineage, e.version) for e in before.engines if e.is_serving and e.path}
    return [
        f"lane {e.lane} serves version {e.version} ({e.path}, paused {e.paused_s:.2f} s)"
        for e in after.engines
        if e.is_serving and e.path and (e.lane, e.lineage, e.version) not in known
    ]


def _rounds(before: RunState, after: RunState) -> list[str]:
    known = {(p.round_name, p.is_greedy) for p in before.evaluations if p.groups_ended >= p.groups}
    return [
        f"held-out tasks, {'greedy' if p.is_greedy else 'sampled'}, version {p.versions or '-'}: "
        f"success {p.tally.success:.3f} ({p.groups_ended} groups)"
        for p in after.evaluations
        if p.groups_ended >= p.groups and (p.round_name, p.is_greedy) not in known
    ]
