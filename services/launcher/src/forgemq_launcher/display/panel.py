"""The live panel: a run's state as text that fits a terminal of 80 columns."""

from collections.abc import Sequence

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forgemq_run_view.state import EvaluationPoint, QueueState, RunState, WindowPosition

_BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # blocks of rising height
_FULL = "\u25a0"
_DOT = "\u25cf"
"""Right before the name: a line breaks at a space, and the dot belongs to its service."""
_STYLES = {
    "playing": "yellow",
    "complete": "cyan",
    "ready": "green",
    "scheduled": "blue",
    "trained": "bright_black",
    "retired": "red",
    "unknown": "white",
    "waiting": "white",
}
_CURVE_POINTS_MAX = 40
"""The newest ones: with label and numbers they fill a line of 80 columns."""


class ShownService(Struct, frozen=True, kw_only=True):
    """A service as a dot and its name; `detail` follows the name."""

    name: str
    is_up: bool
    detail: str = ""


class PanelView(Struct, frozen=True, kw_only=True):
    """What the panel shows beside a run's state: services, the newest lines, and its lower edge.

    Attributes:
        is_judging: The run judges a model and trains none, so what says how it trains is left out.
    """

    engine_status: str
    is_engine_up: bool
    services: tuple[ShownService, ...]
    footer: str
    events: tuple[str, ...]
    is_judging: bool = False


def panel(state: RunState, shown: PanelView) -> RenderableType:
    """The whole panel."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(state, shown):
        table.add_row(name, value)
    events = Text("\n".join(shown.events), style="dim", overflow="ellipsis", no_wrap=True)
    return Panel(
        Group(table, Text(), events),
        title=f"[bold]ForgeMQ[/] {state.run}",
        subtitle=shown.footer,
        border_style="cyan",
    )


def line(state: RunState, *, is_judging: bool = False) -> str:
    """The run in one plain line, for a log or a pipe."""
    if is_judging:
        played = "; ".join(map(_evaluation, state.evaluations)) or "no episode is played"
        return f"{played}; tokens/s {state.tokens_per_s:.0f}{_stalled(state)}"
    point = state.versions[-1].tally if state.versions else None
    success = f"success {point.success:.2f} reward {point.reward:.2f} " if point else ""
    bound = max(queue.staleness_limit for queue in state.queues)
    rounds = "".join(f"; {_evaluation(each)}" for each in state.evaluations if _is_unfinished(each))
    return (
        f"step {state.steps_trained}/{state.steps} {success}"
        f"tokens/s {state.tokens_per_s:.0f} staleness {state.staleness_max}/{bound} "
        f"in flight {state.groups_open} saving {state.merge_ratio_per_request:.1f}x"
        f"{_untrained(state)}{rounds}{_stalled(state)}"
    )


def _untrained(state: RunState) -> str:
    """That most groups have equal returns; a run may play such groups without end or error."""
    groups = {each.reason: each.groups for each in state.retired}
    equal, trained = groups.get("zero_variance", 0), groups.get("trained", 0)
    return f"; {equal} groups had equal returns, {trained} trained" if equal > trained else ""


def _stalled(state: RunState) -> str:
    return f" STALLED: waits for {waited_for(state)}" if state.stall else ""


def waited_for(state: RunState) -> str:
    """What a stalled run waits for and since when; "" while the run goes on."""
    stall = state.stall
    if stall is None:
        return ""
    since = duration(max(0, state.now_ms - stall.since_ms) / 1000)
    return f"{stall.waits_for}, for {since} ({stall.reason.replace('_', ' ')}). {stall.detail}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1:02:03."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"


def _rows(state: RunState, shown: PanelView) -> list[tuple[str, RenderableType]]:
    rows = _judging_rows(state) if shown.is_judging else _training_rows(state)
    if state.stall:
        rows.append(("waits for", Text(waited_for(state), style="bold red")))
    if not shown.is_judging:
        rows += [(f"window {queue.domain}"[:20], _window(queue)) for queue in state.queues]
    rows += [
        ("groups", Text(_groups(state))),
        ("episodes", Text(_episodes(state))),
        ("engine", Text(_engines(state, shown), overflow="ellipsis", no_wrap=True)),
        ("services", _services(shown.services)),
    ]
    return rows


def _judging_rows(state: RunState) -> list[tuple[str, RenderableType]]:
    return [
        ("judging for", Text(_elapsed(state))),
        _held_out_row(state),
        ("tokens/s", Text(f"{state.tokens_per_s:,.0f}; {state.tokens_generated:,} so far")),
    ]


def _held_out_row(state: RunState) -> tuple[str, RenderableType]:
    return "held-out", Text("  ".join(_evaluation(p) for p in state.evaluations[-4:]) or "-")


def _training_rows(state: RunState) -> list[tuple[str, RenderableType]]:
    return [
        ("step", _step(state)),
        ("success", _curve([point.tally.success for point in state.versions], fixed_max=1.0)),
        ("reward", _curve([point.tally.reward for point in state.versions])),
        _held_out_row(state),
        ("tokens/s", Text(_tokens(state))),
        ("staleness", _staleness(state)),
        ("tree saving", Text(_saving(state))),
        ("gap", Text(_gap(state))),
        ("yield J", Text(_yield(state))),
        *[("tokens a pass", Text(_acceptance(state))) for _ in state.acceptance[:1]],
        ("alarms", _alarms(state)),
    ]


def _step(state: RunState) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=state.steps, completed=state.steps_trained, width=30)
    table.add_row(Text(f"{state.steps_trained}/{state.steps}"), bar, Text(_elapsed(state)))
    return table


def _elapsed(state: RunState) -> str:
    return duration((state.now_ms - state.started_ms) / 1000)


def _curve(values: Sequence[float], *, fixed_max: float | None = None) -> Text:
    if not values:
        return Text("-")
    shown = values[-_CURVE_POINTS_MAX:]
    low = min(0.0, *shown)
    high = fixed_max or max(*shown, low + 1e-9) if len(shown) > 1 else fixed_max or 1.0
    span = max(high - low, 1e-9)
    bars = [_BARS[min(8, max(0, round(8 * (value - low) / span)))] for value in shown]
    text = Text(f"{values[-1]:.2f} ")
    text.append("".join(bars), style="green")
    text.append(f"  first {values[0]:.2f}", style="dim")
    return text


def _evaluation(point: EvaluationPoint) -> str:
    kind = "greedy" if point.is_greedy else "sampled"
    name = f"{kind} v{point.versions}" if point.versions else kind
    if _is_unfinished(point):
        return f"{name}: {point.groups_ended} of {point.groups} played"
    return f"{name}: {point.tally.success:.2f}"


def _is_unfinished(point: EvaluationPoint) -> bool:
    """Whether tasks of the round are still to be played."""
    return point.groups_ended < point.groups or not point.groups


def _tokens(state: RunState) -> str:
    return (
        f"{state.tokens_per_s:,.0f} sampled; {state.tokens_generated:,} so far, "
        f"{state.tokens_trained:,} trained"
    )


def _staleness(state: RunState) -> Text:
    bound = max(queue.staleness_limit for queue in state.queues)
    last = state.points[-1].staleness_max if state.points else 0
    text = Text(f"{last} now, {state.staleness_max} largest, bound {bound} steps")
    if state.staleness_max > bound:
        text.stylize("bold red")
    return text


def _saving(state: RunState) -> str:
    if not state.points:
        return "-"
    return (
        f"{state.merge_ratio_per_request:.2f}x against one sample a request, "
        f"{state.merge_ratio_append:.2f}x against append-only"
    )


def _gap(state: RunState) -> str:
    measured = [point for point in state.points if point.logprob_gap_mean is not None]
    if not measured:
        return "not measured" if state.points else "-"
    last = measured[-1]
    return (
        f"mean {last.logprob_gap_mean:.2g}, 99 % within {last.logprob_gap_p99:.2g} nats "
        f"in step {last.step}; largest {state.logprob_gap_max:.2g}"
    )


def _yield(state: RunState) -> str:
    measured = state.effective_yield
    if measured.value is None:
        return "-"
    return (
        f"{measured.value:.3g} = {measured.tokens_per_s:,.0f} trained tokens/s x "
        f"{measured.reward_gain:.3g} reward per 1,000 samples"
    )


def _acceptance(state: RunState) -> str:
    newest = state.acceptance[-1]
    return f"{newest.length:.2f} under version {newest.version}; 1 if no guess holds"


def _alarms(state: RunState) -> Text:
    if not state.alarms:
        return Text("none" if state.points else "-")
    newest = state.alarms[-1]
    return Text(
        f"{len(state.alarms)}, newest: step {newest.step} {newest.metric} {newest.value:.3g} "
        f"{newest.side} {newest.threshold:g}",
        style="bold red",
    )


def _window(queue: QueueState) -> Text:
    text = Text(f"H={'-' if queue.head is None else queue.head} W={queue.window} ")
    for position in queue.positions:
        text.append_text(_cell(position))
    text.append(f"  {queue.in_flight}/{queue.slots} slots, {queue.waiting} waiting", style="dim")
    return text


def _cell(position: WindowPosition) -> Text:
    ratio = position.episodes_finished / max(1, position.group_size)
    sign = _BARS[1 + round(7 * ratio)] if position.position == "playing" else _FULL
    style = _STYLES[position.position]
    return Text(sign, style=f"{style} underline" if position.is_in_window else style)


def _groups(state: RunState) -> str:
    ends = ", ".join(f"{each.reason} {each.groups}" for each in state.retired)
    return f"{state.groups_open} in flight; {ends or 'none retired yet'}"


def _episodes(state: RunState) -> str:
    return ", ".join(f"{each.end} {each.episodes:,}" for each in state.episode_ends) or "none yet"


def _engines(state: RunState, shown: PanelView) -> str:
    if not shown.is_engine_up:
        return shown.engine_status
    lanes = ", ".join(
        f"lane {each.lane} v{each.version} {each.running} running {each.queued} queued"
        for each in state.engines
        if each.is_serving
    )
    return lanes or shown.engine_status


def _services(services: Sequence[ShownService]) -> Text:
    text = Text()
    for each in services:
        text.append(_DOT, style="green" if each.is_up else "red")
        text.append(f"{each.name}{each.detail}  ")
    return text
