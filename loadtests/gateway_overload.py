"""Ten times as many clients as the gateway sustains, for five minutes: who is admitted, and how?

Broker, gateway, inference, scheduler, reward and merger are real, each in its own process; engine
and trainer are stand-ins. The gateway is set to 32 requests at once, which 32 clients keep busy.
Then 320 clients ask, each again as soon as Retry-After says. At the end there are 32 again.
`make load NAME=gateway_overload`.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
from data_path_system import RunningSystem, Workload, running
from gateway_overload_clients import OK, Answered
from gateway_passing import until_serving
from measurement import Measurement, arguments
from msgspec import Struct

REQUESTS_MAX = 32
WORKLOAD = Workload(
    agents=320,
    turns=8,
    prompt_messages=1,
    message_words=30,
    turn_words=30,
    output_tokens=16,
    engine_s=0.5,
    context_tokens_max=16_384,
    group_size=8,
    groups_per_step=4,
    slots=64,
    warm_up_s=15.0,
    measure_s=300.0,
)
_CLIENTS = str(Path(__file__).with_name("gateway_overload_clients.py"))
_BUSY = 429
_MEGABYTE = 1_000_000


class Phase(Struct, frozen=True, kw_only=True):
    """How many clients play, and for how long; the answers of the warm-up do not count."""

    clients: int
    seconds: float


PHASES = {
    "sustained": Phase(clients=REQUESTS_MAX, seconds=30.0),
    "overload": Phase(clients=10 * REQUESTS_MAX, seconds=WORKLOAD.measure_s),
    "after": Phase(clients=REQUESTS_MAX, seconds=30.0),
}


class Seen(Struct, frozen=True, kw_only=True):
    """One phase: its answers, and the gateway's resident memory at its begin and its end."""

    seconds: float
    answers: list[Answered]
    resident_bytes: tuple[int, int]

    def took_s(self, *, is_admitted: bool) -> list[float]:
        """How long the answers took, or the refusals."""
        return [each.took_s for each in self.answers if (each.status == OK) is is_admitted]


async def phase(system: RunningSystem, name: str, of: Phase) -> Seen:
    """Let clients play; returns what they saw behind the warm-up."""
    out = system.folder / f"{name}.jsonl"
    playing_s = WORKLOAD.warm_up_s + of.seconds
    settings: dict[str, object] = {
        "url": system.gateway_url,
        "admin_key": system.folder.admin_key(),
        "clients": of.clients,
        "group_size": WORKLOAD.group_size,
        "seconds": playing_s + 1.0,
        "name": name,
        "out": out,
    }
    own = {f"FORGEMQ_LOAD_CLIENTS_{key.upper()}": str(value) for key, value in settings.items()}
    gateway = _gateway(system)
    clients = await asyncio.create_subprocess_exec(sys.executable, _CLIENTS, env=os.environ | own)
    await asyncio.sleep(WORKLOAD.warm_up_s)
    began_s, before = time.monotonic(), gateway.memory_info().rss
    await asyncio.sleep(of.seconds)
    ended_s, after = time.monotonic(), gateway.memory_info().rss
    if await clients.wait():
        raise RuntimeError(f"the clients ended with exit status {clients.returncode}")
    lines = await asyncio.to_thread(out.read_bytes)
    answers = msgspec.json.Decoder(Answered).decode_lines(lines)
    return Seen(
        seconds=ended_s - began_s,
        answers=[each for each in answers if began_s <= each.ended_s < ended_s],
        resident_bytes=(before, after),
    )


def _gateway(system: RunningSystem) -> psutil.Process:
    pids = {status.name: status.pid for status in system.supervisor.statuses()}
    pid = pids["gateway"]
    assert pid is not None, "it has served before"
    return psutil.Process(pid)


async def measure(folder: Path) -> dict[str, Seen]:
    """Start the system and play all phases."""
    async with running("overload", WORKLOAD, folder=folder, left_out=("agents",)) as system:
        await until_serving(system.gateway_url)
        seen = {name: await phase(system, name, of) for name, of in PHASES.items()}
        await system.supervisor.stop()
    return seen


def report(measurement: Measurement, seen: dict[str, Seen]) -> None:
    """Rows of each phase, and of each against the first one."""
    sustained = seen["sustained"]
    for name, each in seen.items():
        admitted, refused = each.took_s(is_admitted=True), each.took_s(is_admitted=False)
        measurement.row(name, "admitted_per_second", len(admitted) / each.seconds, "1/s")
        measurement.row(name, "refused_per_second", len(refused) / each.seconds, "1/s")
        measurement.row(name, "admitted_p50", statistics.median(admitted), "s")
        measurement.row(name, "admitted_p99", _p99(admitted), "s")
        measurement.row(name, "refused_p99", _p99(refused), "s")
        rate = len(admitted) / each.seconds
        before = len(sustained.took_s(is_admitted=True)) / sustained.seconds
        measurement.row(name, "admitted_over_sustained", rate / before, "ratio")
        p99_before = _p99(sustained.took_s(is_admitted=True))
        measurement.row(name, "admitted_p99_over_sustained", _p99(admitted) / p99_before, "ratio")
        measurement.row(name, "other_answers", _others(each), "answers")
        grown = (each.resident_bytes[1] - each.resident_bytes[0]) / _MEGABYTE
        measurement.row(name, "resident_growth", grown, "MB")


def _others(seen: Seen) -> int:
    """Answers that are neither a completion nor a 429 that says when to ask again."""
    return sum(
        each.status != OK and not (each.status == _BUSY and each.has_retry_after)
        for each in seen.answers
    )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else 0.0


def main() -> int:
    """Measure, print the table, and return 1 if a threshold is broken."""
    options = arguments(__doc__ or "")
    os.environ["FORGEMQ_GATEWAY_REQUESTS_MAX"] = str(REQUESTS_MAX)
    measurement = Measurement(
        name="gateway_overload",
        question="Ten times as many clients as the gateway sustains: who is admitted, and how?",
    )
    with tempfile.TemporaryDirectory(prefix="forgemq-load-") as folder:
        seen = asyncio.run(measure(Path(folder)))
    report(measurement, seen)
    measurement.conditions["load average"] = f"{os.getloadavg()[0]:.1f}"
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
