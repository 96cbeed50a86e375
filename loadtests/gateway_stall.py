"""Do requests of hostile size hold up other agents?

Broker, gateway, inference and scheduler are real, each in its own process; engine and trainer are
stand-ins. Agents play short conversations all the time. Beside them one more agent sends what is
as large as it can be, one after the other: bodies of 60 MB, 20 MB of tools, 190,000 tokens in one
message, 300,000 blocks, two million items. Then come many requests that never become complete:
half-sent headers and slow bodies.
`make load NAME=gateway_stall`.

Two things are compared with the quiet run before: how long the others' turns take, and how long
GET /health takes, which needs nothing but the gateway's event loop. Of requests that stay
incomplete it is also measured what memory they take, and when the gateway ends them.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil
from data_path_agents import DOMAIN, Played
from data_path_system import RunningSystem, Workload, running
from gateway_stall_attacker import CASES
from gateway_stall_incomplete import INCOMPLETE, Ended
from measurement import Measurement, arguments
from msgspec import Struct

from forgemq_contracts.admin import Claim

WORKLOAD = Workload(
    agents=8,
    turns=8,
    prompt_messages=1,
    message_words=50,
    turn_words=16,
    output_tokens=16,
    engine_s=0.1,
    context_tokens_max=204_800,
    group_size=4,
    groups_per_step=2,
    slots=16,
    warm_up_s=25.0,  # The broker's first seconds are slow; they would make the quiet run slow.
    measure_s=15.0,
)
_START_TIMEOUT_S = 120.0
_PROBE_EVERY_S = 0.02
# A gateway that does not answer within this is stopped, not slow.
_ANSWER_S = 120.0
# Python, and 60 MB to make.
_ATTACKER_STARTS_S = 2.0
ATTACKER = str(Path(__file__).with_name("gateway_stall_attacker.py"))
INCOMPLETE_ATTACKER = str(Path(__file__).with_name("gateway_stall_incomplete.py"))
_RESIDENT_EVERY_S = 0.2
_MEGABYTE = 1_000_000
_REQUEST_TIMEOUT = 408


class Window(Struct, frozen=True, kw_only=True):
    """One case: when it was, and what was seen in it.

    Attributes:
        monotonic_s: Start and end; the agents' process has the same clock.
        health_s: How long each GET /health took.
        resident_growth_bytes: By how much the gateway's resident memory was at most above that at
            the start.
        statuses: What the large requests were answered.
        ended: How each incomplete request ended.
    """

    name: str
    monotonic_s: tuple[float, float]
    health_s: list[float]
    resident_growth_bytes: int
    statuses: list[int] = []
    ended: list[Ended] = []


class Attacked(Struct, frozen=True, kw_only=True):
    """The gateway, and the episode whose key the attacker has."""

    session: aiohttp.ClientSession
    url: str
    claim: Claim
    gateway: psutil.Process


async def _claimed(session: aiohttp.ClientSession, url: str, admin_key: str) -> Claim:
    headers = {"authorization": f"Bearer {admin_key}"}
    body = {"domain": DOMAIN, "idempotency_key": "attacker", "task": {}, "purpose": "eval"}
    async with session.post(f"{url}/v1/groups", json=body, headers=headers) as answer:
        group = (await answer.json())["group_id"]
    while True:
        claim = f"{url}/v1/groups/{group}/claim"
        async with session.post(claim, json={"wait_s": 20}, headers=headers) as answer:
            if answer.status == 200:
                return msgspec.json.decode(await answer.read(), type=Claim)
        await asyncio.sleep(0.5)


async def _probe(session: aiohttp.ClientSession, url: str, *, seconds: float) -> list[float]:
    """How long GET /health takes, again and again."""
    taken: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        started_s = time.monotonic()
        async with session.get(f"{url}/health") as answer:
            await answer.read()
        taken.append(time.monotonic() - started_s)
        await asyncio.sleep(_PROBE_EVERY_S)
    return taken


async def _windows(system: RunningSystem) -> list[Window]:
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        url = _gateway_url(await _started(system, "agents"))
        await _until_healthy(session, url)
        claim = await _claimed(session, url, system.folder.admin_key())
        await asyncio.sleep(WORKLOAD.warm_up_s)
        gateway = psutil.Process(await _started(system, "gateway"))
        attacked = Attacked(session=session, url=url, claim=claim, gateway=gateway)
        windows = [await _quiet(attacked)]
        windows += [await _beside_large_requests(attacked, case) for case in CASES]
        return windows + [await _beside_incomplete_requests(attacked, case) for case in INCOMPLETE]


async def _started(system: RunningSystem, name: str) -> int:
    """Id of the process with this name, as soon as it runs."""
    while True:
        for status in system.supervisor.statuses():
            if status.name == name and status.pid is not None:
                return status.pid
        await asyncio.sleep(0.2)


async def _until_healthy(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.5)


def _gateway_url(agents_pid: int) -> str:
    """Address of the gateway, from the environment of the agents' process."""
    environ = Path(f"/proc/{agents_pid}/environ").read_bytes().split(b"\0")
    named = dict(entry.decode().split("=", 1) for entry in environ if b"=" in entry)
    return named["FORGEMQ_LOAD_AGENTS_URL"]


async def _quiet(attacked: Attacked) -> Window:
    return await _window(attacked, "quiet", seconds=WORKLOAD.measure_s)


async def _beside_large_requests(attacked: Attacked, case: str) -> Window:
    """Probe while the attacker of this case sends one request after the other."""
    seconds = WORKLOAD.measure_s
    attacker = await _attacker(attacked, ATTACKER, case, seconds=seconds)
    await asyncio.sleep(_ATTACKER_STARTS_S)
    window = await _window(attacked, case, seconds=seconds - _ATTACKER_STARTS_S)
    said, _ = await attacker.communicate()
    return msgspec.structs.replace(window, statuses=msgspec.json.decode(said, type=list[int]))


async def _beside_incomplete_requests(attacked: Attacked, case: str) -> Window:
    """Probe from before the connections are made until all of them should have ended."""
    seconds = INCOMPLETE[case].window_s
    attacker = await _attacker(attacked, INCOMPLETE_ATTACKER, case, seconds=seconds)
    window = await _window(attacked, case, seconds=seconds)
    said, _ = await attacker.communicate()
    return msgspec.structs.replace(window, ended=msgspec.json.decode(said, type=list[Ended]))


async def _attacker(
    attacked: Attacked, program: str, case: str, *, seconds: float
) -> asyncio.subprocess.Process:
    claim = attacked.claim
    return await asyncio.create_subprocess_exec(
        *(sys.executable, program, case, claim.base_url, claim.key, str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )


async def _window(attacked: Attacked, name: str, *, seconds: float) -> Window:
    started_s = time.monotonic()
    resident = asyncio.create_task(_resident_growth(attacked.gateway, seconds=seconds))
    taken = await _probe(attacked.session, attacked.url, seconds=seconds)
    return Window(
        name=name,
        monotonic_s=(started_s, time.monotonic()),
        health_s=taken,
        resident_growth_bytes=await resident,
    )


async def _resident_growth(gateway: psutil.Process, *, seconds: float) -> int:
    """By how many bytes its resident memory is at most above what it is now."""
    before = most = gateway.memory_info().rss
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        most = max(most, gateway.memory_info().rss)
        await asyncio.sleep(_RESIDENT_EVERY_S)
    return most - before


async def _measured(folder: Path) -> tuple[list[Window], list[Played]]:
    async with running("stall", WORKLOAD, folder=folder) as system:
        windows_s = (len(CASES) + 1) * WORKLOAD.measure_s + _incomplete_s()
        async with asyncio.timeout(_START_TIMEOUT_S + WORKLOAD.warm_up_s + windows_s + _ANSWER_S):
            windows = await _windows(system)
        played = system.played
    lines = played.read_bytes().splitlines()
    return windows, [msgspec.json.decode(line, type=Played) for line in lines]


def _incomplete_s() -> float:
    return sum(case.window_s for case in INCOMPLETE.values())


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("inf")


def _turns(window: Window, played: list[Played]) -> list[float]:
    """How long the others' turns took that ended in this window."""
    start_s, end_s = window.monotonic_s
    return [turn.took_s for turn in played if start_s <= turn.ended_s <= end_s]


def _answers(window: Window) -> list[int]:
    return sorted({*window.statuses, *(ended.status for ended in window.ended)})


def _rows(
    measurement: Measurement, window: Window, turns: list[float], *, quiet_p99: float
) -> None:
    case = window.name
    measurement.row(case, "turns_p50", 1000 * statistics.median(turns), "ms")
    measurement.row(case, "turns_p99", 1000 * _p99(turns), "ms")
    measurement.row(case, "health_p50", 1000 * statistics.median(window.health_s), "ms")
    measurement.row(case, "health_p99", 1000 * _p99(window.health_s), "ms")
    measurement.row(case, "health_max", 1000 * max(window.health_s), "ms")
    measurement.row(case, "quiet_over_turns_p99", quiet_p99 / _p99(turns), "ratio")
    measurement.row(case, "turns", len(turns), "turns")
    measurement.row(case, "resident_growth", window.resident_growth_bytes / _MEGABYTE, "MB")
    if window.statuses:
        measurement.row(case, "large_requests", len(window.statuses), "requests")
    late_s = [ended.after_s for ended in window.ended if ended.status == _REQUEST_TIMEOUT]
    if window.ended:
        measurement.row(case, "ended_by_deadline", len(late_s), "requests")
        measurement.row(case, "ended_after_min", min(late_s, default=0.0), "s")
        measurement.row(case, "ended_after_max", max(late_s, default=0.0), "s")


def main() -> int:
    """Measure, print the table, and return 1 if a threshold is broken."""
    given = arguments("Do requests of hostile size hold up other agents?")
    # All incomplete bodies are of one key: the gateway's deadlines are measured, not its limit.
    os.environ["FORGEMQ_GATEWAY_KEY_REQUESTS_MAX"] = "1000"
    # The slow bodies come at once: all of them are to be read, none refused for its rate.
    os.environ["FORGEMQ_GATEWAY_KEY_REQUESTS_PER_S_MAX"] = "1000"
    measurement = Measurement(
        name="gateway_stall", question="Do requests of hostile size hold up other agents?"
    )
    with tempfile.TemporaryDirectory() as folder:
        windows, played = asyncio.run(_measured(Path(folder)))
    quiet_p99 = _p99(_turns(windows[0], played))
    for window in windows:
        _rows(measurement, window, _turns(window, played), quiet_p99=quiet_p99)
    measurement.conditions["load average"] = f"{os.getloadavg()[0]:.1f}"
    measurement.conditions["answers"] = str(
        {window.name: _answers(window) for window in windows if _answers(window)}
    )
    return measurement.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
