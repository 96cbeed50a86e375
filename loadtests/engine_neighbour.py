"""How long does another process wait for a CPU beside three engines that generate on it?

Engines on a CPU are started in two ways: in the session of this process, as `forgemq run` starts
them, and each in a session of its own. Linux shares the CPU by session first if
`kernel.sched_autogroup_enabled` is 1. Beside them a process hashes for 8 s, in three threads.
`longest_wait_s` is the longest time between two blocks of one thread, `share` what the process got
of one core, both the median of three processes; `_over_sessions` compares with the engines in
sessions of their own, in the same run.

    make load NAME=engine_neighbour      # 2 minutes on two cores
"""

import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
from larger_model import larger_model
from measurement import Measurement, arguments
from msgspec import Struct

from forgemq_inference.engine import Engine, EngineError
from forgemq_settings.ports import free_port

_ENGINES = 3
_START_S = 300.0
_REPEATS = 3
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_NEIGHBOUR = """
import hashlib, json, threading, time

BLOCK, END_S = bytes(1 << 17), time.monotonic() + 8.0
longest_s = [0.0] * 3

def work(number):
    last_s = time.monotonic()
    while last_s < END_S:
        hashlib.sha256(BLOCK).digest()
        now_s = time.monotonic()
        longest_s[number] = max(longest_s[number], now_s - last_s)
        last_s = now_s

begun_s, threads = time.monotonic(), [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
share = time.process_time() / (time.monotonic() - begun_s)
print(json.dumps({"longest_wait_s": max(longest_s), "share": share}))
"""


class Neighbour(Struct, frozen=True, kw_only=True):
    """What a process got beside the engines: seconds, and cores."""

    longest_wait_s: float
    share: float


@contextmanager
def started(model: Path, folder: Path, *, port: int, own_session: bool) -> Iterator[str]:
    """Address of an engine that starts; it is stopped at the end of the block."""
    command = [sys.executable, "-m", "forgemq_sglang_cpu", "--model-path", str(model)]
    command += ["--port", str(port), "--folder", str(folder / f"engine-{port}")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        start_new_session=own_session,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@asynccontextmanager
async def generating(model: Path, folder: Path, *, own_sessions: bool) -> AsyncIterator[None]:
    """Three engines, each with one request after the other until the block ends."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(_ENGINES):
            url = stack.enter_context(
                started(model, folder, port=free_port(), own_session=own_sessions)
            )
            engines.append(await stack.enter_async_context(Engine(url)))
        for engine in engines:
            await until_up(engine)
        requests = [asyncio.create_task(keep_generating(engine)) for engine in engines]
        await asyncio.sleep(1.0)
        yield
        assert not any(request.done() for request in requests)
        for request in requests:
            request.cancel()


async def until_up(engine: Engine) -> None:
    """Wait until the engine answers."""
    async with asyncio.timeout(_START_S):
        while True:
            with suppress(EngineError):
                return await engine.check_health(timeout_s=5.0)
            await asyncio.sleep(0.5)


async def keep_generating(engine: Engine) -> None:
    """One request after the other, until it is cancelled."""
    sampling = {"temperature": 1.0, "max_new_tokens": 3000, "ignore_eos": True}
    while True:
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
        await engine.generate(body, timeout_s=_START_S)


async def measure(model: Path, folder: Path, *, own_sessions: bool) -> Neighbour:
    """The medians of some processes beside the engines."""
    async with generating(model, folder, own_sessions=own_sessions):
        seen = [await neighbour() for _ in range(_REPEATS)]
    return Neighbour(
        longest_wait_s=statistics.median(each.longest_wait_s for each in seen),
        share=statistics.median(each.share for each in seen),
    )


async def neighbour() -> Neighbour:
    """What one process got."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _NEIGHBOUR, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return msgspec.json.decode(output, type=Neighbour)


def main() -> int:
    """Measure both ways."""
    chosen = arguments(__doc__ or "")
    autogroup = _AUTOGROUP.read_text().strip() if _AUTOGROUP.is_file() else "absent"
    measurement = Measurement(
        name="engine_neighbour",
        question="How long does another process wait for a CPU beside engines on it?",
        conditions={"autogroup": autogroup},
    )
    case = f"engines_{_ENGINES}"
    if not chosen.case or case in chosen.case:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = larger_model(folder / "model")
            together = asyncio.run(measure(model, folder, own_sessions=False))
            apart = asyncio.run(measure(model, folder, own_sessions=True))
        measurement.row(case, "longest_wait_s", together.longest_wait_s, "s")
        measurement.row(case, "share", together.share, "cores")
        waits = together.longest_wait_s / apart.longest_wait_s
        measurement.row(case, "longest_wait_over_sessions", waits, "x")
        measurement.row(case, "share_over_sessions", together.share / apart.share, "x")
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
