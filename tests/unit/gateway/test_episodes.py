"""Groups, claims, leases and ends over HTTP."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.steps import TrainedStep, TrainingMetrics
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.world import configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GROUP = {"domain": "shop", "idempotency_key": "k1", "task": {"b": 1, "a": [2]}}


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


def yes(asked: Asked) -> str:
    return "yes"


async def test_a_group_is_requested_once_per_key_and_waits_for_its_slot(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        first = (await world.admin("POST", "/v1/groups", GROUP)).json()
        again = (await world.admin("POST", "/v1/groups", GROUP)).json()
        waiting = asyncio.ensure_future(
            world.admin("GET", f"/v1/groups/{first['group_id']}?wait_s=10")
        )
        none = await world.admin("POST", f"/v1/groups/{first['group_id']}/claim", {"wait_s": 0})
        await asyncio.sleep(0.1)
        await world.admit(first["group_id"])
        admitted = (await asyncio.wait_for(waiting, timeout=5)).json()
        records = await world.records(topics.REQUESTED_GROUPS)
    assert first == again
    assert first["state"] == "requested"
    assert first["group_size"] == 2
    assert none.status_code == 204
    assert (admitted["state"], admitted["queue_index"]) == ("admitted", 0)
    assert [record.task for record in records] == [b'{"b":1,"a":[2]}']


async def test_too_many_waiting_groups_are_429_and_nothing_is_written(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        answers = [
            await world.admin("POST", "/v1/groups", {**GROUP, "idempotency_key": f"k{n}"})
            for n in range(4)
        ]
        records = await world.records(topics.REQUESTED_GROUPS)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[3].headers["retry-after"] == "1"
    assert len(records) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**GROUP, "domain": "moon"}, "domain"),
        ({"domain": "shop", "idempotency_key": "k"}, "task"),
        ({**GROUP, "purpose": "fun"}, "purpose"),
        ({**GROUP, "idempotency_key": ""}, "idempotency_key"),
        ({**GROUP, "group_size": 0}, "group_size"),
    ],
)
async def test_a_bad_group_is_refused_naming_the_field(
    model: Path, body: dict[str, Any], param: str
) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        answer = await world.admin("POST", "/v1/groups", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_train_groups_are_410_after_the_last_step_and_eval_groups_are_not(
    model: Path,
) -> None:
    metrics = TrainingMetrics(
        loss=0,
        grad_norm=0,
        lr=0,
        loss_tokens=0,
        tree_tokens=0,
        request_tokens=0,
        append_tokens=0,
        attention_pairs=0,
        ratio_mean=1,
        ratio_p99=1,
        capped_share=0,
        logprob_gap_mean=0,
        logprob_gap_max=0,
        kl_k3=0,
        entropy=0,
        staleness_max=0,
        forward_backward_s=0,
    )
    last = TrainedStep(
        step=9,
        lineage=1,
        group_ids=(),
        failed_group_ids=(),
        metrics=metrics,
        checkpoint_step=9,
        duration_s=1,
        is_last=True,
    )
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        await world.write(topics.TRAINED_STEPS, 0, last)
        async with asyncio.timeout(10):
            for _ in itertools.count():
                if (await world.admin("GET", "/v1/run")).json()["training_ended"]:
                    break
                await asyncio.sleep(0.02)
        train = await world.admin("POST", "/v1/groups", GROUP)
        evaluation = await world.admin("POST", "/v1/groups", {**GROUP, "purpose": "eval"})
        run = (await world.admin("GET", "/v1/run")).json()
    assert (train.status_code, evaluation.status_code) == (410, 200)
    assert run == run | {
        "run": "r",
        "steps": 10,
        "steps_trained": 10,
        "training_ended": True,
        "domains": ["shop"],
    }


async def test_claims_hand_out_each_index_once_and_keep_only_the_hash_of_the_key(
    model: Path,
) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        group = await world.open_group()
        first, second = await asyncio.gather(world.claim(group), world.claim(group))
        third = await world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 0.1})
        opened = await world.records(topics.OPENED_EPISODES)
        view = (await world.admin("GET", f"/v1/groups/{group}")).json()
    assert {first["index"], second["index"]} == {0, 1}
    assert first["attempt"] == 0
    assert first["task"] == {"n": 1}
    assert third.status_code == 204
    assert {record.key_sha256 for record in opened} == {
        hashlib.sha256(claim["key"].encode()).hexdigest() for claim in (first, second)
    }
    assert (view["open"], view["finished"]) == (2, 0)


async def test_an_episode_finishes_once_with_its_manifest_rewards_and_times(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, lanes):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}"
        answer = await world.client(claim).chat.completions.create(model="m", messages=HELLO)
        reward = {"reward_id": "r1", "name": "style", "value": 0.5, "completion_id": answer.id}
        statuses = [
            (await world.admin("POST", f"{path}/rewards", reward)).status_code,
            (await world.admin("POST", f"{path}/rewards", reward)).status_code,
            (
                await world.admin("POST", f"{path}/finish", {"result": {"ok": 1}, "tool_s": 2})
            ).status_code,
            (await world.admin("POST", f"{path}/finish", {"result": {"ok": 1}})).status_code,
            (await world.admin("POST", f"{path}/heartbeat")).status_code,
        ]
        with pytest.raises(openai.ConflictError):
            await world.client(claim).chat.completions.create(model="m", messages=HELLO)
        ended = await world.records(topics.FINISHED_EPISODES)
    assert statuses == [200, 200, 200, 200, 409]
    assert len(ended) == 1
    (record,) = ended
    assert (record.status, record.result, record.tool_s) == ("completed", b'{"ok":1}', 2.0)
    assert [(r.reward_id, r.value) for r in record.rewards] == [("r1", 0.5)]
    assert [entry.completion_id for entry in record.manifest] == [
        lanes[0].seen[0].record.request_id
    ]
    assert record.manifest[0].output_tokens == len(world.rendering._tokenizer.encode("yes")) + 1
    assert record.task == b'{"n":1}'


async def test_a_reward_for_an_unknown_completion_is_refused(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        claim = await world.episode()
        reward = {"reward_id": "r", "name": "n", "value": 1, "completion_id": "0" * 32}
        answer = await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/rewards", reward)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "completion_id"


async def test_an_aborted_episode_ends_masked(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/abort"
        assert (await world.admin("POST", path, {"detail": "no tool"})).status_code == 200
        (record,) = await world.records(topics.FINISHED_EPISODES)
    assert (record.status, record.detail, record.manifest) == ("aborted", "no tool", ())


async def test_finishing_waits_for_an_answer_that_is_on_its_way(model: Path) -> None:
    async def slowly(asked: Asked) -> str:
        await asyncio.sleep(0.4)
        return "yes"

    async with running(log_store(), configuration_of(model), slowly) as (world, lanes):
        claim = await world.episode()
        asking = asyncio.ensure_future(
            world.client(claim).chat.completions.create(model="m", messages=HELLO)
        )
        await lanes[0].has_seen(1)
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        answer = await asking
        (record,) = await world.records(topics.FINISHED_EPISODES)
    assert f"chatcmpl-{record.manifest[0].completion_id}" == answer.id


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_lapsed_lease_opens_the_next_attempt_and_the_final_fails(model: Path) -> None:
    configuration = configuration_of(model, lease_s=0.4)
    async with running(log_store(), configuration, yes) as (world, _):
        group = await world.open_group()
        first = await world.claim(group)
        other = await world.claim(group)
        second = await world.claim(group)
        again = await world.claim(group)
        path = f"/v1/episodes/{first['episode_id']}/heartbeat"
        heartbeat = await world.admin("POST", path)
        with pytest.raises(openai.ConflictError):
            await world.client(first).chat.completions.create(model="m", messages=HELLO)
        ended = await world.eventually(topics.FINISHED_EPISODES, 2)
        over = await world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 0})
    assert {first["attempt"], other["attempt"]} == {0}
    assert {second["attempt"], again["attempt"]} == {1}
    assert heartbeat.status_code == 409
    assert sorted((r.index, r.attempt, r.status) for r in ended) == [
        (0, 1, "failed"),
        (1, 1, "failed"),
    ]
    assert "lease" in ended[0].detail
    assert over.status_code == 410


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_heartbeats_and_waiting_requests_keep_a_lease(model: Path) -> None:
    async def slowly(asked: Asked) -> str:
        await asyncio.sleep(2.0)
        return "yes"

    async with running(log_store(), configuration_of(model, lease_s=1.0), slowly) as (world, _):
        claim = await world.episode()
        answer = await world.client(claim).chat.completions.create(model="m", messages=HELLO)
        for _ in range(4):
            await asyncio.sleep(0.3)
            path = f"/v1/episodes/{claim['episode_id']}/heartbeat"
            assert (await world.admin("POST", path)).json() == {"lease_s": 1.0}
    assert answer.choices[0].message.content == "yes"


async def test_a_retired_group_is_gone_for_its_agents(model: Path) -> None:
    async def never(asked: Asked) -> str:
        await asyncio.sleep(30)
        return "late"

    async with running(log_store(), configuration_of(model), never) as (world, lanes):
        claim = await world.episode()
        client = world.client(claim)
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HELLO))
        await lanes[0].has_seen(1)
        await world.retire(claim["group_id"])
        with pytest.raises(openai.APIStatusError) as caught:
            await asking
        finish = await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        view = (await world.admin("GET", f"/v1/groups/{claim['group_id']}")).json()
        cancelled = await world.records(topics.CANCELLED_COMPLETIONS)
    assert caught.value.status_code == 410
    assert finish.status_code == 410
    assert (view["state"], view["retire_reason"]) == ("retired", "zero_variance")
    assert len(cancelled) == 1


async def test_unknown_things_are_404(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        answers = [
            await world.admin("GET", "/v1/groups/g-0"),
            await world.admin("POST", "/v1/groups/g-0/claim", {}),
            await world.admin("POST", "/v1/episodes/abc/heartbeat"),
            await world.admin("POST", "/v1/episodes/g-0.0.0/finish", {}),
            await world.admin("GET", "/v1/nothing"),
        ]
    assert {answer.status_code for answer in answers} == {404}


async def test_over_the_memory_limit_new_work_is_refused(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes, memory_bytes_max=1500) as (
        world,
        _,
    ):
        claim = await world.episode()
        client = world.client(claim)

        async def ask_on() -> None:
            while True:
                await client.chat.completions.create(model="m", messages=HELLO)

        with pytest.raises(openai.InternalServerError) as caught:
            await asyncio.wait_for(ask_on(), timeout=30)  # Held bytes are counted at each tick.
        other = {**GROUP, "idempotency_key": "x"}
        group = await world.admin("POST", "/v1/groups", other)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"
    assert group.status_code == 429
    assert "fill the gateway's memory" in group.text
