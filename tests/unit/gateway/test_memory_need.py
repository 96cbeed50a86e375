"""A memory limit that the run's histories may not fit in is named with the numbers."""

import io
import json
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.memory_need import TOKEN_BYTES, memory_shortage
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running

EPISODES, CONTEXT = 256 * 16, 200_000
NEEDED_BYTES = EPISODES * CONTEXT * TOKEN_BYTES


@pytest.mark.parametrize(("limit", "is_short"), [(NEEDED_BYTES - 1, True), (NEEDED_BYTES, False)])
def test_histories_that_may_not_fit_are_named_with_the_numbers(limit: int, is_short: bool) -> None:
    configuration = configuration_of(Path("m"), context_tokens_max=CONTEXT)
    queue = msgspec.structs.replace(configuration.queues[0], slots=256, group_size=16)
    configuration = msgspec.structs.replace(configuration, queues=(queue,))
    said = memory_shortage(configuration, memory_bytes_max=limit)
    assert bool(said) == is_short
    if is_short:
        assert "N x G = 4096 episodes (shop: 256 x 16), which take 13.1 GB" in said
        assert "context_tokens_max = 200000 tokens" in said
        assert "FORGEMQ_GATEWAY_MEMORY_BYTES_MAX is 13.1 GB" in said


@pytest.mark.parametrize(("limit", "events"), [(1_000_000, 0), (200_000, 1)])
async def test_a_start_says_that_the_memory_may_be_too_small_and_serves(
    model: Path, limit: int, events: int
) -> None:
    """Four slots of two episodes of 4,096 tokens: 524,288 bytes."""
    lines = io.StringIO()
    log = MemoryLog(run="r", clock_ms=wall_ms)
    async with running(
        log.open,
        configuration_of(model),
        lambda _: "yes",
        memory_bytes_max=limit,
        telemetry=Telemetry(service="gateway", stream=lines),
    ) as (world, _):
        assert (await world.episode())["key"]
    found = [json.loads(line)["event"] for line in lines.getvalue().splitlines()]
    assert found.count("small_memory") == events
