"""The stand-in engine when a function decides what it says."""

from typing import Any

import aiohttp
import msgspec
import pytest
from stand_in_answers import Generation, Speed
from stand_in_engine import StandInEngine, serving


@pytest.mark.parametrize(
    ("stop", "most", "reason"),
    [
        ("", 10, {"type": "stop", "matched": 9}),
        ("END", 10, {"type": "stop", "matched": "END"}),
        ("", 3, {"type": "length", "length": 3}),
    ],
)
async def test_an_engine_says_what_a_function_makes_of_the_context_and_why_it_ends(
    stop: str, most: int, reason: dict[str, Any]
) -> None:
    asked: list[Generation] = []

    async def decide(body: Generation) -> tuple[list[int], str]:
        asked.append(body)
        return [7, 8, 9], body.sampling_params.stop[0]

    sampling = {"max_new_tokens": most, "stop": [stop]}
    body = {"rid": "a.0.1", "input_ids": [1, 2, 3], "sampling_params": sampling}
    engine = StandInEngine(Speed(), answer=decide)
    async with (
        serving(engine) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json=body) as response,
    ):
        said = await response.json()
    (seen,) = asked
    assert (seen.rid, msgspec.json.decode(seen.input_ids)) == ("a.0.1", [1, 2, 3])
    assert said["output_ids"] == [7, 8, 9]
    assert said["meta_info"]["finish_reason"] == reason
    assert said["meta_info"]["output_token_logprobs"] == [[-0.5, each, None] for each in (7, 8, 9)]
