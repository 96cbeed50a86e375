"""Whole runs of the agents process against the gateway in memory."""

import asyncio
import itertools
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from msgspec import Raw

from forgemq_agents.errors import ContextFullError, PolicyFailedError
from forgemq_contracts.admin import AbortRequest, FinishRequest
from forgemq_contracts.partitions import group_of_episode
from forgemq_contracts.run import (
    Evaluation,
)
from tests.unit.agents.agent_run import (
    attempts,
    numbered,
    play,
    rounds,
    task_of,
    well,
)


async def test_a_run_is_evaluated_trained_and_evaluated_again(memory_gateway):
    gateway = await memory_gateway()
    await play(gateway, well)
    assert rounds(gateway) == ["start-sampled", "start-greedy", "end-sampled", "end-greedy"]
    evaluated = [g for g in gateway.in_order() if g.request.purpose == "eval"]
    assert [task_of(g)["k"] for g in evaluated] == [1_000_000, 1_000_001] * 4
    assert {g.request.temperature for g in evaluated if "greedy" in g.request.round_name} == {0.0}
    # Sampled rounds leave the temperature to the run.
    assert {g.request.temperature for g in evaluated if "sampled" in g.request.round_name} == {None}
    trained = [g for g in gateway.in_order() if g.request.purpose == "train"]
    assert [g.request.idempotency_key for g in trained[:4]] == [f"count/{k}" for k in range(4)]
    assert [task_of(g) for g in trained[:2]] == [numbered(3, "count", k) for k in range(2)]
    end = trained[0].ended[0]
    assert isinstance(end, FinishRequest)
    assert end.virtual_s == 1.5
    assert msgspec.json.decode(end.result) == {"said": "key-g-count-0.0.0 speaking"}


async def test_no_training_group_has_a_held_out_task_however_many_there_are(memory_gateway):
    gateway = await memory_gateway(groups_to_train=6)
    await play(gateway, well, evaluation=Evaluation(tasks=2, task_offset=3, greedy=False))
    asked = [(g.request.purpose, task_of(g)["k"]) for g in gateway.in_order()]
    assert [k for purpose, k in asked if purpose == "train"][:6] == [0, 1, 2, 5, 6, 7]
    assert {k for purpose, k in asked if purpose == "eval"} == {3, 4}


async def test_a_model_is_judged_by_several_episodes_of_each_held_out_task_and_nothing_else(
    memory_gateway,
):
    gateway = await memory_gateway()

    async def with_tools(episode) -> None:
        with episode.tool():
            await asyncio.sleep(0.05)
        episode.tool_s += 1.0

    await play(gateway, with_tools, samples=3)
    judged = gateway.in_order()
    assert [task_of(group)["k"] for group in judged] == [1_000_000, 1_000_001]
    assert {group.request.round_name for group in judged} == {"judged"}
    assert {(g.request.purpose, g.request.group_size) for g in judged} == {("eval", 3)}
    assert {group.request.temperature for group in judged} == {None}
    assert [sorted(group.ended) for group in judged] == [[0, 1, 2]] * 2
    ends = [end for group in judged for end in group.ended.values()]
    # A loop that is behind begins a sleep at the time of its last round.
    assert all(1.0 < end.tool_s < 3.0 for end in ends), ends


async def test_training_is_played_beside_the_round_of_the_base_model(memory_gateway):
    """The round begins first, so that the trainer sees it; training does not wait for its end."""
    gateway = await memory_gateway(slots=2, groups_to_train=2)
    trained_during_round: list[int] = []

    async def slow_in_evaluations(episode) -> None:
        if episode.task["k"] >= 1_000_000:
            await asyncio.sleep(2.0)
            trained_during_round.append(gateway.scheduler.trained)

    await play(gateway, slow_in_evaluations, evaluation=Evaluation(tasks=2, greedy=False))
    requests = [group.request.idempotency_key for group in gateway.in_order()]
    assert requests[0] == "eval/start-sampled/count/1000000"
    assert requests.index("count/0") < requests.index("eval/end-sampled/count/1000000")
    assert trained_during_round[0] >= 2


@pytest.mark.parametrize(("steps_trained", "names"), [(1, ["start-sampled"]), (2, [])])
async def test_a_restart_plays_on_the_round_of_the_base_model_until_a_later_step_is_trained(
    memory_gateway, steps_trained, names
):
    gateway = await memory_gateway(slots=1, groups_to_train=4)
    gateway.train(steps_trained, is_last=False)
    await play(gateway, well, slots=1, evaluation=Evaluation(tasks=1, greedy=False))
    assert rounds(gateway) == [*names, "end-sampled"]


async def test_one_step_of_groups_more_than_slots_is_requested(memory_gateway):
    gateway = await memory_gateway(groups_to_train=12, slots=3)

    async def slowly(episode) -> None:
        await asyncio.sleep(0.3)

    await play(gateway, slowly, slots=3)
    assert gateway.scheduler.outstanding_max == 3 + 1


async def test_no_more_episodes_are_open_than_configured(memory_gateway):
    gateway = await memory_gateway(group_size=6, slots=3)

    async def slowly(episode) -> None:
        await asyncio.sleep(0.05)

    await play(gateway, slowly, slots=3, concurrent_max=4)
    assert gateway.scheduler.open_max == 4


async def test_periodic_rounds_are_played_during_training(memory_gateway):
    gateway = await memory_gateway(groups_to_train=4, slots=1, group_size=1)

    async def slowly(episode) -> None:
        await asyncio.sleep(0.3)

    await play(
        gateway, slowly, slots=1, evaluation=Evaluation(tasks=1, every_steps=2, greedy=False)
    )
    assert rounds(gateway) == ["start-sampled", "step-2-sampled", "end-sampled"]


async def test_the_run_is_watched_during_a_periodic_round(memory_gateway):
    gateway = await memory_gateway(groups_to_train=4, slots=1, group_size=1)
    polls: list[int] = []

    async def slowly(episode) -> None:
        before = gateway.requests.count("read_run")
        await asyncio.sleep(0.3)
        if "step-2" in episode.episode_id:
            polls.append(gateway.requests.count("read_run") - before)

    await play(
        gateway, slowly, slots=1, evaluation=Evaluation(tasks=1, every_steps=2, greedy=False)
    )
    assert len(polls) == 1
    assert polls[0] >= 2


async def test_an_agent_that_raises_aborts_its_episode_with_the_error(memory_gateway):
    gateway = await memory_gateway()

    async def broken(episode) -> None:
        raise LookupError("no such shelf")

    await play(gateway, broken)
    ends = [end for group in gateway.in_order() for end in group.ended.values()]
    assert set(ends) == {AbortRequest(detail="LookupError: no such shelf")}


async def test_a_group_is_played_whole_before_the_next_one_begins(memory_gateway, capsys):
    played = []

    async def slowly(episode) -> None:
        played.append(episode.task["k"])
        await asyncio.sleep(0.02)

    gateway = await memory_gateway(group_size=4, slots=3, groups_to_train=3)
    await play(gateway, slowly, slots=3, evaluation=Evaluation(), concurrent_max=1)
    assert played[:12] == [0] * 4 + [1] * 4 + [2] * 4
    assert '"event":"few_players"' in capsys.readouterr().err


async def test_limits_end_an_episode_as_truncated_and_the_agent_has_the_last_word(memory_gateway):
    full = ContextFullError("too long", status=400)
    ends = {
        0: full,
        1: full,
        2: None,
        3: LookupError("no such shelf"),
        4: PolicyFailedError("half a plan"),
        5: PolicyFailedError("half a plan"),
        6: LookupError("no such shelf"),
    }
    says = {1: None, 2: "declared", 3: "too_many_turns", 5: "out_of_time"}

    async def limited(episode) -> None:
        number = episode.task["k"]
        episode.result = {"so": "far"}
        if number in says:
            episode.truncate(says[number])
        if ends.get(number) is not None:
            raise ends[number]

    gateway = await memory_gateway(group_size=1, groups_to_train=7)
    await play(gateway, limited, evaluation=Evaluation(), slots=1)
    result, plan = Raw(b'{"so":"far"}'), "PolicyFailedError: half a plan"
    assert [gateway.groups[f"g-count-{number}"].ended[0] for number in range(7)] == [
        FinishRequest(result=result, truncated_by="context_full"),
        FinishRequest(result=result, truncated_by=None),
        FinishRequest(result=result, truncated_by="declared"),
        AbortRequest(detail="LookupError: no such shelf", truncated_by="too_many_turns"),
        FinishRequest(result=result, truncated_by="declared", detail=plan),
        FinishRequest(result=result, truncated_by="out_of_time", detail=plan),
        AbortRequest(detail="LookupError: no such shelf"),
    ]


@pytest.mark.parametrize(
    ("left", "detail"),
    [
        ({"result": object()}, "TypeError: Encoding objects of type object is unsupported"),
        ({"virtual_s": -1.0}, "ValidationError: Expected `float` >= 0.0 - at `$.virtual_s`"),
    ],
)
async def test_an_end_that_cannot_be_reported_masks_the_episode(memory_gateway, left, detail):
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=1)

    async def odd(episode) -> None:
        for name, value in left.items():
            setattr(episode, name, value)

    await play(gateway, odd, slots=1, evaluation=Evaluation())
    assert gateway.groups["g-count-0"].ended == {0: AbortRequest(detail=detail)}


async def test_numbers_of_numpy_in_a_task_a_reward_and_a_result_are_those_numbers(memory_gateway):
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=1)

    async def measured(episode) -> None:
        await episode.report_reward("outcome", np.float64(0.25))
        episode.result = {"k": np.int64(episode.task["k"]), "scores": np.array([[0.5], [1.0]])}
        episode.tool_s += np.float32(1.5)

    def source(seed: int, domain: str, k: int) -> object:
        return {"k": np.int64(k + 7)}

    await play(gateway, measured, source=source, slots=1, evaluation=Evaluation())
    assert [reward.value for reward in gateway.rewards] == [0.25]
    end = FinishRequest(result=Raw(b'{"k":7,"scores":[[0.5],[1.0]]}'), tool_s=1.5)
    assert gateway.groups["g-count-0"].ended == {0: end}


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_long_episode_keeps_its_lease_by_heartbeats(memory_gateway):
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=1)

    async def long(episode) -> None:
        await asyncio.sleep(1.0)

    await play(gateway, long, slots=1, evaluation=Evaluation())
    assert gateway.heartbeats.count("g-count-0.0.0") >= 3


@pytest.mark.wall_clock
async def test_an_episode_that_was_replaced_is_stopped_and_reports_nothing(memory_gateway):
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=1)
    played, cancelled = [], []

    async def stubborn(episode) -> None:
        played.append(episode.episode_id)
        if len(played) == 1:
            gateway.lapse(episode.episode_id)
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(episode.episode_id)
                raise

    await play(gateway, stubborn, slots=1, evaluation=Evaluation())
    assert played[:2] == ["g-count-0.0.0", "g-count-0.0.1"]
    assert cancelled == ["g-count-0.0.0"]
    assert attempts(gateway.groups["g-count-0"]) == {0: 1}


async def test_a_killed_process_is_continued_without_a_second_group_for_a_task(memory_gateway):
    gateway = await memory_gateway(groups_to_train=6, slots=2)
    reached = asyncio.Event()

    async def until_the_third(episode) -> None:
        if episode.task["k"] == 3:
            reached.set()
            await asyncio.sleep(30)
        await well(episode)

    first = asyncio.ensure_future(play(gateway, until_the_third))
    await asyncio.wait_for(reached.wait(), 20)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    for group in gateway.in_order():
        for index, attempt in group.attempts.items():
            if index not in group.ended:
                gateway.lapse(attempt.episode_id)
    asked_before, run = len(gateway.asked_keys), await gateway.read_run()
    await play(gateway, well)
    asked = [key for key in gateway.asked_keys[asked_before:] if not key.startswith("eval/")]
    assert run.first_tasks["count"] > 0
    assert asked[0] == f"count/{run.first_tasks['count']}", "it goes on where training is"
    keys = [group.request.idempotency_key for group in gateway.in_order()]
    assert len(set(keys)) == len(keys)
    assert rounds(gateway) == ["start-sampled", "start-greedy", "end-sampled", "end-greedy"]
    assert attempts(gateway.groups["g-count-3"]) == {0: 1, 1: 1}


async def test_a_process_that_is_stopped_gives_back_what_it_plays(memory_gateway):
    """Another one has it at once; the leases would last for longer than the test."""
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=3)
    gateway.lease_s = 600.0
    begun = asyncio.Semaphore(0)

    async def endless(episode) -> None:
        begun.release()
        await asyncio.Event().wait()

    first = asyncio.ensure_future(play(gateway, endless, evaluation=Evaluation()))
    for _ in range(3):
        await begun.acquire()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    await play(gateway, well, evaluation=Evaluation())
    assert gateway.requests.count("release_episode") == 3
    assert attempts(gateway.groups["g-count-0"]) == {0: 1, 1: 1, 2: 1}
    assert all(isinstance(e, FinishRequest) for e in gateway.groups["g-count-0"].ended.values())


async def test_an_episode_whose_claim_is_answered_when_the_process_stops_is_given_back(
    memory_gateway,
):
    gateway = await memory_gateway(groups_to_train=1, slots=1, group_size=1)
    gateway.lease_s = 600.0
    claimed, stopped, claim_episode = asyncio.Event(), asyncio.Event(), gateway.claim_episode

    async def answered_late(*asked):
        claim = await claim_episode(*asked)
        claimed.set()
        await stopped.wait()
        return claim

    gateway.claim_episode = answered_late
    first = asyncio.ensure_future(play(gateway, well, evaluation=Evaluation()))
    await claimed.wait()
    first.cancel()
    asyncio.get_running_loop().call_later(0.1, stopped.set)
    with suppress(asyncio.CancelledError):
        await first
    assert gateway.requests.count("release_episode") == 1
    assert gateway.groups["g-count-0"].attempts[0].state == "lapsed"


async def test_two_processes_share_one_run(memory_gateway):
    gateway = await memory_gateway(groups_to_train=6, slots=3, group_size=4)
    players: dict[str, set[str]] = {"one": set(), "two": set()}

    def named(name: str):
        async def played(episode) -> None:
            players[name].add(episode.episode_id)
            await asyncio.sleep(0.02)

        return played

    await asyncio.gather(play(gateway, named("one"), slots=3), play(gateway, named("two"), slots=3))
    assert players["one"]
    assert players["two"]
    assert not players["one"] & players["two"]


async def test_a_busy_gateway_is_asked_again_after_its_retry_after(memory_gateway, refusal):
    gateway = await memory_gateway(groups_to_train=1, slots=1)
    gateway.answers = [refusal(429, "busy", Retry_After="0.1"), refusal(503, "moving")]
    await play(gateway, well, slots=1)
    assert gateway.run.training_ended


async def test_the_end_of_training_waits_for_no_group_without_a_slot(memory_gateway):
    gateway = await memory_gateway(groups_to_train=1, slots=1)

    async def while_another_waits(episode) -> None:
        group_id = group_of_episode(episode.episode_id)
        if gateway.groups[group_id].request.purpose == "train":
            for _ in itertools.count():
                if any(group.state == "requested" for group in gateway.in_order()):
                    break
                await asyncio.sleep(0)
        await well(episode)

    async with asyncio.timeout(10):  # The gateway holds each long poll for 20 s.
        await play(gateway, while_another_waits, slots=3)
    assert [g.state for g in gateway.in_order()].count("requested") >= 1


async def test_a_refused_key_ends_the_process(memory_gateway, refusal):
    gateway = await memory_gateway()
    gateway.answers = [refusal(401, "wrong key")] * 20
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await play(gateway, well)
