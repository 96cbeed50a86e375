"""What a run leaves for people: report.json, report.png and the closing table."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from forgemq_launcher.display.fork_table import fork_table
from forgemq_launcher.display.panel import duration
from forgemq_launcher.whole_files import write_json
from forgemq_run_view.report import Report
from forgemq_run_view.state import EffectiveYield, RunState, UntrainedDomain

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ALARMS_SHOWN_MAX = 5
"""The newest ones; report.json has all."""


def write_report(report: Report, state: RunState, *, folder: Path) -> tuple[str, ...]:
    """Write report.json and report.png of a run into its folder; returns the names written.

    A container image has no matplotlib, so there is no picture there.
    """
    write_json(folder / "report.json", report)
    if importlib.util.find_spec("matplotlib") is None:
        return ("report.json",)
    _write_plot(state, report, folder / "report.png")
    return ("report.json", "report.png")


def _write_plot(state: RunState, report: Report, path: Path) -> None:
    """Success, staleness, tree saving and log-probability gap over the run, as a PNG."""
    # Imported here: it takes a second and only the end of a run needs it.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (learning, staleness), (saving, gap) = figure.subplots(2, 2)
    figure.suptitle(f"{report.run}, seed {report.seed}: {report.steps} steps")
    _plot_learning(learning, state)
    steps = [point.step for point in state.points]
    staleness.step(steps, [point.staleness_max for point in state.points], where="mid")
    staleness.axhline(report.staleness_bound, color="tab:red", linestyle="--", label="bound")
    staleness.set(title="largest staleness", xlabel="step", ylabel="steps", ylim=(0, None))
    staleness.legend()
    saving.plot(
        steps, [p.request_tokens / max(1, p.tree_tokens) for p in state.points], label="per request"
    )
    saving.plot(
        steps, [p.append_tokens / max(1, p.tree_tokens) for p in state.points], label="append-only"
    )
    saving.set(title="training tokens over tree tokens", xlabel="step", ylim=(0, None))
    saving.legend()
    _plot_gap(gap, state)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110)


def _plot_gap(axes: "Axes", state: RunState) -> None:
    measured = [point for point in state.points if point.gap_entries]
    for label in ("max", "p99", "mean"):
        values = [getattr(point, f"logprob_gap_{label}") for point in measured]
        axes.semilogy([point.step for point in measured], values, label=label)
    axes.set(title="|log p trainer - log p engine|, current version", xlabel="step", ylabel="nats")
    if measured:
        axes.legend()


def _plot_learning(axes: "Axes", state: RunState) -> None:
    versions = [point.version for point in state.versions]
    axes.plot(versions, [p.tally.success for p in state.versions], label="success, training tasks")
    axes.plot(versions, [p.tally.reward for p in state.versions], label="reward, training tasks")
    for is_greedy, marker in ((False, "o"), (True, "s")):
        rounds = [
            (p.version_max, p.tally.success)
            for p in state.evaluations
            if p.is_greedy == is_greedy and p.tally.episodes and p.version_max is not None
        ]
        label = f"success, held out, {'greedy' if is_greedy else 'sampled'}"
        axes.plot(
            [version for version, _ in rounds],
            [success for _, success in rounds],
            marker=marker,
            linestyle=":",
            label=label,
        )
    axes.set(title="learning", xlabel="weight version")
    axes.legend(fontsize="small")


def closing(report: Report) -> Group:
    """The closing table, with the table of forks below it if there were any."""
    return Group(table(report), *([fork_table(report.forks)] if report.forks else []))


def table(report: Report) -> Table:
    """The closing table."""
    shown = Table(
        title=f"{report.run}: {report.reason or 'no end on the log'}",
        show_header=False,
        title_justify="left",
    )
    for name, value in _lines(report):
        shown.add_row(name, value)
    for verdict in report.guarantees_checked:
        mark = ("held", "green") if verdict.holds else ("DID NOT HOLD", "bold red")
        wrong = "".join(f"\n  {text}" for text in verdict.violations)
        shown.add_row(verdict.name, Text.assemble(mark, f": {verdict.checked}{wrong}"))
    return shown


def _lines(report: Report) -> list[tuple[str, str]]:
    lines = [
        ("success, sampled", f"{_of(report.success_start)} -> {_of(report.success_end)}"),
        (
            "success, greedy",
            f"{_of(report.success_start_greedy)} -> {_of(report.success_end_greedy)}",
        ),
    ]
    start, end = report.reward_parts_start, report.reward_parts_end
    if start and end:
        parts = [
            f"{name} {before:.3f} -> {after:.3f}"
            for name, before, after in (
                ("outcome", start.outcome, end.outcome),
                ("speed", start.speed, end.speed),
                ("process", start.process, end.process),
            )
        ]
        lines.append(("reward parts", ", ".join(parts)))
    return [
        *lines,
        (
            "trained",
            f"{report.steps} steps, {report.samples:,} samples of {report.episodes:,} episodes",
        ),
        (
            "episodes",
            ", ".join(f"{end} {count:,}" for end, count in report.episode_ends.items()),
        ),
        (
            "forks",
            ", ".join(f"{each.reason} {each.forks:,}" for each in report.forks) or "none",
        ),
        ("tokens", f"{report.tokens_generated:,} generated, {report.tokens_trained:,} trained"),
        ("tree saving", _saving(report)),
        ("staleness", f"largest {report.staleness_max}, bound {report.staleness_bound} steps"),
        (
            "groups",
            f"{report.groups_admitted} admitted, {report.groups_open} open; {_retired(report)}",
        ),
        *[("imported", untrained_line(each)) for each in report.imported],
        *[("live", untrained_line(each)) for each in report.live],
        ("log-probability gap", _gap(report)),
        *[("yield J", yield_line(each)) for each in [report.effective_yield] if each],
        *[("tokens a pass", _acceptance(report)) for _ in report.acceptance[:1]],
        ("alarms", _alarms(report)),
        # Without an end nothing says how long the run was up.
        ("time", duration(report.duration_s) if report.reason else "not measured"),
    ]


def _retired(report: Report) -> str:
    """How groups ended; those that never had a slot are among them, and named by themselves."""
    ends = ", ".join(f"{reason} {count}" for reason, count in report.groups_retired.items())
    admitted = report.groups_admitted - report.groups_open
    refused = sum(report.groups_retired.values()) - admitted
    return f"{ends}, {refused} of them without a slot" if refused > 0 else ends


def _saving(report: Report) -> str:
    if report.merge_ratio_per_request is None:
        return "not measured"
    attention = report.merge_ratio_attention
    return (
        f"{_of(report.merge_ratio_per_request)}x per request, "
        f"{_of(report.merge_ratio_append)}x append-only, "
        f"{'attention not measured' if attention is None else f'{attention:.2f}x attention'}"
    )


def untrained_line(untrained: UntrainedDomain) -> str:
    """What there is to say of the imported or the live conversations of a domain."""
    rated = untrained.tally.episodes
    success = f", success {untrained.tally.success:.2f}" if rated else ""
    trained = f"{untrained.training:,} of them to train" if untrained.training else "never trained"
    return (
        f"{untrained.domain}: {untrained.conversations:,} conversations, {trained}; "
        f"{rated:,} with an outcome{success}"
    )


def yield_line(measured: EffectiveYield) -> str:
    """J, what it is made of, and the proxies for what bounds it."""
    if measured.value is None:
        return "not measured"
    return (
        f"{measured.value:.3g} = {measured.tokens_per_s:,.0f} trained tokens/s x "
        f"{measured.reward_gain:.3g} reward per 1,000 samples; of the newest "
        f"{measured.newest_steps} steps: gradient variance "
        f"{_of(measured.grad_norm_variance, digits=4)}, capped share "
        f"{_of(measured.capped_share, digits=4)}, policy age in steps "
        f"{_of(measured.policy_age_steps)}, reward slope "
        f"{_of(measured.reward_slope, digits=3)} per 1,000 samples"
    )


def _gap(report: Report) -> str:
    if report.logprob_gap_mean is None:
        return "not measured"
    return (
        f"mean {report.logprob_gap_mean:.2g}, 99 % within {report.logprob_gap_p99:.2g}, "
        f"largest {report.logprob_gap_max:.2g} nats"
    )


def _acceptance(report: Report) -> str:
    first, last = report.acceptance[0], report.acceptance[-1]
    return (
        f"{first.length:.2f} under version {first.version}, {last.length:.2f} under version "
        f"{last.version}; 1 if no guess holds"
    )


def _alarms(report: Report) -> str:
    shown = [
        f"step {each.step}: {each.metric} {each.value:.3g} {each.side} {each.threshold:g}"
        for each in report.alarms[-ALARMS_SHOWN_MAX:]
    ]
    more = len(report.alarms) - len(shown)
    earlier = [f"{more} earlier, see report.json"] if more else []
    return "\n".join([*earlier, *shown]) or "none"


def _of(value: float | None, *, digits: int = 2) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
