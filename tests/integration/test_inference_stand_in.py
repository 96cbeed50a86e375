"""The stand-in engine answers like the real one: same shapes, same refusals, same order."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONTEXT = [10, 20, 30]


class Conversation:
    """Sends the same requests to either engine and keeps what must be equal."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: Path) -> None:
        self._session = session
        self._url = url
        self._model = str(model)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(self._url + path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else None

    async def generate(self, rid: str, tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"rid": rid, "input_ids": CONTEXT, "return_logprob": True}
        status, answer = await self.post("/generate", {**body, "sampling_params": sampling})
        assert status == 200
        return answer  # type: ignore[no-any-return]

    async def refusals(self) -> list[tuple[str, int]]:
        """Status of requests that SGLang refuses, and of those around them that it takes."""
        disk = {"model_path": self._model, "weight_version": "5.1", "flush_cache": True}
        group = {"group_name": "none"}
        received = {"names": [], "dtypes": [], "shapes": [], "group_name": "none"}
        asked = [
            ("/generate", {"input_ids": [], "sampling_params": {"max_new_tokens": 1}}),
            ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 10**6}}),
            ("/end_weight_update", {}),
            ("/update_weights_from_distributed", received),
            ("/begin_weight_update", {}),
            ("/begin_weight_update", {}),
            ("/update_weights_from_distributed", received),
            ("/end_weight_update", {}),
            ("/destroy_weights_update_group", group),
            ("/update_weights_from_disk", {**disk, "model_path": "/nonexistent"}),
            ("/pause_generation", {"mode": "retract"}),
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", disk),
            ("/continue_generation", {}),
            ("/continue_generation", {}),
            ("/update_weight_version", {"new_version": "5.2", "abort_all_requests": False}),
            ("/abort_request", {"rid": "nobody"}),
            ("/abort_request", {"abort_all": True}),
        ]
        return [(path, (await self.post(path, body))[0]) for path, body in asked]

    async def in_flight(self) -> tuple[list[str], int, str]:
        """Spans' versions, retractions and reason of a request across a pause and an update."""
        running = asyncio.ensure_future(self.generate("across", 400))
        await asyncio.sleep(0.25)
        await self.post("/pause_generation", {"mode": "retract"})
        disk = {"model_path": self._model, "weight_version": "6.1", "flush_cache": True}
        await self.post("/update_weights_from_disk", disk)
        await asyncio.sleep(0.3)
        assert not running.done()
        await self.post("/continue_generation", {})
        meta = (await running)["meta_info"]
        spans = meta["weight_versions"]
        assert [spans[0]["start"], spans[-1]["end"]] == [0, 400]
        assert spans[0]["end"] == spans[1]["start"]
        return (
            [span["version"] for span in spans],
            meta["num_retractions"],
            meta["finish_reason"]["type"],
        )

    async def aborted(self) -> tuple[str, bool]:
        """Reason of an aborted request, and whether its tokens came back."""
        running = asyncio.ensure_future(self.generate("gone", 900))
        await asyncio.sleep(0.25)
        await self.post("/abort_request", {"rid": "gone"})
        answer = await running
        return answer["meta_info"]["finish_reason"]["type"], 0 < len(answer["output_ids"]) < 900


def shape(value: Any) -> Any:
    """Types of a JSON value; lists by their first element."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def is_part_of(part: Any, whole: Any) -> bool:
    """Whether all keys of `part` are in `whole` with the same types."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and is_part_of(inner, whole[key]) for key, inner in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(map(is_part_of, part, whole))
    return bool(part == whole)


async def test_the_stand_in_answers_refuses_pauses_and_aborts_like_the_real_engine(
    base_engine_url: str, engine_model: Path
) -> None:
    speed = Speed(latency_s=1.0, tokens=1000, slices=50, context_tokens_max=1024)
    async with serving(StandInEngine(speed)) as url, aiohttp.ClientSession() as session:
        real = Conversation(session, base_engine_url, engine_model)
        stand_in = Conversation(session, url, engine_model)
        assert is_part_of(
            shape(await stand_in.generate("a", 4)), shape(await real.generate("a", 4))
        )
        assert await stand_in.refusals() == await real.refusals()
        assert await stand_in.in_flight() == await real.in_flight() == (["5.2", "6.1"], 1, "length")
        assert await stand_in.aborted() == await real.aborted() == ("abort", True)
        for path in ("/model_info", "/server_info"):
            async with (
                session.get(url + path) as ours,
                session.get(base_engine_url + path) as real_,
            ):
                ours_shape, real_shape = shape(await ours.json()), shape(await real_.json())
            real_shape["context_length"] = "int"  # null if the model's own length holds
            assert is_part_of(ours_shape, real_shape)
