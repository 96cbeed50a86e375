"""Sampling and context limit of a domain, as its episodes have them at the gateway."""

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.domain_settings import DomainSampling
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
