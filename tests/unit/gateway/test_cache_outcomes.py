"""What is counted of an engine's cache, beside what was expected of it."""

from pathlib import Path
from typing import Any

import msgspec

from forgemq_contracts import topics
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.core.replies import Reply
from tests.metered import counted, metered
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.test_chat import log_store
from tests.unit.gateway.test_held_and_leased import admitted, finished, opened
from tests.unit.gateway.world import configuration_of, running


async def test_an_update_after_the_choice_of_a_lane_breaks_no_expectation(model: Path) -> None:
    telemetry, held = metered("gateway")

    def answer(asked: Asked) -> str:
        if asked.record.turn.sequence == 2:
            lane.version = 1  # The gateway has not heard of it, and sent this one to version 0.
        return "yes"

    async with running(log_store(), configuration_of(model), answer, telemetry=telemetry) as (
        world,
        (lane,),
    ):
        chat = world.client(await world.episode()).chat.completions
        messages: list[Any] = []
        for text in ("one", "two", "three"):
            messages.append({"role": "user", "content": text})
            reply = (await chat.create(model="m", messages=messages)).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
        done = await world.records(topics.FINISHED_COMPLETIONS)
        outcomes = counted(held(), "gateway.cache_outcomes", by="outcome")
    assert [record.spans[0].version for record in done] == [0, 0, 1]
    # The lane says that it had nothing, which is right for the first turn alone.
    assert outcomes == {"as_expected": 1, "fewer": 1, "other_weights": 1}


def test_a_completion_was_taken_before_its_queue_and_its_engine() -> None:
    registry = Registry()
    registry.apply_admitted_group(admitted(0))
    registry.apply_opened_episode(opened(0, 0, attempt=0), lease_until_s=10.0)
    episode = registry.episode("g-0.0.0")
    assert episode is not None
    record = msgspec.structs.replace(finished(episode, 1), queued_s=1.5, engine_s=0.25)
    result = registry.apply_finished_completion(
        record, offset=1, finished_ms=5000, parse=lambda *_: Reply()
    )
    assert result is not None
    assert result.completion is not None
    assert (result.completion.taken_ms, result.completion.finished_ms) == (3250, 5000)
