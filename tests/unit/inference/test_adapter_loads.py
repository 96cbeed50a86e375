"""Adapters that are published, into a stand-in engine that serves adapters."""

import asyncio
from pathlib import Path

from aiohttp import web
from stand_in_answers import Speed
from stand_in_engine import StandInEngine

from tests.lane_scene import name_of
from tests.unit.inference.test_weight_loads import serving_scene

FOLLOWED = "followed"


class AdapterEngine(StandInEngine):
    """Notes what is asked while it is paused, as `sglang_cpu` answers it.

    Attributes:
        names: Of its weights and of what it was asked, in order.
        held: Folders by adapter.
    """

    def __init__(self, *, follows: bool = True, held: tuple[str, ...] = ()) -> None:
        super().__init__(Speed())
        self.names: list[str] = []
        self.held = dict.fromkeys(held, "left")
        self._follows = follows

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes(
            [
                web.post("/load_lora_adapter", self._load_adapter),
                web.post("/unload_lora_adapter", self._unload_adapter),
            ]
        )
        return app

    async def _rename(self, http: web.Request) -> web.Response:
        renamed = await super()._rename(http)
        self.names.append(self.weight_version)
        return renamed

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        name, folder = body["lora_name"], body["lora_path"]
        assert not self._running.is_set()
        if name in self.held:
            refusal = {"success": False, "error_message": f"{name} is already loaded"}
            return web.json_response(refusal, status=400)
        self.held[name] = folder
        self.names.append(f"load {name}")
        followed = {FOLLOWED: name} if self._follows else {}
        return web.json_response({"success": True, "loaded_adapters": self.held | followed})

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        if self.held.pop(name, None) is None:
            return web.json_response({"success": False}, status=400)
        self.names.append(f"unload {name}")
        return web.json_response({"success": True, "loaded_adapters": self.held})


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


async def test_a_newer_adapter_replaces_the_one_before_it_inside_the_pause(
    base: Path, tmp_path: Path
) -> None:
    engine = AdapterEngine()
    first, second = adapter(tmp_path / "a", b"1"), adapter(tmp_path / "b", b"2")
    async with serving_scene(base, engine) as scene:
        await scene.publish(first, version=1)
        await scene.loaded(count=2)
        await scene.publish(second, version=2)
        *_, loaded = await scene.loaded(count=3)
    assert (loaded.version, loaded.path, loaded.paused_s > 0) == (2, "durable", True)
    assert engine.held == {"1.2": str(second)}
    assert engine.names == [
        *("broken", "load 1.1", name_of(first, version=1)),
        *("broken", "load 1.2", "unload 1.1", name_of(second, version=2)),
    ]


async def test_an_adapter_that_an_attempt_left_in_the_engine_is_loaded_anew(
    base: Path, tmp_path: Path
) -> None:
    engine = AdapterEngine(held=("1.1", "of-somebody-else"))
    folder = adapter(tmp_path / "a", b"1")
    async with serving_scene(base, engine) as scene:
        await scene.publish(folder, version=1)
        await scene.loaded(count=2)
    assert engine.held == {"of-somebody-else": "left", "1.1": str(folder)}
    assert engine.names == ["broken", "unload 1.1", "load 1.1", name_of(folder, version=1)]


async def test_an_engine_whose_requests_keep_their_adapter_is_refused_and_stays_paused(
    base: Path, tmp_path: Path
) -> None:
    """Its tokens would be sampled by another version than the record says."""
    engine = AdapterEngine(follows=False)
    async with serving_scene(base, engine, load_attempts_max=100) as scene:
        await scene.publish(adapter(tmp_path / "a", b"1"), version=1)
        await asyncio.wait_for(scene.until_event("load_failed"), timeout=10)
        (failed, *_) = scene.events_named("load_failed")
        assert not engine._running.is_set()
        assert engine.weight_version == "broken"
    assert "must be started by python -m forgemq_sglang_cpu" in failed["error"]
