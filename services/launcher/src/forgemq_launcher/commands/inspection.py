"""Commands that look at a run: audit it, list its groups, print a trajectory."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tokenizers import Tokenizer

from forgemq_audit.run_report import audit_run
from forgemq_bus.log import Log
from forgemq_contracts.run import StartedRun
from forgemq_launcher import exit_status
from forgemq_launcher.commands.run_on_broker import run_to_read
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.cuts import cut_lines
from forgemq_launcher.display.fork_table import fork_table
from forgemq_launcher.display.lines import left_out, say, say_json, show, terminal
from forgemq_launcher.display.report_files import closing, write_report
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_end import end_of
from forgemq_launcher.records.shown_records import is_requested, shown_records
from forgemq_launcher.run_folder import NotOnLogError, RunFolder
from forgemq_run_view import shown_groups
from forgemq_run_view.report import Report
from forgemq_run_view.rewards import EpisodeReward, TurnReward
from forgemq_run_view.state import GroupRow, RunState
from forgemq_run_view.trajectory import Trajectory, TrajectoryTurn, trajectories

READ_BY_AUDIT = 3
"""How often an audit reads records of groups: for the state, to find them, and to compare them."""
GROUPS_SHOWN_MAX = 2000
"""The newest ones: several hundred steps of the demo, and still a second of output."""
GROUP_LINES_MAX = shown_groups.GROUPS_SHOWN_MAX + shown_groups.UNTRAINED_SHOWN_MAX
"""All that a view of the run counts the turns of."""


async def audit(
    folder: RunFolder, environ: Mapping[str, str], console: Console, *, as_document: bool = False
) -> int:
    """Check the guarantees of a run on its log; the status is 1 if one does not hold.

    `as_document` prints the report as one line of JSON instead of a table.
    """
    result, _ = await _audited(folder, environ)
    if as_document:
        say_json(console, result)
    else:
        show(console, closing(result))
    return exit_status.OK if all(result.guarantees.values()) else exit_status.FAILED


async def report(
    folder: RunFolder, environ: Mapping[str, str], console: Console, *, to: Path | None
) -> int:
    """Write the report and the curves of a run from its log, wherever it was played.

    Without `to` they go into the run's folder, or a new one here. The status is as of `audit`.
    """
    result, state = await _audited(folder, environ)
    target = to or (folder.path if folder.path.is_dir() else Path(f"{folder.run}-report"))
    leave_report(result, state, console, folder=target)
    return exit_status.OK if all(result.guarantees.values()) else exit_status.FAILED


def leave_report(result: Report, state: RunState, console: Console, *, folder: Path) -> None:
    """Write report and curves into this folder, which is made, and print the closing table."""
    folder.mkdir(parents=True, exist_ok=True)
    written = write_report(result, state, folder=folder)
    curves = CurveWriter(folder)
    curves.write(state, is_end=True)
    curves.close()
    show(console, closing(result))
    names = f"{', '.join(written)} and curves.jsonl"
    say(console, f"{names} are in {folder}")


async def _audited(folder: RunFolder, environ: Mapping[str, str]) -> tuple[Report, RunState]:
    async with run_to_read(folder, environ, times=READ_BY_AUDIT) as (log, started):
        ended = await end_of(log, started)
        reason = ended.reason if ended else ""
        now_ms = ended.ended_ms if ended else started.started_ms
        result, reader = await audit_run(log, started, reason=reason, now_ms=now_ms)
    return result, reader.view.state(now_ms=now_ms)


async def inspect(
    folder: RunFolder,
    environ: Mapping[str, str],
    console: Console,
    *,
    what: str | None,
    as_requests: bool = False,
    as_lines: bool = False,
) -> int:
    """Print the groups of a run, or every turn of a group or an episode with its tokens.

    `as_requests` prints its requests instead, whole, one as JSON in each line; `as_lines` prints
    each group of the run, or each episode with its turns, as a line of JSON.

    Raises:
        ConfigurationError: requests are asked for and no group is named.
        NotOnLogError: there is no turn of the group or episode.
    """
    if as_requests and what is None:
        raise ConfigurationError("--requests: name a GROUP or an EPISODE behind RUN")
    async with run_to_read(folder, environ) as (log, started):
        if what is None:
            return await _list_groups(log, started, console, as_lines=as_lines)
        group_id, made = what.split(".", maxsplit=1)[0], started.configuration
        messages = await shown_records(log, group_id, partitions=made.log.group_partitions)
        is_known = bool(messages) or await is_requested(log, group_id, configuration=made)
    kept = trajectories(messages)
    found = [each for each in kept if _is_of(each.episode_id, what=what)]
    if not found:
        known = [each.episode_id for each in kept]
        raise NotOnLogError(absence(what, is_known=is_known, kept=known))
    if as_requests:
        # Loads the rendering, which no other command needs.
        from forgemq_launcher.commands.request_lines import print_requests

        path = made.model.path
        print_requests(messages, console, model_path=path, is_meant=partial(_is_of, what=what))
        return exit_status.OK
    if as_lines:
        for trajectory in found:
            say_json(console, trajectory)
        return exit_status.OK
    tokenizer = _tokenizer(Path(made.model.path))
    for trajectory in found:
        print_trajectory(trajectory, tokenizer, console)
    return exit_status.OK


async def _list_groups(
    log: Log, started: StartedRun, console: Console, *, as_lines: bool = False
) -> int:
    # Of what is printed as lines of JSON nothing else may be there.
    said = terminal(is_stderr=True) if as_lines else console
    follower = Follower(log, started, without_blobs=lambda error: say(said, left_out(error)))
    await follower.catch_up()
    if as_lines:
        print_group_lines(follower, console, said=said)
        return exit_status.OK
    print_groups(follower, console)
    print_forks(follower.view.state(now_ms=started.started_ms), console)
    return exit_status.OK


def absence(what: str, *, is_known: bool, kept: Sequence[str]) -> str:
    """Why there is no turn of this group or episode.

    Args:
        what: As it was asked for.
        is_known: Whether a record names its group.
        kept: Ids of the group's episodes that have turns on the log.
    """
    if kept:
        return f"there is no turn of {what!r}; its group has turns of {', '.join(kept)}"
    if is_known:
        return (
            f"no turn of {what!r} is on the log: none was played, or they were deleted "
            "(log.keep_for_replay keeps them)"
        )
    return f"nothing is known of {what!r} in this run"


def _is_of(episode_id: str, *, what: str) -> bool:
    """Whether an episode is meant by the id of a group, of an episode or of an attempt."""
    return episode_id == what or episode_id.startswith(f"{what}.")


def print_groups(follower: Follower, console: Console) -> None:
    """Print the newest groups, oldest first, with how each stands."""
    shown = Table(
        # Nothing is cut in 80 columns: a group's id is typed again to inspect it.
        *(Column(name, no_wrap=True) for name in ("group", "queue\nindex", "state", "step")),
        *(Column(name, no_wrap=True) for name in ("turns", "truncated", "success")),
        box=SIMPLE,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    rows = follower.view.rows(rows_max=GROUPS_SHOWN_MAX)
    for row in reversed(rows):
        shown.add_row(
            row.group_id,
            _place_of(row),
            row.reason or row.position,
            "-" if row.step is None else str(row.step),
            str(row.completions),
            str(row.truncated),
            "-" if row.success is None else f"{row.success:.2f}",
        )
    show(console, shown)
    _say_older(follower, rows, console)


def print_group_lines(follower: Follower, console: Console, *, said: Console) -> None:
    """Print the newest groups, oldest first, each as a line of JSON.

    Args:
        follower: Has caught up.
        console: Gets the lines.
        said: Gets the line that says how many older ones there are.
    """
    rows = follower.view.rows(rows_max=GROUP_LINES_MAX)
    for row in reversed(rows):
        say_json(console, row)
    _say_older(follower, rows, said)


def _say_older(follower: Follower, rows: Sequence[GroupRow], console: Console) -> None:
    waiting = sum(row.position == "waiting" for row in rows)
    known = follower.state().groups_admitted + waiting
    if known > len(rows):
        newest = f"the newest {len(rows):,} of {known:,} groups are listed"
        say(console, f"{newest}; with its id inspect shows an older one")


def _place_of(row: GroupRow) -> str:
    if row.source != "agent":
        return row.source
    return "-" if row.queue_index is None else str(row.queue_index)


def print_forks(state: RunState, console: Console) -> None:
    """Print why requests forked, if any did."""
    if state.forks:
        show(console, fork_table(state.forks))


def print_trajectory(trajectory: Trajectory, tokenizer: Tokenizer | None, console: Console) -> None:
    """Print an episode: what it earned, and each turn with its tokens and what that earned."""
    console.rule(f"episode {trajectory.episode_id}")
    say(console, _earned(trajectory.reward))
    for message in trajectory.messages:
        console.print(Text(f"{message.role} (imported)", style="bold"))
        console.print(Text(message.text), soft_wrap=True)
    for turn in trajectory.turns:
        console.print(Text(_header(turn), style="bold"))
        for line in cut_lines(turn):
            console.print(Text(line, style="yellow"), soft_wrap=True)
        shown = turn.seen or turn.context
        console.print(Text(_decoded(shown, tokenizer), style="dim"), soft_wrap=True)
        console.print(Text(_decoded(turn.output, tokenizer), style="green"), soft_wrap=True)
        pairs = zip(turn.output, turn.logprobs, strict=False)
        console.print(
            Text(" ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs), style="cyan"),
            soft_wrap=True,
        )


def _header(turn: TrajectoryTurn) -> str:
    versions = sorted(set(turn.versions))
    parent = f"after {turn.parent_id[:8]}, " if turn.parent_id else ""
    return (
        f"turn {turn.sequence} {turn.completion_id} ({parent}"
        f"{turn.shared_prefix_tokens} tokens shared, {len(turn.context)} new, "
        f"{len(turn.output)} sampled at T={turn.temperature:g} by version "
        f"{'-'.join(map(str, versions)) or '?'}; {turn.finish_reason}, {turn.engine_s:.2f} s)"
        f"{_turn_earned(turn.reward)}"
    )


def _turn_earned(reward: TurnReward) -> str:
    """What the turn earned, to append to its header."""
    parts = {
        "reward": reward.process,
        "return-to-go": reward.return_to_go,
        "advantage": reward.advantage,
    }
    said = [f"{name} {value:+z.4g}" for name, value in parts.items() if value is not None]
    return f"; {', '.join(said)}" if said else ""


def _earned(reward: EpisodeReward | None) -> str:
    if reward is None:
        return "not scored"
    parts = (
        f"outcome {reward.outcome:zg}, speed {reward.speed:zg}, process {reward.process:zg}, "
        f"total {reward.total:zg}"
    )
    truncated = f"truncated by {reward.truncated_by}" if reward.truncated_by else ""
    return "; ".join(
        filter(None, ("masked" if reward.is_masked else parts, truncated, reward.detail))
    )


def _decoded(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None
