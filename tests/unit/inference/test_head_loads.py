"""A draft head's durable copy into a stand-in engine, bucket by bucket."""

from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import save_file
from stand_in_answers import Speed
from stand_in_engine import StandInEngine

from tests.unit.inference.test_weight_loads import serving_scene


class GuessingEngine(StandInEngine):
    """Notes what it is asked, and takes tensors that a request holds.

    Attributes:
        asked: Paths, in order.
        taken: The requests with tensors.
    """

    def __init__(self) -> None:
        super().__init__(Speed())
        self.asked: list[str] = []
        self.taken: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/update_weights_from_tensor", self._take)

        @web.middleware
        async def noted(http: web.Request, handler: Any) -> web.StreamResponse:
            self.asked.append(http.path)
            answer: web.StreamResponse = await handler(http)
            return answer

        app.middlewares.append(noted)
        return app

    async def _take(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.taken.append(body)
        self.weight_version = body.get("weight_version") or self.weight_version
        return web.json_response({"success": True})


def head_of(folder: Path, *, buckets: int) -> Path:
    """A head whose tensors travel in so many buckets: 2 bytes before a float32 end each."""
    tensors = {}
    for number in range(buckets - 1):
        tensors[f"{number}.0"] = np.zeros(1, "f2")
        tensors[f"{number}.1"] = np.zeros(1, "f4")
    tensors["last"] = np.zeros(1, "f2")
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


async def test_an_engine_is_asked_for_its_processes_once_however_many_buckets_a_head_has(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    asked = []
    for buckets in (1, 2, 6):
        engine = GuessingEngine()
        head = head_of(tmp_path / f"head-{buckets}", buckets=buckets)
        async with serving_scene(base, engine) as scene:
            del engine.asked[:]
            await scene.publish(trained, version=1, head=head)
            await scene.loaded(count=2)
            asked.append(engine.asked.count("/server_info"))
        assert len(engine.taken) == buckets
        assert all(len(each["serialized_named_tensors"]) == 1 for each in engine.taken)
        names = [each.get("weight_version") for each in engine.taken]
        assert names == [*[None] * (buckets - 1), engine.weight_version]
    assert asked == [1, 1, 1]


async def test_a_lane_serves_after_an_answer_that_follows_its_abort_of_all(base: Path) -> None:
    """Groups of an engine's processes may take a request before an abort that came earlier."""
    engine = GuessingEngine()
    async with serving_scene(base, engine):
        began = engine.asked[:]
    aborted, resumed = began.index("/abort_request"), began.index("/continue_generation")
    assert "/server_info" in began[aborted:resumed]
