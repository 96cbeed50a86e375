"""What others' proxies cost for the same bytes: a pass-through with aiohttp, and LiteLLM's proxy.

    load --HTTP--> proxy --HTTP--> upstream

The upstream answers every request at once with a completion as long as those of the system under
load; if a stream is asked for, with one event a word, as an engine's server does. Neither proxy
tokenises, matches a history or writes anything down. LiteLLM comes from the package index, in its
newest version, into an environment of its own that is kept in .cache.
"""

import asyncio
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct
from pinning import cpu_s, measure_apart

from forgemq_settings.ports import free_port

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[1]
LITELLM = ROOT / ".cache" / "loadtests" / "litellm"
BODY_BYTES_MAX = 64 * 1024 * 1024
# LiteLLM loads a few hundred modules before it listens.
_START_TIMEOUT_S = 180.0
_WARM_UP_S = 3.0
_MEASURE_S = 12.0
_PATH = "/v1/chat/completions"


class Asked(Struct, frozen=True, kw_only=True):
    """What a proxy is asked, and with how many requests at once."""

    body: bytes
    reply: str
    clients: int


class Proxied(Struct, frozen=True, kw_only=True):
    """CPU time of a proxy's processes for each request, and requests a second."""

    cpu_ms: float
    per_second: float


class ProxiedRounds:
    """What a proxy's requests cost in each round."""

    def __init__(self) -> None:
        self.rounds: list[Proxied] = []

    @property
    def cpu_ms(self) -> float:
        """The median of the rounds."""
        return statistics.median(each.cpu_ms for each in self.rounds)

    @property
    def per_second(self) -> float:
        """The median of the rounds."""
        return statistics.median(each.per_second for each in self.rounds)

    def median_of(self, rounds_ms: Sequence[float]) -> float:
        """The median of costs over those of the same round; of a single cost over the median."""
        if len(rounds_ms) != len(self.rounds):
            return statistics.median(rounds_ms) / self.cpu_ms
        pairs = zip(rounds_ms, self.rounds, strict=True)
        return statistics.median(own_ms / each.cpu_ms for own_ms, each in pairs)


class Baselines:
    """What others' proxies cost for a body and an answer as long as ours, by proxy and form."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, ProxiedRounds]] = {kind: {} for kind in PROXIES}

    def has(self, form: str) -> bool:
        """Whether the proxies were asked in this form."""
        return all(form in by_form for by_form in self.costs.values())

    async def measure(self, asked: Asked, form: str) -> None:
        """Ask each proxy in one more round."""
        for kind, cost in PROXIES.items():
            self.costs[kind].setdefault(form, ProxiedRounds()).rounds.append(await cost(asked))


class Upstream:
    """Answers chat completions with a fixed text."""

    def __init__(self, reply: str) -> None:
        words = reply.split(" ")
        chunks = [_completion("chunk", {"delta": {"content": f"{word} "}}) for word in words]
        self._stream = b"".join(b"data: %s\n\n" % chunk for chunk in chunks) + b"data: [DONE]\n\n"
        self._whole = _completion("", {"message": {"role": "assistant", "content": reply}})

    async def answer(self, request: web.Request) -> web.Response:
        """Answer as a stream if the body asks for one."""
        body = msgspec.json.decode(await request.read())
        if body.get("stream"):
            return web.Response(body=self._stream, content_type="text/event-stream")
        return web.Response(body=self._whole, content_type="application/json")


def _completion(kind: str, choice: Mapping[str, object]) -> bytes:
    usage = {"prompt_tokens": 8000, "completion_tokens": 32, "total_tokens": 8032}
    return msgspec.json.encode(
        {
            "id": "chatcmpl-1",
            "object": ".".join(filter(None, ("chat.completion", kind))),
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "finish_reason": None if kind else "stop", **choice}],
            **({} if kind else {"usage": usage}),
        }
    )


class PassThrough:
    """Forwards each request and its answer as they come."""

    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session = session
        self._upstream = upstream

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward one request; the answer is written as it is read."""
        url = self._upstream + request.path_qs
        async with self._session.post(
            url, data=request.content, headers=_forwarded(request.headers)
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_forwarded(answer.headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    hop = ("host", "connection", "transfer-encoding")
    return {name: value for name, value in headers.items() if name.lower() not in hop}


async def _serve(role: str, given: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        passing = PassThrough(session, given)
        answer = Upstream(given).answer if role == "upstream" else passing.forward
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post(_PATH, answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


async def aiohttp_cost(asked: Asked) -> Proxied:
    """What a request through the pass-through costs."""
    async with upstream(asked.reply) as url, _own("proxy", url) as proxy:
        return await measured(asked, process=proxy[0], url=proxy[1], key="none")


async def litellm_cost(asked: Asked) -> Proxied:
    """What a request through LiteLLM's proxy costs, with one worker."""
    async with upstream(asked.reply) as answering:
        key = f"sk-{secrets.token_hex(16)}"
        async with _litellm(answering, key=key) as (process, url):
            return await measured(asked, process=process, url=url, key=key)


PROXIES = {"aiohttp": aiohttp_cost, "litellm": litellm_cost}


@asynccontextmanager
async def upstream(reply: str) -> AsyncIterator[str]:
    """A process that answers every request with this text at once; yields its URL."""
    async with _own("upstream", reply) as (_, url):
        yield url


async def measured(asked: Asked, *, process: int, url: str, key: str) -> Proxied:
    """Ask from the other cores, all the time; returns what the proxy's process used."""
    measure_apart(process)
    counts = [0]
    asking = asyncio.create_task(_ask_all(asked, url, key, counts))
    await asyncio.sleep(_WARM_UP_S)
    used_s, answered = cpu_s(process), counts[0]
    await asyncio.sleep(_MEASURE_S)
    used_s, answered = cpu_s(process) - used_s, counts[0] - answered
    if asking.done():
        asking.result()
    asking.cancel()
    await asyncio.wait([asking])
    return Proxied(cpu_ms=1000 * used_s / max(1, answered), per_second=answered / _MEASURE_S)


async def _ask_all(asked: Asked, url: str, key: str, counts: list[int]) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.post(url + _PATH, data=asked.body, headers=headers) as response:
                answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"a proxy: {response.status} {answer[:300]!r}")
            counts[0] += 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        for _ in range(asked.clients):
            tasks.create_task(ask(session))


@asynccontextmanager
async def _own(role: str, given: str) -> AsyncIterator[tuple[int, str]]:
    """Run this file in a role; yields its process id and its URL."""
    command = (sys.executable, str(Path(__file__)), role, given)
    async with _process(command, environ=os.environ, prints_port=True) as process:
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        yield process.pid, f"http://{HOST}:{port}"


@asynccontextmanager
async def _litellm(upstream: str, *, key: str) -> AsyncIterator[tuple[int, str]]:
    """Run LiteLLM's proxy for this upstream; yields its process id and its URL."""
    await asyncio.to_thread(install_litellm)
    port = free_port(HOST)
    config = LITELLM / "config.json"
    parameters = {"model": "openai/policy", "api_base": f"{upstream}/v1", "api_key": "none"}
    models = [{"model_name": "policy", "litellm_params": parameters}]
    config.write_bytes(msgspec.json.encode({"model_list": models}))
    options = ("--config", str(config), "--host", HOST, "--port", str(port), "--num_workers", "1")
    environ = {"PATH": os.environ["PATH"], "HOME": str(LITELLM), "LITELLM_MASTER_KEY": key}
    command = (str(LITELLM / "bin" / "litellm"), *options)
    async with _process(command, environ=environ) as process:
        await _until_live(f"http://{HOST}:{port}")
        yield process.pid, f"http://{HOST}:{port}"


def install_litellm() -> str:
    """Install LiteLLM's proxy unless that was done before; returns its version."""
    python = LITELLM / "bin" / "python"
    if not (LITELLM / "bin" / "litellm").exists():
        installer = str(Path(sys.executable).with_name("uv"))
        subprocess.run((installer, "venv", "-q", "--clear", str(LITELLM)), check=True)
        package = ("pip", "install", "-q", "--python", str(python), "litellm[proxy]")
        subprocess.run((installer, *package), check=True)
    ask = "import importlib.metadata as m; print(m.version('litellm'))"
    done = subprocess.run((str(python), "-c", ask), check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def _until_live(url: str) -> None:
    async with asyncio.timeout(_START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health/liveliness") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)


@asynccontextmanager
async def _process(
    command: Sequence[str], *, environ: Mapping[str, str], prints_port: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    LITELLM.parent.mkdir(parents=True, exist_ok=True)
    with (LITELLM.parent / f"{Path(command[0]).name}.log").open("wb") as log:
        printed = asyncio.subprocess.PIPE if prints_port else log
        process = await asyncio.create_subprocess_exec(
            *command, stdout=printed, stderr=log, env=dict(environ)
        )
        try:
            yield process
        finally:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2]))
