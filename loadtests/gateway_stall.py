"""Do requests of hostile size hold up other agents?

Broker, gateway, inference and scheduler are real, each in its own process; engine and trainer are
stand-ins. Agents play short conversations all the time. Beside them one more agent sends what is
as large as it can be: bodies of 60 MB, 20 MB of tools, and 190,000 tokens in one message, one after
the other. `make load NAME=gateway_stall`.

Two things are compared with the quiet run before: how long the others' turns take, and how long
GET /health takes, which needs nothing but the gateway's event loop.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
from data_path_agents import DOMAIN, Played
from data_path_system import RunningSystem, Workload, running
from gateway_stall_attacker import CASES
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
    warm_up_s=10.0,
    measure_s=20.0,
)
_START_TIMEOUT_S = 120.0
_PROBE_EVERY_S = 0.02
# A gateway that does not answer within this is stopped, not slow.
_ANSWER_S = 120.0
# Python, and 60 MB to make.
_ATTACKER_STARTS_S = 2.0
ATTACKER = str(Path(__file__).with_name("gateway_stall_attacker.py"))


class Window(Struct, frozen=True, kw_only=True):
    """One case: when it was, and what was seen in it.

    Attributes:
        monotonic_s: Start and end; the agents' process has the same clock.
        health_s: How long each GET /health took.
        statuses: What the large requests were answered.
    """

    name: str
    monotonic_s: tuple[float, float]
    health_s: list[float]
    statuses: list[int]


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


async def _statuses(attacker: asyncio.subprocess.Process) -> list[int]:
    """What the large requests were answered, when the attacker has ended."""
    said, _ = await attacker.communicate()
    return list(json.loads(said))


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
        cases = (None, *CASES)
        return [await _window(session, url=url, claim=claim, case=case) for case in cases]


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


async def _window(
    session: aiohttp.ClientSession, *, url: str, claim: Claim, case: str | None
) -> Window:
    """Probe while the attacker of this case sends; None for a quiet window."""
    attacker = None
    if case is not None:
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, ATTACKER, case, claim.base_url, claim.key, str(WORKLOAD.measure_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        await asyncio.sleep(_ATTACKER_STARTS_S)
    started_s = time.monotonic()
    taken = await _probe(session, url, seconds=WORKLOAD.measure_s - _ATTACKER_STARTS_S)
    ended_s = time.monotonic()
    return Window(
        name=case or "quiet",
        monotonic_s=(started_s, ended_s),
        health_s=taken,
        statuses=[] if attacker is None else await _statuses(attacker),
    )


async def _measured(folder: Path) -> tuple[list[Window], list[Played]]:
    async with running("stall", WORKLOAD, folder=folder) as system:
        async with asyncio.timeout(_START_TIMEOUT_S + 8 * WORKLOAD.measure_s + _ANSWER_S):
            windows = await _windows(system)
        played = system.played
    lines = played.read_bytes().splitlines()
    return windows, [msgspec.json.decode(line, type=Played) for line in lines]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("inf")


def main() -> int:
    """Measure, print the table, and return 1 if a threshold is broken."""
    given = arguments("Do requests of hostile size hold up other agents?")
    measurement = Measurement(
        name="gateway_stall", question="Do requests of hostile size hold up other agents?"
    )
    with tempfile.TemporaryDirectory() as folder:
        windows, played = asyncio.run(_measured(Path(folder)))
    quiet: float = 0.0
    for window in windows:
        start_s, end_s = window.monotonic_s
        turns = [p.took_s for p in played if start_s <= p.ended_s <= end_s]
        quiet = quiet or _p99(turns)
        case = window.name
        measurement.row(case, "turns_p99", 1000 * _p99(turns), "ms")
        measurement.row(case, "health_p99", 1000 * _p99(window.health_s), "ms")
        measurement.row(case, "health_max", 1000 * max(window.health_s), "ms")
        measurement.row(case, "quiet_over_turns_p99", quiet / _p99(turns), "ratio")
        measurement.row(case, "turns", len(turns), "turns")
        if window.statuses:
            measurement.row(case, "large_requests", len(window.statuses), "requests")
    measurement.conditions["load average"] = f"{os.getloadavg()[0]:.1f}"
    measurement.conditions["answers"] = str(
        {window.name: sorted(set(window.statuses)) for window in windows if window.statuses}
    )
    return measurement.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
