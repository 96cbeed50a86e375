"""Callers of live keys whose requests name the reply that they go on with."""

from pathlib import Path
from typing import Any

from tests.unit.gateway.test_live import KEY, live


async def test_a_response_goes_on_in_the_episode_of_the_reply_that_it_names(model: Path) -> None:
    """Two conversations are the same so far; the older one goes on, with other instructions too."""
    async with live(model) as caller:
        client = caller.world.client({"key": KEY, "base_url": f"{caller.world.base_url}/v1"})

        async def ask(**fields: Any) -> tuple[str, str]:
            raw = await client.responses.with_raw_response.create(model="m", **fields)
            return raw.headers["x-forgemq-episode"], raw.parse().id

        first, response = await ask(input="hi", instructions="be kind")
        second, _ = await ask(input="hi", instructions="be kind")
        after, later = await ask(input="more", previous_response_id=response)
        other, _ = await ask(input="on", previous_response_id=later, instructions="be brief")
    assert first != second
    assert (after, other) == (first, first)
