"""What commands print with --json: all that their tables show, for programs to read."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from forgemq_bus.memory import MemoryLog
from forgemq_launcher.commands.inspection import print_group_lines
from forgemq_launcher.commands.run_list import ListedRun
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.display.lines import say, say_json, show, terminal
from forgemq_launcher.records.evaluation import DomainEvaluation
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.run_folder import RunFolder
from forgemq_run_view.pass_at_k import PassRate
from forgemq_run_view.report import TrainedTrees, report
from forgemq_run_view.shown_groups import UNTRAINED_SHOWN_MAX
from forgemq_run_view.state import GroupRow
from forgemq_run_view.view import RunView
from tests.small_run import small_run
from tests.unit.run_view.imported import imports
from tests.unit.run_view.synthetic import SyntheticRun, started

CODES = "a :smile: of [bold] and :warning:"


def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def listed(runs: Path) -> tuple[int, list[ListedRun]]:
    """The status of `forgemq runs --json`, and what it printed."""
    out = console()
    environ = {"FORGEMQ_LAUNCHER_RUNS": str(runs)}
    status = run_tool(["runs", "--json"], environ=environ, console=out)
    lines = out.file.getvalue().splitlines()
    return status, [msgspec.json.decode(line, type=ListedRun) for line in lines]


def test_without_runs_there_is_no_line(tmp_path):
    assert listed(tmp_path) == (0, [])


def test_each_run_is_a_line_with_what_the_table_shows(tmp_path, run_folder):
    steps = run_folder.configuration().trainer.steps
    stopped = ListedRun(run="desk-1", state="stopped", steps_planned=steps, seed=0)
    assert listed(run_folder.path.parent) == (0, [stopped])

    (run_folder / "curves.jsonl").write_text('{"step":0,"loss":1.0}\n{"step":1,"loss":0.5}\n')
    with run_folder.locked():
        up = msgspec.structs.replace(stopped, state="up", steps=2)
        assert listed(run_folder.path.parent) == (0, [up])

    view = RunView(started(steps=1))
    for message in SyntheticRun().play(steps=1).messages:
        view.apply(message)
    made = report(
        view.state(now_ms=2_000),
        trees=TrainedTrees(),
        verdicts=(),
        duration_s=1.0,
        reason="completed",
    )
    made = msgspec.structs.replace(made, success_start=0.25, success_end_greedy=0.75)
    (run_folder / "report.json").write_bytes(msgspec.json.encode(made))
    assert listed(run_folder.path.parent) == (
        0,
        [
            msgspec.structs.replace(
                stopped, state="completed", steps=1, success_start=0.25, success_end_greedy=0.75
            )
        ],
    )


def test_a_run_that_cannot_be_read_is_a_line_with_the_reason_and_makes_the_status_one(
    tmp_path, run_folder
):
    (run_folder / "configuration.json").write_text("{")
    status, (run,) = listed(run_folder.path.parent)
    assert (status, run.run, run.state, run.steps) == (1, "desk-1", "unreadable", None)
    assert run.detail.startswith(f"{run_folder / 'configuration.json'}: ")


def test_an_evaluation_is_a_line_with_its_pass_at_1_by_domain(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "desk-eval-1")
    folder.make(small_run(group_partitions=1), is_evaluation=True)
    judged = DomainEvaluation(
        run="desk-eval-1",
        model="model",
        domain="desk",
        samples=2,
        temperature=0.0,
        episodes=4,
        episodes_masked=0,
        confidence=0.95,
        pass_at_k=(
            PassRate(k=1, rate=0.625, low=0.1, high=0.9, tasks=2),
            PassRate(k=2, rate=0.75, low=0.1, high=0.9, tasks=2),
        ),
        tasks=(),
    )
    (folder / "pass_at_k.json").write_bytes(msgspec.json.encode((judged,)))
    status, (run,) = listed(tmp_path / "runs")
    assert (status, run.state, run.is_evaluation) == (0, "judged", True)
    assert (run.pass_at_1, run.is_greedy, run.steps) == ({"desk": 0.625}, True, None)


def test_each_group_is_a_line_oldest_first_and_nothing_else_is_in_the_output():
    follower = Follower(MemoryLog(run="r"), started())
    for message in SyntheticRun().play(steps=2).messages:
        follower.view.apply(message)
    out, said = console(), console()
    print_group_lines(follower, out, said=said)
    rows = [msgspec.json.decode(line, type=GroupRow) for line in out.file.getvalue().splitlines()]
    assert rows == list(reversed(follower.view.rows(rows_max=100)))
    assert [(row.group_id, row.step, row.completions) for row in rows] == [
        ("g-0", 0, 4),
        ("g-1", 0, 4),
        ("g-2", 1, 4),
        ("g-3", 1, 4),
    ]
    assert said.file.getvalue() == ""


def test_that_older_groups_are_left_out_is_not_among_the_lines():
    follower = Follower(MemoryLog(run="r"), started())
    for message in imports(UNTRAINED_SHOWN_MAX + 1, outcomes=0):
        follower.view.apply(message)
    out, said = console(), console()
    print_group_lines(follower, out, said=said)
    groups = [json.loads(line)["group_id"] for line in out.file.getvalue().splitlines()]
    assert (len(groups), groups[0], groups[-1]) == (1000, "i-1", "i-1000")
    assert said.file.getvalue() == (
        "the newest 1,000 of 1,001 groups are listed; with its id inspect shows an older one\n"
    )


def test_what_looks_like_an_emoji_or_markup_is_printed_as_it_is(capsys):
    out = console()
    say(out, CODES)
    say_json(out, {"task": CODES})
    assert out.file.getvalue() == f'{CODES}\n{{"task":"{CODES}"}}\n'
    table = Table("reason")
    table.add_row(CODES)
    show(terminal(), table)
    assert CODES in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("g", "--json", "--requests"), ("--requests", "--json")])
def test_lines_of_two_kinds_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_tool(["inspect", "desk-1", *arguments], environ={}, console=console())
    assert "not allowed with argument" in capsys.readouterr().err
