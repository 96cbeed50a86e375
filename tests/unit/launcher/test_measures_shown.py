"""What a step measured, and what it did not, as panel, lines, curves and report show it."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts.gaps import LogprobGap
from forgemq_contracts.steps import Alarm, TrainingMetrics
from forgemq_contracts.topics import TRAINED_STEPS
from forgemq_launcher.commands.inspection import print_forks
from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.headlines import headlines
from forgemq_launcher.display.panel import PanelView, line, panel
from forgemq_launcher.display.report_files import (
    ALARMS_SHOWN_MAX,
    closing,
    table,
    write_report,
    yield_line,
)
from forgemq_run_view.forks import MEANINGS
from forgemq_run_view.report import TrainedTrees, report
from forgemq_run_view.state import (
    AcceptancePoint,
    EvaluationPoint,
    ForkTotal,
    RunState,
    Stall,
    StepAlarm,
    Tally,
)
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import SyntheticRun, metrics, started

SHOWN = PanelView(engine_status="", is_engine_up=True, services=(), footer="", events=())
GAP = LogprobGap(entries=4, mean=0.25, max=0.75, bins=(1, 0, 3))
KL = Alarm(metric="kl_k3", value=0.21, threshold=0.1)
UNMEASURED = metrics(gap_entries=0)
MEASURED = msgspec.structs.replace(metrics(), logprob_gap=GAP)


def _run(*steps: TrainingMetrics, alarms: tuple[Alarm, ...] = ()) -> RunState:
    """The state of a run of these steps; the last one has the alarms."""
    run = SyntheticRun().play(steps=len(steps))
    view = RunView(started(steps=len(steps)))
    for message in run.messages:
        if message.topic == TRAINED_STEPS.name:
            record = message.record
            is_last = record.step == len(steps) - 1
            record = msgspec.structs.replace(
                record, metrics=steps[record.step], alarms=alarms if is_last else ()
            )
            view.apply(msgspec.structs.replace(message, record=record))
        else:
            view.apply(message)
    return view.state(now_ms=20_000)


def _text(shown: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(shown)
    return console.file.getvalue()


STALL = Stall(
    reason="service_silent",
    waits_for="merger",
    since_ms=5_000,
    detail="The merger writes nothing: group g-4 has no tree.",
)


def test_a_stall_is_a_row_of_the_panel_a_part_of_the_line_and_a_headline_once() -> None:
    going_on = _run(MEASURED)
    stalled = msgspec.structs.replace(going_on, stall=STALL)
    assert "waits for" not in _text(panel(going_on, SHOWN)) + line(going_on)
    told = "merger, for 0:00:15 (service silent). The merger writes nothing"
    assert told in " ".join(_text(panel(stalled, SHOWN)).replace("\u2502", " ").split())
    assert told in line(stalled)
    [headline] = headlines(going_on, stalled)
    assert headline.startswith("STALLED: waits for merger. The merger")
    assert headlines(stalled, stalled) == []
    assert headlines(stalled, going_on) == ["the run goes on"]


JUDGED = EvaluationPoint(
    round_name="judged",
    is_greedy=False,
    version_min=0,
    version_max=0,
    groups=64,
    groups_ended=3,
    tally=Tally(episodes=3, success=0.0, reward=0.0, outcome=0.0, speed=0.0, process=0.0),
)


def test_a_run_that_judges_a_model_shows_no_steps_that_it_never_trains() -> None:
    shown = msgspec.structs.replace(SHOWN, is_judging=True)
    begun = RunView(started(steps=20)).state(now_ms=20_000)
    assert line(begun, is_judging=True) == "no episode is played; tokens/s 0"
    judged = msgspec.structs.replace(begun, evaluations=(JUDGED,))
    assert line(judged, is_judging=True) == "sampled v0: 3 of 64 played; tokens/s 0"
    told = _text(panel(judged, shown))
    assert "sampled v0: 3 of 64 played" in told
    assert "0/20" not in told
    assert not [word for word in ("reward", "staleness", "window", "yield") if word in told]


def _report(state: RunState):
    return report(state, trees=TrainedTrees(), verdicts=(), duration_s=1.0, reason="completed")


@pytest.mark.slow
def test_a_gap_that_no_step_measured_is_none_everywhere_and_not_zero(tmp_path: Path) -> None:
    state = _run(UNMEASURED, UNMEASURED)
    assert state.logprob_gap_max is None
    points = [(p.logprob_gap_mean, p.logprob_gap_p99, p.logprob_gap_max) for p in state.points]
    assert points == [(None, None, None)] * 2
    assert "not measured" in _text(panel(state, SHOWN))
    made = _report(state)
    assert (made.logprob_gap_mean, made.logprob_gap_p99, made.logprob_gap_max) == (None,) * 3
    assert "not measured" in _text(table(made))
    write_report(made, state, folder=tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["logprob_gap_max"] is None
    writer = CurveWriter(tmp_path)
    writer.write(state, is_end=True)
    writer.close()
    first = json.loads((tmp_path / "curves.jsonl").read_text().splitlines()[0])
    assert (first["logprob_gap_mean"], first["logprob_gap_max"], first["gap_entries"]) == (
        None,
        None,
        0,
    )


def test_the_gap_of_a_run_is_that_of_its_measured_steps() -> None:
    state = _run(MEASURED, UNMEASURED)
    assert state.logprob_gap_max == 0.75
    assert [point.logprob_gap_mean for point in state.points] == [0.25, None]
    made = _report(state)
    assert (made.logprob_gap_mean, made.logprob_gap_max) == (0.25, 0.75)
    assert made.logprob_gap_p99 == GAP.quantile(0.99) == 2.0**-19
    assert "mean 0.25, 99 % within 1.9e-06, largest 0.75 nats" in _text(table(made))


def test_an_alarm_shows_in_panel_line_and_report_with_step_value_and_threshold() -> None:
    quiet, raised = _run(MEASURED), _run(MEASURED, MEASURED, alarms=(KL,))
    assert "none" in _text(panel(quiet, SHOWN))
    assert "1, newest: step 1 kl_k3 0.21 above 0.1" in _text(panel(raised, SHOWN))
    assert "ALARM step 1: kl_k3 0.21 above 0.1" in headlines(quiet, raised)
    assert headlines(raised, raised) == []
    made = _report(raised)
    assert [(a.step, a.metric, a.value, a.threshold) for a in made.alarms] == [
        (1, "kl_k3", 0.21, 0.1)
    ]
    assert "step 1: kl_k3 0.21 above 0.1" in _text(table(made))
    assert _report(quiet).alarms == ()


def test_tokens_a_pass_show_only_in_a_run_that_guesses_and_their_fall_as_an_alarm_below() -> None:
    quiet = _run(MEASURED)
    points = tuple(
        AcceptancePoint(lineage=1, version=version, length=length, verifications=300)
        for version, length in ((1, 2.5), (2, 1.04))
    )
    fallen = StepAlarm(
        step=2, lineage=1, metric="acceptance_length", value=1.04, threshold=1.1, side="below"
    )
    guessed = msgspec.structs.replace(quiet, acceptance=points, alarms=(fallen,))
    assert "tokens a pass" not in _text(panel(quiet, SHOWN)) + _text(table(_report(quiet)))
    assert "1.04 under version 2; 1 if no guess holds" in _text(panel(guessed, SHOWN))
    assert "step 2 acceptance_length 1.04 below 1.1" in _text(panel(guessed, SHOWN))
    assert "ALARM step 2: acceptance_length 1.04 below 1.1" in headlines(quiet, guessed)
    assert headlines(guessed, guessed) == []
    made = _report(guessed)
    assert "2.50 under version 1, 1.04 under version 2" in _text(table(made))
    assert made.acceptance == points


def test_what_a_run_without_a_step_or_an_end_has_not_yet_is_not_measured() -> None:
    begun = report(_run(), trees=TrainedTrees(), verdicts=(), duration_s=0.0, reason="")
    text = _words(table(begun))
    assert text.startswith(f"{begun.run}: no end on the log ")
    assert "tree saving not measured staleness" in text
    assert "time not measured" in text
    over = msgspec.structs.replace(begun, reason="completed", duration_s=61.0)
    assert "time 0:01:01" in _words(table(over))


def test_a_saving_that_is_not_measured_has_no_unit() -> None:
    made = _report(_run(MEASURED))
    assert "x append-only, attention not measured staleness" in _words(table(made))
    assert made.effective_yield is not None
    without_age = msgspec.structs.replace(
        made.effective_yield, value=1.0, tokens_per_s=1.0, reward_gain=1.0, policy_age_steps=None
    )
    assert "policy age in steps not measured, reward slope" in yield_line(without_age)


def test_the_closing_table_shows_the_newest_alarms_and_counts_the_others() -> None:
    made = _report(_run(MEASURED, alarms=(KL,) * (ALARMS_SHOWN_MAX + 2)))
    assert len(made.alarms) == ALARMS_SHOWN_MAX + 2
    text = _text(table(made))
    assert text.count("kl_k3 0.21") == ALARMS_SHOWN_MAX
    assert "2 earlier, see report.json" in text


COMPACTIONS = ForkTotal(
    reason="compaction",
    forks=1200,
    episodes=1,
    episodes_share=0.125,
    meaning=MEANINGS["compaction"],
)


def _words(shown: object) -> str:
    """What a console of 100 columns shows, without its lines and breaks."""
    return " ".join(_text(shown).replace("\u2502", " ").split())


@pytest.mark.slow
def test_the_report_has_the_forks_by_reason_with_their_share_and_meaning(tmp_path: Path) -> None:
    state = msgspec.structs.replace(_run(MEASURED), forks=(COMPACTIONS,))
    made = _report(state)
    assert "forks compaction 1,200" in _words(table(made))
    assert "compaction 1,200 12.5%" in _words(closing(made))
    write_report(made, state, folder=tmp_path)
    [written] = json.loads((tmp_path / "report.json").read_text())["forks"]
    assert written == msgspec.to_builtins(COMPACTIONS)
    quiet = _report(_run(MEASURED))
    assert "forks none" in _words(table(quiet))
    assert "of episodes" not in _words(closing(quiet))


def test_the_report_names_the_groups_that_ended_without_a_slot() -> None:
    run = SyntheticRun().play(steps=1)
    run.retire("g-9", reason="failed")
    view = RunView(started())
    for message in run.messages:
        view.apply(message)
    shown = _words(closing(_report(view.state(now_ms=0))))
    assert "groups 2 admitted, 0 open; failed 1, trained 2, 1 of them without a slot" in shown


def test_inspect_shows_the_forks_on_one_line_each_and_nothing_if_there_are_none() -> None:
    state = _run(MEASURED)
    console = Console(file=io.StringIO(), width=120)
    print_forks(state, console)
    assert console.file.getvalue() == ""
    print_forks(msgspec.structs.replace(state, forks=(COMPACTIONS,)), console)
    [line] = [row for row in console.file.getvalue().splitlines() if "compaction" in row]
    assert line.split(maxsplit=3) == ["compaction", "1,200", "12.5%", line.split(maxsplit=3)[3]]
    assert line.rstrip().endswith(MEANINGS["compaction"])
