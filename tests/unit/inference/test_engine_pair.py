"""Two servers as one engine: in which order they are asked, and what a failure of one means."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from forgemq_contracts.engine_report import ModelInfo
from forgemq_inference import engine_pair
from forgemq_inference.engine import (
    BucketPlace,
    Engine,
    EngineError,
    EngineRefusedError,
    ServerInfo,
)
from forgemq_inference.engine_pair import EnginePair, check_pair, room_of

BODY = {"rid": "r1.0.1", "input_ids": [5, 6, 7]}
PREFILL = ServerInfo(100, 90, tp_size=2, disaggregation_mode="prefill")
DECODE = ServerInfo(200, 80, context_length=64, tp_size=4, disaggregation_mode="decode")


@dataclass
class Half:
    """An HTTP server that answers as one engine of a pair does, and notes what it was asked."""

    role: str
    calls: list[str]
    weight_version: str = "0.0"
    finish: str = "length"
    busy_flushes: int = 0
    refuses: bool = False
    model_path: str = "/model"
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    processes: int = 1
    infos: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/server_info":
            self.infos += 1
            info = {"max_total_num_tokens": 100, "max_req_input_len": 90, "tp_size": self.processes}
            role = {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": 8998}
            return web.json_response(info | role)
        if path == "/model_info":
            return web.json_response(
                {"weight_version": self.weight_version, "model_path": self.model_path}
            )
        self.calls.append(f"{self.role} {path}")
        if path == "/flush_cache" and self.busy_flushes:
            self.busy_flushes -= 1
            return web.Response(status=400)
        if path == "/generate":
            return await self._generated(await request.json())
        if path == "/update_weights_from_tensor":
            self.bodies.append(await request.json())
        return web.json_response({"success": True})

    async def _generated(self, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        await self.may_answer.wait()
        if self.refuses:
            return web.Response(status=500, text="lost connection")
        meta = {"finish_reason": {"type": self.finish}, "weight_version": self.weight_version}
        ids = [9] if self.role == "prefill" else [9, 10]
        return web.json_response({"output_ids": ids, "meta_info": meta})


@dataclass
class Scene:
    prefill: Half
    decode: Half
    pair: EnginePair
    calls: list[str]

    async def until_called(self, *calls: str) -> None:
        while True:
            if set(calls) <= set(self.calls):
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    calls: list[str] = []
    halves = [Half(role, calls) for role in ("prefill", "decode")]
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Engine(await _served(half, stack))) for half in halves
        ]
        pair = EnginePair(prefill=engines[0], decode=engines[1])
        await pair.server_info()
        for half in halves:
            half.may_answer.set()
        yield Scene(*halves, pair=pair, calls=calls)


async def _served(half: Half, stack: AsyncExitStack) -> str:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", half.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_both_get_the_request_under_one_room_and_decode_answers() -> None:
    async with scene() as given:
        answer = await given.pair.generate({**BODY, "stream": True}, timeout_s=5)
    assert answer.output_ids == [9, 10]
    (read,), (sampled,) = given.prefill.bodies, given.decode.bodies
    assert (read["stream"], sampled["stream"]) == (False, True)
    for body in (read, sampled):
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert body["bootstrap_room"] == room_of("r1.0.1")
    # SGLang keeps it in 64 bits, which are signed on some devices.
    assert all(0 <= room_of(f"r{number}") < 2**63 for number in range(64))
    assert room_of("r1.0.1") != room_of("r1.1.1")


async def test_tokens_from_a_context_that_prefill_aborted_are_no_answer() -> None:
    async with scene() as given:
        given.prefill.finish = "abort"
        answer = await given.pair.generate(BODY, timeout_s=5)
    assert (answer.meta_info.finish_reason.type, answer.output_ids) == ("abort", [9])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_failure_of_either_fails_the_request_and_aborts_it_on_both(role: str) -> None:
    async with scene() as given:
        failing = given.prefill if role == "prefill" else given.decode
        other = given.decode if role == "prefill" else given.prefill
        failing.refuses = True
        other.may_answer.clear()
        with pytest.raises(EngineRefusedError, match="lost connection"):
            await given.pair.generate(BODY, timeout_s=5)
        other.may_answer.set()
    assert given.calls[-2:] == ["decode /abort_request", "prefill /abort_request"]


async def test_a_pause_waits_for_prefill_and_holds_later_requests_until_the_end() -> None:
    async with scene() as given:
        given.prefill.may_answer.clear()
        first = asyncio.create_task(given.pair.generate(BODY, timeout_s=5))
        await given.until_called("prefill /generate", "decode /generate")
        del given.calls[:]
        pause = asyncio.create_task(given.pair.pause(timeout_s=5))
        await asyncio.sleep(0.1)
        later = asyncio.create_task(given.pair.generate({**BODY, "rid": "r2"}, timeout_s=5))
        await asyncio.sleep(0.1)
        assert given.calls == []
        given.prefill.may_answer.set()
        await first
        await pause
        assert given.calls == [
            "prefill /flush_cache",
            *("prefill /pause_generation", "decode /pause_generation"),
            "decode /flush_cache",
        ]
        del given.calls[:]
        await given.pair.resume(timeout_s=5)
        await later
        assert given.calls[:2] == ["decode /continue_generation", "prefill /continue_generation"]


async def test_what_is_on_its_way_in_a_pause_is_aborted_and_the_pause_begins_again() -> None:
    async with scene() as given:
        given.decode.busy_flushes = 1
        await given.pair.pause(timeout_s=5)
        assert given.calls[-2:] == ["prefill /pause_generation", "decode /pause_generation"]
        assert given.calls.count("decode /abort_request") == 1
        del given.calls[:]
        given.decode.busy_flushes = 2
        with pytest.raises(EngineRefusedError, match="/flush_cache"):
            await given.pair.pause(timeout_s=5)


async def test_a_context_that_is_not_read_in_time_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_pair, "_HANDOVER_TIMEOUT_S", 0.1)
    async with scene() as given:
        given.prefill.may_answer.clear()
        call = asyncio.create_task(given.pair.generate(BODY, timeout_s=1))
        await given.until_called("prefill /generate", "decode /generate")
        del given.calls[:]
        await given.pair.pause(timeout_s=5)
        assert given.calls[:2] == ["decode /abort_request", "prefill /abort_request"]
        with pytest.raises(EngineError):
            await call
        given.prefill.may_answer.set()


async def test_a_request_that_waits_for_a_pause_keeps_its_deadline() -> None:
    async with scene() as given:
        await given.pair.pause(timeout_s=5)
        with pytest.raises(EngineError, match="paused for more than 0 s"):
            await given.pair.generate(BODY, timeout_s=0.1)


@pytest.mark.slow
async def test_a_deadline_that_passes_while_a_pause_ends_is_no_endless_one() -> None:
    """On a busy loop the end of the pause and the deadline are seen at the same moment."""
    async with scene() as given:
        await given.pair.pause(timeout_s=5)
        given.prefill.may_answer.clear()
        given.decode.may_answer.clear()
        asked = asyncio.create_task(given.pair.generate(BODY, timeout_s=1.0))
        await asyncio.sleep(0)
        await given.pair.resume(timeout_s=5)
        time.sleep(1.1)  # noqa: ASYNC251 - the loop is busy until after the deadline
        with pytest.raises(EngineError):
            await asyncio.wait_for(asked, 10)


async def test_weights_that_differ_are_broken() -> None:
    async with scene() as given:
        assert (await given.pair.model_info()).weight_version == "0.0"
        given.prefill.weight_version = "1.3"
        assert (await given.pair.model_info()).weight_version == "broken"


async def test_a_pair_of_two_folders_says_of_no_folder_that_it_has_read_it() -> None:
    async with scene() as given:
        assert await given.pair.model_info() == ModelInfo("0.0", model_path="/model")
        given.prefill.model_path = "/other"
        assert await given.pair.model_info() == ModelInfo("0.0")


async def test_a_draft_head_is_loaded_by_every_process_of_both_which_are_asked_for_once() -> None:
    async with scene() as given:
        given.prefill.processes, given.decode.processes = 2, 4
        given.prefill.infos = given.decode.infos = 0
        load = await given.pair.tensor_load(timeout_s=5)
        for final_name in (None, None, "1.1"):
            await load(b"tensors", BucketPlace(selector="draft", final_name=final_name))
    for half in (given.prefill, given.decode):
        copies = [len(body["serialized_named_tensors"]) for body in half.bodies]
        names = [body.get("weight_version") for body in half.bodies]
        assert (half.infos, copies, names) == (1, [half.processes] * 3, [None, None, "1.1"])


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (DECODE, DECODE, "^the prefill engine .* --disaggregation-mode decode, it must be prefill"),
        (PREFILL, ServerInfo(1, 1), "^the decode engine .* --disaggregation-mode None"),
        (
            ServerInfo(1, 1, disaggregation_mode="prefill", enable_return_routed_experts=True),
            DECODE,
            "^the prefill engine was started with --enable-return-routed-experts",
        ),
        (
            ServerInfo(1, 1, disaggregation_mode="prefill", quantization="fp8"),
            DECODE,
            "^prefill and decode engine must have the same --quantization, got fp8 and None$",
        ),
        (
            PREFILL,
            ServerInfo(1, 1, disaggregation_mode="decode", speculative_algorithm="EAGLE"),
            "^prefill and decode engine must have the same --speculative-algorithm, got None and E",
        ),
        (
            PREFILL,
            ServerInfo(1, 1, disaggregation_mode="decode", hicache_storage_backend="file"),
            "^the decode engine was started with --hicache-storage-backend file: prefill reads",
        ),
    ],
)
def test_servers_that_are_no_pair_are_refused(
    prefill: ServerInfo, decode: ServerInfo, message: str
) -> None:
    check_pair(PREFILL, DECODE)
    with pytest.raises(EngineRefusedError, match=message):
        check_pair(prefill, decode)
