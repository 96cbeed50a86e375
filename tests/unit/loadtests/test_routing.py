"""Simulated engines, traces of completions, and the gateway's choice among others'."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
from routing import CASES, Fleet, Simulation, in_order
from routing_engine import EngineSpeed, SharedPool, SimulatedEngine, Work
from routing_on_engines import RealLane
from routing_policies import POLICIES, Gateway, Sticky
from routing_trace import EpisodeTrace, TurnTrace, of_completions, synthetic

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_inference.core.engine_load import EngineCounters

DEMO = Path(__file__).parents[3] / "loadtests" / "traces" / "demo.jsonl"
SPEED = EngineSpeed(
    prefill_tokens_per_s=1000.0,
    step_s=0.01,
    step_added_s=0.001,
    context_s=0.0,
    capacity_tokens=10_000,
)


def work(episode: str, *, context: int, output: int = 16, prompt: int = 100) -> Work:
    return Work(
        episode=episode,
        group="g",
        prompt_tokens=prompt,
        context_tokens=context,
        output_tokens=output,
        asked_s=0.0,
    )


def finish(engine: SimulatedEngine, turn: Work) -> float:
    """Let the engine do this turn alone; returns when it ends."""
    engine.take(turn)
    now_s, ended = 0.0, list[Work]()
    while turn not in ended:
        now_s, ended = engine.step(now_s)
    return now_s


def test_a_turn_takes_its_reading_and_its_steps() -> None:
    # 500 tokens at 1,000 a second and a step's overhead, then 16 steps of 11 ms.
    assert finish(SimulatedEngine(SPEED), work("a", context=500)) == pytest.approx(0.51 + 0.176)


def test_the_next_turn_finds_its_episode_and_a_sibling_the_prompt_until_an_update() -> None:
    engine = SimulatedEngine(SPEED)
    finish(engine, work("a", context=500))
    following, sibling = work("a", context=600), work("b", context=600)
    engine.take(following)
    engine.take(sibling)
    assert (following.cached_tokens, sibling.cached_tokens) == (516, 100)
    assert engine.counters().num_waiting_uncached_tokens == (600 - 516) + (600 - 100)
    engine.waiting.clear()
    engine.load(1)
    engine.take(again := work("a", context=600))
    assert again.cached_tokens == 0


def test_an_update_makes_what_runs_read_everything_again() -> None:
    engine = SimulatedEngine(SPEED)
    engine.take(turn := work("a", context=500, output=100))
    engine.step(0.0)
    engine.step(0.0)
    assert (turn.unread_tokens, turn.sampled_tokens) == (0, 18)  # 18 steps of 11 ms in 0.2 s.
    engine.load(1)
    assert (turn.unread_tokens, engine.running) == (518, [])


def test_a_full_cache_drops_what_was_not_used_for_longest() -> None:
    engine = SimulatedEngine(msgspec.structs.replace(SPEED, capacity_tokens=1000))
    for episode in ("a", "b", "c"):
        finish(engine, work(episode, context=400, prompt=1))
    engine.take(oldest := work("a", context=500, prompt=1))
    engine.take(newest := work("c", context=500, prompt=1))
    assert (oldest.cached_tokens, newest.cached_tokens) == (1, 416)


def test_a_turn_fetches_what_another_engine_computed_and_nothing_of_other_weights() -> None:
    pool = SharedPool(5000.0)
    first, second = SimulatedEngine(SPEED, pool), SimulatedEngine(SPEED, pool)
    finish(first, work("a", context=500))
    second.take(turn := work("a", context=600))
    assert (turn.cached_tokens, turn.unread_tokens) == (516, 84)
    assert turn.ready_s == pytest.approx(0.02 + 516 / 5000)
    assert (second.has_work(0.12), second.has_work(0.13)) == (False, True)
    second.take(few := work("b", context=600))  # A sibling's prompt of 100 tokens is too short.
    assert few.cached_tokens == 0
    second.load(1)
    second.take(later := work("a", context=600))
    assert (later.cached_tokens, later.ready_s) == (0, 0.0)


def completion(
    number: int, parent: int | None, *, shared: int, context: int, episode: str = "g-1.0.0"
) -> FinishedCompletion:
    return FinishedCompletion(
        request_id=f"{number:032x}",
        attempt=0,
        episode_id=episode,
        group_id="g-1",
        lane=0,
        epoch=1,
        finish_reason="stop",
        turn=TurnPart(sequence=number, protocol="chat_completions", body_digest="d"),
        parent_id=None if parent is None else f"{parent:032x}",
        shared_prefix_tokens=shared,
        context=pack_ids([1] * context),
        output=pack_ids([2] * 5),
        logprobs=pack_floats([0.0] * 5),
        spans=(WeightSpan(start=0, end=5, lineage=1, version=0),),
        engine_s=2.0,
        queued_s=0.5,
    )


def test_traces_of_a_run_have_its_lengths_and_the_time_between_its_turns() -> None:
    traces = of_completions(
        [
            (10_000, completion(1, None, shared=0, context=100)),
            (11_000, completion(9, None, shared=0, context=70, episode="g-1.1.0")),
            (16_000, completion(2, 1, shared=105, context=20)),
            (17_000, completion(3, 1, shared=105, context=30)),  # A fork: not on the path.
            (20_000, completion(4, 2, shared=130, context=10)),
        ]
    )
    assert traces == [
        EpisodeTrace(
            group="g-1",
            prompt_tokens=100,
            turns=(TurnTrace(0, 5, 3.5), TurnTrace(20, 5, 1.5), TurnTrace(10, 5, 0.0)),
        ),
        EpisodeTrace(group="g-1", prompt_tokens=70, turns=(TurnTrace(0, 5, 0.0),)),
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_plays_every_turn(name: str) -> None:
    traces = synthetic(groups=6, group_size=4, seed=3)
    fleet = Fleet(speeds=(1.0, 0.5), update_every_s=120.0, stalls=((1, 10.0, 20.0),))
    simulation = Simulation(fleet, POLICIES[name](2), traces)
    simulation.run()
    assert simulation.turns == sum(len(trace.turns) for trace in traces)


def test_a_simulation_is_the_same_every_time() -> None:
    traces = synthetic(groups=6, group_size=4, seed=3)
    fleet = CASES["frequent_updates"]
    first, again = (Simulation(fleet, POLICIES["gateway"](8), traces).run() for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_turn_ends_though_an_engine_fails_what_it_is_given(name: str) -> None:
    """Engine 0 fails everything for a minute from the start; nothing is answered by it then."""
    traces = synthetic(groups=2, group_size=4, seed=3)
    fleet = Fleet(speeds=(1.0,) * 3, failures=((0, 0.0, 60.0),))
    simulation = Simulation(fleet, POLICIES[name](3), traces)
    outcome = simulation.run()
    assert simulation.turns == sum(len(trace.turns) for trace in traces)
    assert outcome.failed > 0


def test_the_gateway_leaves_an_engine_alone_that_fails_and_least_in_flight_does_not() -> None:
    traces = synthetic(groups=4, group_size=4, seed=3)
    fleet = Fleet(speeds=(1.0,) * 3, failures=((0, 0.0, 60.0),))
    failed = {
        name: Simulation(fleet, POLICIES[name](3), traces).run().failed
        for name in ("gateway", "least_in_flight")
    }
    assert failed["gateway"] < 0.1
    assert failed["least_in_flight"] > 10 * failed["gateway"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_turn_ends_though_an_engine_dies_with_all_that_it_has(name: str) -> None:
    traces = synthetic(groups=2, group_size=4, seed=3)
    fleet = Fleet(speeds=(1.0,) * 3, restarts=((0, 5.0, 35.0), (0, 50.0, 60.0)))
    simulation = Simulation(fleet, POLICIES[name](3), traces)
    outcome = simulation.run()
    assert simulation.turns == sum(len(trace.turns) for trace in traces)
    assert outcome.failed > 0
    assert [engine.starts for engine in simulation._engines] == [3, 1, 1]


def test_an_engine_that_was_started_again_has_nothing_of_before() -> None:
    engine = SimulatedEngine(SPEED)
    finish(engine, work("a", context=500))
    engine.take(running := work("b", context=600, output=100))
    engine.step(1.0)
    engine.step(1.0)
    assert running.sampled_tokens == 18
    assert engine.die(now_s=2.0) == [running]
    engine.start()
    assert not engine.has_work(3.0)
    assert engine.counters() == EngineCounters(max_total_num_tokens=10_000)
    engine.take(again := work("a", context=600))
    assert again.cached_tokens == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_chooses_among_real_engines_by_their_newest_counters(name: str) -> None:
    """The first one has a queue; who looks at queues avoids it, and who does not begins there."""
    lanes = [RealLane(SPEED), RealLane(SPEED)]
    lanes[0].newest = EngineCounters(num_waiting_uncached_tokens=9_000, num_used_tokens=100)
    lanes[1].newest = EngineCounters(num_used_tokens=100)
    policy = POLICIES[name](2)
    policy.note_report(lanes, now_s=0.0)
    turn = work("a", context=500)
    assert policy.choose(turn, now_s=0.0) == (1 if name in ("dynamo", "gateway") else 0)
    policy.note_ended(turn, 0)


def test_the_gateway_believes_nothing_cached_after_a_restart_and_waits_for_silence_before() -> None:
    engines = [SimulatedEngine(SPEED), SimulatedEngine(SPEED)]
    gateway = Gateway(2)
    gateway.note_report(engines, now_s=0.0)
    first = work("a", context=5_000)
    assert gateway.choose(first, now_s=0.0) == 0
    gateway.note_ended(first, 0)
    following = work("a", context=5_100)
    assert gateway.choose(following, now_s=0.5) == 0
    engines[0].die(now_s=1.0)
    gateway.note_report(engines, now_s=1.0)
    assert gateway.noticed_s(0) == 5.0
    gateway.note_failed(following, 0, now_s=5.01, is_lost=True)
    gateway.note_report(engines, now_s=5.01)
    assert gateway.choose(following, now_s=5.01) == 1
    gateway.note_ended(following, 1)
    engines[0].start()
    gateway.note_report(engines, now_s=9.0)
    assert gateway.choose(work("a", context=5_200), now_s=9.0) == 1


def test_an_engine_that_is_late_with_weights_has_the_older_version() -> None:
    fleet = Fleet(speeds=(1.0, 1.0), update_every_s=10.0, late_s=(5.0, 0.0))
    simulation = Simulation(fleet, POLICIES["round_robin"](2), [])
    simulation._update(1)
    seen = []
    while len(seen) < 2:
        simulation._now_s, _, event = simulation._events.pop(0)
        event()
        seen.append((simulation._now_s, tuple(e.version for e in simulation._engines)))
    assert seen == [(2.0, (0, 1)), (5.0, (1, 1))]


def test_another_order_of_a_trace_has_the_same_episodes_with_those_of_a_group_together() -> None:
    traces = synthetic(groups=6, group_size=4, seed=3)
    assert in_order(traces, seed=0) == traces
    shuffled = in_order(traces, seed=1)
    assert shuffled != traces
    assert in_order(shuffled, seed=0) == shuffled
    groups = [trace.group for trace in shuffled]
    assert groups == [group for group in dict.fromkeys(groups) for _ in range(4)]
    for group in set(groups):
        assert [each for each in shuffled if each.group == group] == [
            each for each in traces if each.group == group
        ]


@pytest.mark.slow
def test_with_a_pool_and_short_contexts_the_gateway_finishes_the_turns_of_sticky() -> None:
    """A cost without the pass that a turn begins finishes 0.97 of them: it moves episodes to and
    fro between equal engines, whose turns are then read in more passes."""
    recorded = msgspec.json.Decoder(EpisodeTrace).decode_lines(DEMO.read_bytes())
    fleet = msgspec.structs.replace(CASES["with_pool"], speeds=(0.05,) * 8)
    gateway, sticky = (
        [
            Simulation(fleet, made(), in_order(recorded, seed=seed)).run().turns_per_s
            for seed in range(2)
        ]
        for made in (partial(Gateway, 8, pool_tokens_per_s=60_000.0), partial(Sticky, 8))
    )
    assert sum(gateway) >= 0.98 * sum(sticky)
