"""A stalled run says what it waits for, and a slow one is not called stalled."""

import random

import msgspec
import pytest

from forgemq_contracts.run import EndedRun
from forgemq_run_view.stall import CONFIRMED_AFTER_MS, StallWatch, lacking_groups
from forgemq_run_view.state import Stall
from forgemq_run_view.view import RunView
from forgemq_run_view.watched import WAITS_MIN, Waits, WatchedGroup
from tests.unit.run_view.live_run import LiveRun, Paces, started

ASKED_EVERY_S = 12
HEALTHY_S = 900
"""Groups that train, and what is usual of them, before something breaks."""


class Watched:
    """A live run and a watch that reads it as it goes on."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self.watch = StallWatch(started())
        self.stalls: list[Stall] = []
        self._read = 0

    def play(self, seconds: int) -> "Watched":
        self.run.play(seconds, each=self._look)
        return self

    def _look(self) -> None:
        for message in self.run.messages[self._read :]:
            self.watch.apply(message)
        self._read = len(self.run.messages)
        if self.run.now_s % ASKED_EVERY_S == 0:
            stall = self.watch.stall(now_ms=self.run.now_ms)
            self.stalls += [stall] if stall is not None else []

    def named(self) -> set[tuple[str, str]]:
        return {(stall.reason, stall.waits_for) for stall in self.stalls}


def healthy(seed: int = 0, **paces) -> Watched:
    watched = Watched(LiveRun(seed, paces=Paces(**paces))).play(HEALTHY_S)
    assert watched.stalls == []
    return watched


@pytest.mark.parametrize(
    ("stopped", "named"),
    [
        ("lanes", ("lane_silent", "lane 0")),
        ("reward", ("service_silent", "reward")),
        ("merger", ("service_silent", "merger")),
        ("scheduler", ("service_silent", "scheduler")),
        ("gateway", ("service_silent", "gateway")),
        ("agents", ("service_silent", "agents")),
        ("engine", ("service_silent", "inference")),
    ],
)
def test_a_part_that_stops_is_named_and_nothing_else(stopped: str, named: tuple[str, str]):
    watched = healthy()
    watched.run.stopped.add(stopped)
    assert watched.play(2000).named() == {named}


def test_a_trainer_that_stops_is_named_with_the_step_that_it_does_not_finish():
    watched = healthy()
    watched.run.stopped.add("trainer")
    [(reason, waits_for)] = watched.play(2000).named()
    assert reason == "trainer_without_step"
    trained = max(m.record.step for m in watched.run.messages if m.topic == "trained-steps-v1")
    assert waits_for == f"step {trained + 1}"


def test_lanes_that_do_not_load_the_newest_version_are_named_with_it():
    watched = healthy()
    watched.run.stopped.add("loading")
    [(reason, waits_for)] = watched.play(2000).named()
    assert reason == "no_lane_with_version"
    published = [m.record for m in watched.run.messages if m.topic == "published-weights-v1"]
    assert waits_for == f"version {published[-1].version}"
    [loaded] = [m.record for m in watched.run.messages if m.topic == "loaded-weights-v1"][-1:]
    assert f"lane 0 has {loaded.version}." in watched.stalls[-1].detail


def test_a_log_to_which_nobody_writes_is_named_before_any_service():
    watched = healthy()
    watched.run.stopped |= {
        "lanes",
        "gateway",
        "scheduler",
        "agents",
        "reward",
        "merger",
        "trainer",
    }
    assert watched.play(1000).named() == {("log_silent", "any record")}


def test_a_head_that_nobody_plays_any_more_is_named_while_others_are_played():
    watched = healthy()
    head = watched.run.playing[0]
    watched.run.hung.add(head)
    assert watched.play(2000).named() == {("head_group", f"group {head}")}


def test_a_head_that_is_played_without_end_is_named_when_it_holds_up_every_slot():
    watched = healthy()
    head = watched.run.playing[0]
    watched.run.is_hung_silent = False
    watched.run.hung.add(head)
    assert watched.play(2000).named() == {("window_full", f"group {head}")}


def test_a_service_that_writes_and_leaves_the_head_behind_is_called_behind():
    watched = healthy()
    head = watched.run.playing[0]
    watched.run.ungraded.add(head)
    assert watched.play(2000).named() == {("service_lag", "reward")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_with_slow_episodes_is_never_called_stalled(seed: int):
    """Turns take up to 14 minutes and episodes hours; grading and steps take minutes."""

    def slow_turn(chance: random.Random) -> int:
        return min(840, round(chance.paretovariate(0.6) * 10))

    watched = Watched(
        LiveRun(
            seed,
            paces=Paces(
                turn=slow_turn,
                turns=lambda chance: chance.randint(1, 40),
                grading=lambda chance: chance.randint(1, 100),
                training=lambda chance: chance.randint(30, 600),
            ),
        )
    ).play(30_000)
    assert watched.stalls == []
    trained = sum(m.topic == "trained-steps-v1" for m in watched.run.messages)
    assert trained > 5


def test_a_stall_ends_when_the_run_goes_on():
    watched = healthy()
    watched.run.stopped.add("merger")
    watched.play(600)
    assert watched.stalls
    watched.run.stopped.clear()
    watched.play(60)
    before = len(watched.stalls)
    watched.play(600)
    assert len(watched.stalls) == before


def stalled_run(stopped: str) -> LiveRun:
    """A healthy run that lacks a service in the end."""
    run = LiveRun(0)
    run.play(HEALTHY_S)
    run.stopped.add(stopped)
    run.play(1000)
    return run


def test_a_stall_is_named_only_after_it_was_seen_for_a_while():
    run = stalled_run("lanes")
    watch = StallWatch(started())
    for message in run.messages:
        watch.apply(message)
    now_ms = run.now_ms
    assert watch.stall(now_ms=now_ms) is None
    assert watch.stall(now_ms=now_ms + CONFIRMED_AFTER_MS - 1) is None
    stall = watch.stall(now_ms=now_ms + CONFIRMED_AFTER_MS)
    assert stall is not None
    assert stall.reason == "lane_silent"


def test_the_state_of_a_run_has_its_stall_and_that_of_an_ended_run_has_none():
    run = stalled_run("merger")
    view = RunView(started())
    for message in run.messages:
        view.apply(message)
    view.state(now_ms=run.now_ms - CONFIRMED_AFTER_MS)
    stall = view.state(now_ms=run.now_ms).stall
    assert stall is not None
    assert stall.waits_for == "merger"
    ended = EndedRun(run="r", reason="failed", ended_ms=run.now_ms)
    view.apply(msgspec.structs.replace(run.messages[-1], topic="ended-runs-v1", record=ended))
    assert view.state(now_ms=run.now_ms).stall is None


def test_a_run_that_is_trained_waits_for_nothing():
    run = LiveRun(0)
    run.play(HEALTHY_S)
    steps = sum(m.topic == "trained-steps-v1" for m in run.messages)
    watch = StallWatch(started(steps=steps))
    for message in run.messages:
        watch.apply(message)
    assert watch.stall(now_ms=run.now_ms + 10_000_000) is None
    assert watch.stall(now_ms=run.now_ms + 11_000_000) is None


def ready(index: int, *, is_ready: bool = True, is_scheduled: bool = False) -> WatchedGroup:
    return WatchedGroup(
        group_id=f"g-{index}", queue_index=index, is_ready=is_ready, is_scheduled=is_scheduled
    )


def test_a_step_lacks_what_stands_in_the_window_once_all_that_is_ready_there_is_taken():
    groups = [ready(0), ready(1, is_ready=False), ready(2), ready(3)]
    assert lacking_groups(groups, window=2, count=1) is None
    # 0 is taken, so 1 and 2 are the window; then 2 is, and 3 stays outside until 1 is ready.
    assert lacking_groups(groups, window=2, count=2) is None
    lacking = lacking_groups(groups, window=2, count=3)
    assert lacking is not None
    assert [group.group_id for group in lacking] == ["g-1"]
    assert lacking_groups(groups[:1], window=2, count=2) == []


def test_what_is_usual_is_known_after_a_few_waits_and_one_outage_does_not_change_it():
    waits = Waits()
    for _ in range(WAITS_MIN - 1):
        waits.add(1000)
    assert waits.limit_ms(600) == 600
    waits.add(1000)
    assert waits.limit_ms(600) == 3000
    for _ in range(WAITS_MIN * 3):
        waits.add(1000)
    waits.add(10_000_000)
    assert waits.limit_ms(600) == 3000
