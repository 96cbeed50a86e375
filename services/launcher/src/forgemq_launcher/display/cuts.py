"""In words: what an agent did to its context before a turn."""

from forgemq_run_view.trajectory import CutView, TrajectoryTurn


def cut_lines(turn: TrajectoryTurn) -> list[str]:
    """A line for each cut before the turn, in order; else one for a fork."""
    if turn.cuts:
        return [_line(cut, tokens_after=len(turn.seen)) for cut in turn.cuts]
    if turn.fork_reason is None:
        return []
    saw = "; the policy saw from here on:" if turn.seen else ""
    return [f"fork: {turn.fork_reason}{saw}"]


def _line(cut: CutView, *, tokens_after: int) -> str:
    by = cut.after_id[:8] if cut.after_id else "a turn that is not named"
    who = f"called by {by}" if cut.form == "tool" else f"a rule, after {by}"
    wrote = ", which wrote what is kept" if cut.is_written else ""
    before = "?" if cut.tokens_before is None else cut.tokens_before
    after = (
        f"{tokens_after}; the policy saw from here on:"
        if tokens_after
        else "?; the beginning of what the policy saw is trimmed, the rest is:"
    )
    return (
        f"context cut by {cut.function} {cut.parameters} ({who}{wrote}): {before} tokens -> {after}"
    )
