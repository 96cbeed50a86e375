"""Sampling and context limit of a domain, as its episodes have them at the gateway."""

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.domain_settings import DomainSampling
from forgemq_contracts.stages import Stage, StageDomain
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


async def test_episodes_are_sampled_and_limited_as_their_domain_says(model: Path) -> None:
    """The run has 4,096 tokens of context and answers of 200 at temperature 1."""
    run = configuration_of(model)
    (queue,) = run.queues
    own = msgspec.structs.replace(
        queue,
        context_tokens_max=300,
        sampling=DomainSampling(temperature=0.5, max_tokens=120, stop=("END",)),
    )
    configuration = msgspec.structs.replace(run, queues=(own,))
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, lambda _: "x") as (world, lanes):
        claim = await world.episode()
        chat = world.client(claim).chat.completions
        long: list[Any] = [{"role": "user", "content": "x " * 130}]
        await chat.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=500)
        await chat.create(model="m", messages=long, max_tokens=100)
        with pytest.raises(openai.BadRequestError) as caught:
            await chat.create(model="m", messages=[{"role": "user", "content": "x " * 400}])
        (opened,) = await world.records(topics.OPENED_EPISODES)
    first, second = (asked.record for asked in lanes[0].seen)
    assert caught.value.code == "context_length_exceeded"
    assert claim["temperature"] == 0.5
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 120)
    assert first.sampling.stop == ("END",)
    assert len(lanes[0].seen[1].context) + second.sampling.max_tokens == 300
    assert opened.context_tokens_max == 300


async def test_a_groups_own_temperature_goes_before_that_of_its_domain(model: Path) -> None:
    run = configuration_of(model)
    (queue,) = run.queues
    own = msgspec.structs.replace(queue, sampling=DomainSampling(temperature=0.5))
    configuration = msgspec.structs.replace(run, queues=(own,))
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, lambda _: "x") as (world, _):
        claim = await world.claim(await world.open_group(temperature=0.25))
    assert claim["temperature"] == 0.25


async def test_a_training_group_has_limit_and_sampling_of_its_stage(model: Path) -> None:
    """Without a word of its stage it has that of the step that trains next; evaluation has none."""
    run = configuration_of(model)
    (queue,) = run.queues
    later = StageDomain(
        domain=queue.domain,
        share=1.0,
        context_tokens_max=300,
        sampling=DomainSampling(temperature=0.5, max_tokens=120),
    )
    first = StageDomain(domain=queue.domain, share=1.0)
    stages = (Stage(from_step=0, domains=(first,)), Stage(from_step=2, domains=(later,)))
    configuration = msgspec.structs.replace(run, stages=stages)
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, lambda _: "x") as (world, _):
        for number, fields in enumerate(({}, {"stage": 1}, {"purpose": "eval"}, {"stage": 2})):
            body = {"domain": queue.domain, "idempotency_key": f"k{number}", "task": {}} | fields
            answer = await world.admin("POST", "/v1/groups", body)
            if answer.status_code == 200:
                await world.admit(answer.json()["group_id"])
                await world.claim(answer.json()["group_id"])
        opened = await world.records(topics.OPENED_EPISODES)
        requested = await world.records(topics.REQUESTED_GROUPS)
    opened.sort(key=lambda each: each.opened_ms)
    requested.sort(key=lambda each: each.idempotency_key)
    assert [each.stage for each in requested] == [0, 1, None]
    assert [each.context_tokens_max for each in opened] == [4096, 300, 4096]
    assert [each.sampling.max_tokens for each in opened] == [200, 120, 200]
    assert [each.sampling.temperature for each in opened] == [1.0, 0.5, 1.0]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "stage: the run has 2 stages, got 2"
