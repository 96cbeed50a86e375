"""A server with SGLang's interface and a fixed speed, for load tests and tests without a model.

It answers every context with tokens that are a function of the context, after a fixed time; pauses
do not count. It refuses what it cannot do, as SGLang does: it forms no process groups, unless
`pretends_groups` is set. `tests/integration/test_inference_stand_in.py` compares it with a
real engine.

    python loadtests/stand_in_engine.py --port 31000 --latency-s 0.5 --tokens 64
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from stand_in_answers import (
    SLICE_S_MIN,
    Context,
    Generation,
    Speed,
    context_of,
    sampled_after,
)

NOT_BEGUN = (
    "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
)

Tell: TypeAlias = Callable[[list[int]], Awaitable[None]]
# Output ids, and the stop string that ended them or "".
Answer: TypeAlias = Callable[[Generation], Awaitable[tuple[list[int], str]]]

_GENERATION = msgspec.json.Decoder(Generation)


class _Request:
    """A request that is being answered."""

    def __init__(self, rid: str, context: Context, body: Generation) -> None:
        self.rid, self.context, self.body = rid, context, body
        self.aborted = asyncio.Event()
        self.retractions = 0


class StandInEngine:
    """The engine's state and its HTTP endpoints."""

    def __init__(
        self, speed: Speed, *, weight_version: str = "0.0", answer: Answer | None = None
    ) -> None:
        """Start idle, not paused; `answer` decides the tokens, else the context does."""
        self.speed, self._decide = speed, answer
        self.weight_version, self.model_path = weight_version, "stand-in"
        self.received: list[Mapping[str, Any]] = []
        self._requests: dict[str, _Request] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._is_updating, self._count = False, 0
        self.groups: set[str] = set()

    @property
    def open_count(self) -> int:
        """Generations that are not answered yet."""
        return len(self._requests)

    def app(self) -> web.Application:
        """The web application with SGLang's endpoints."""
        app = web.Application(client_max_size=256 * 2**20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weight_version", self._rename),
                web.post("/begin_weight_update", self._begin),
                web.post("/end_weight_update", self._end),
                web.post("/init_weights_update_group", self._join),
                web.post("/destroy_weights_update_group", self._leave),
                web.post("/update_weights_from_distributed", self._receive),
                web.post("/update_weights_from_disk", self._load),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info = {"weight_version": self.weight_version, "model_path": self.model_path}
        return web.json_response(info)

    async def _server_info(self, _: web.Request) -> web.Response:
        tokens_max = self.speed.context_tokens_max
        return web.json_response(
            {
                "max_total_num_tokens": tokens_max * 64,
                "max_req_input_len": tokens_max - 6,
                "context_length": tokens_max,
                "tp_size": 1,
                "version": "stand-in",
            }
        )

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = _GENERATION.decode(await http.read())
        context = context_of(body.input_ids)
        if not context.tokens:
            return _refused("input_ids cannot be empty.")
        if context.tokens + body.sampling_params.max_new_tokens > self.speed.context_tokens_max:
            return _refused("Requested token count exceeds the model's maximum context length")
        self._count += 1
        request = _Request(body.rid or f"stand-in-{self._count}", context, body)
        self._requests[request.rid] = request
        try:
            if body.stream:
                return await self._streamed(http, request)
            answer = await self._answer(request)
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
        finally:
            self._requests.pop(request.rid, None)

    async def _streamed(self, http: web.Request, request: _Request) -> web.StreamResponse:
        """An event for each slice with all tokens so far; the last one is the whole answer."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)

        async def tell(output_ids: list[int]) -> None:
            progress = {"output_ids": output_ids, "meta_info": {"finish_reason": None}}
            await response.write(b"data: " + msgspec.json.encode(progress) + b"\n\n")

        answer = await self._answer(request, tell=tell)
        await response.write(b"data: " + msgspec.json.encode(answer) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _answer(self, request: _Request, *, tell: Tell | None = None) -> dict[str, Any]:
        asked, stop = request.body.sampling_params.max_new_tokens, ""
        count = min(self.speed.tokens, asked)
        tokens, logprobs = sampled_after(request.context, count=count, speed=self.speed)
        if self._decide is not None:
            tokens, stop = await self._decide(request.body)
            count, logprobs = len(tokens), [-0.5] * len(tokens)
        spans: list[dict[str, Any]] = []
        slices = max(1, min(self.speed.slices, count, int(self.speed.latency_s / SLICE_S_MIN)))
        done = 0
        # Added up, and not slept one by one: each sleep ends up to two milliseconds late.
        at_s = asyncio.get_running_loop().time()
        for index in range(slices):
            at_s = await self._pass(request, at_s, self.speed.latency_s / slices)
            if request.aborted.is_set():
                break
            upto = count * (index + 1) // slices
            if spans and spans[-1]["version"] == self.weight_version:
                spans[-1]["end"] = upto
            elif upto > done:
                spans.append({"version": self.weight_version, "start": done, "end": upto})
            done = upto
            if tell is not None:
                await tell(tokens[:done])
        reason: dict[str, Any] = {"type": "length", "length": count}
        if request.aborted.is_set():
            reason = {"type": "abort", "message": "Abort in stand-in"}
        elif count < asked:
            reason = {"type": "stop", "matched": stop or tokens[-1]}
        return {
            "text": "",
            "output_ids": tokens[:done],
            "meta_info": {
                "id": request.rid,
                "finish_reason": reason,
                "prompt_tokens": request.context.tokens,
                "completion_tokens": done,
                "cached_tokens": 0,
                "num_retractions": request.retractions,
                "queue_time": 0.0,
                "weight_version": self.weight_version,
                "weight_versions": spans,
                "input_token_logprobs": [],
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(logprobs[:done], tokens[:done], strict=True)
                ],
            },
        }

    async def _pass(self, request: _Request, at_s: float, duration_s: float) -> float:
        """Wait until this much unpaused time has passed or the request is aborted.

        Returns:
            When that was, in the event loop's time; `at_s` is when the time before it was over.
        """
        at_s = await self._unpaused(request, at_s) + duration_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(at_s):
                await request.aborted.wait()
        return await self._unpaused(request, at_s)

    async def _unpaused(self, request: _Request, at_s: float) -> float:
        """Wait for the end of a pause or an abort; returns `at_s` if there is no pause."""
        if self._running.is_set() or request.aborted.is_set():
            return at_s
        waits = [
            asyncio.ensure_future(request.aborted.wait()),
            asyncio.ensure_future(self._running.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return asyncio.get_running_loop().time()

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        for rid, request in self._requests.items():
            if body.get("abort_all") or rid == body.get("rid"):
                request.aborted.set()
        return web.Response()

    async def _pause(self, _: web.Request) -> web.Response:
        if self._running.is_set():
            for request in self._requests.values():
                request.retractions += 1
        self._running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "ok"})

    async def _rename(self, http: web.Request) -> web.Response:
        self.weight_version = (await http.json())["new_version"]
        return _done()

    async def _begin(self, _: web.Request) -> web.Response:
        if self._is_updating:
            return _failed("a weight-update session is already open")
        self._is_updating = True
        return _done()

    async def _end(self, _: web.Request) -> web.Response:
        if not self._is_updating:
            return _failed("no weight-update session is open; call begin_weight_update() first")
        self._is_updating = False
        return _done()

    async def _join(self, http: web.Request) -> web.Response:
        if not self.speed.pretends_groups:
            return _failed("Failed to initialize custom process group: a stand-in has none.")
        self.groups.add((await http.json())["group_name"])
        return _done()

    async def _leave(self, http: web.Request) -> web.Response:
        name = (await http.json())["group_name"]
        if name not in self.groups:
            return _failed("The group to be destroyed does not exist.")
        self.groups.remove(name)
        return _done()

    async def _receive(self, http: web.Request) -> web.Response:
        body = await http.json()
        if not self._is_updating:
            return _failed(NOT_BEGUN)
        if body["group_name"] not in self.groups:
            return _failed(f"Failed to receive weights: no group {body['group_name']}")
        self.received.append(body)
        self.weight_version = body.get("weight_version") or self.weight_version
        return _done()

    async def _load(self, http: web.Request) -> web.Response:
        body = await http.json()
        if not await asyncio.to_thread((Path(body["model_path"]) / "model.safetensors").is_file):
            return _failed("Failed to get weights iterator")
        self.weight_version, self.model_path = body["weight_version"], body["model_path"]
        return _done()


@asynccontextmanager
async def serving(engine: StandInEngine, *, port: int = 0) -> AsyncIterator[str]:
    """Serve the engine on a TCP port of this machine; yields its URL."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _done() -> web.Response:
    return web.json_response({"success": True, "message": "Success"})


def _failed(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-s", type=float, default=Speed().latency_s)
    parser.add_argument("--tokens", type=int, default=Speed().tokens)
    parser.add_argument("--vocabulary-size", type=int, default=Speed().vocabulary_size)
    parser.add_argument("--context-tokens-max", type=int, default=Speed().context_tokens_max)
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    async with serving(StandInEngine(Speed(**arguments)), port=port) as url:
        print(f"stand-in engine at {url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main())
