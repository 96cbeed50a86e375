"""What does a service do with one, two and three processes, in a run that goes on?

Each case is one run as in data_path, with the same stand-ins. One service has one process first,
then a second and a third one start; then the two that were first are ended by SIGTERM, one after
the other. Counted is what the service writes, by the time of the records.

What is scaled waits and computes little, so that a machine of two cores shows it: a process of
reward grades two episodes at a time, with a judge that takes half a second; one of agents plays
eight episodes at a time, whose tools take a second; a gateway serves eight turns at a time, for
which the engine takes a second. More processes wait for more at once.
"""

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from data_path import FAILURES
from data_path_system import RunningSystem, Workload, running
from measurement import Measurement, arguments
from msgspec import Struct

from forgemq_bus.kept_records import read_all
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_launcher.upkeep.supervisor import ServiceSpec
from forgemq_telemetry.causes import causes

START_S_MAX = 120.0
SETTLE_S = 5.0
"""From the first sign of a change until its effects are over: a few commits, and the requests that
are under way."""

LOOK_S = 0.1
MEASURE_S = 20.0

_WORKLOAD = Workload(
    agents=96,
    turns=2,
    prompt_messages=1,
    message_words=30,
    turn_words=8,
    output_tokens=16,
    engine_s=0.1,
    context_tokens_max=1024,
    group_size=4,
    groups_per_step=4,
    slots=64,
    window=64,
    group_partitions=6,
    warm_up_s=10.0,
    measure_s=MEASURE_S,
    outcome="scaling_work:outcome",
)


class Case(Struct, frozen=True, kw_only=True):
    """One service that is scaled.

    Attributes:
        service: Its name.
        ready: Event by which a process of it says that it has work.
        written: Topic of what it does; each key is counted once.
        workload: Of the run.
        environ: Settings of the services.
        players: Service that plays in place of the stand-in for agents; "": that one.
    """

    service: str
    ready: str
    written: topics.Topic
    workload: Workload
    environ: Mapping[str, str]
    players: str = ""


CASES = {
    "reward": Case(
        service="reward",
        ready="grading_assigned",
        written=topics.GRADED_EPISODES,
        workload=msgspec.structs.replace(_WORKLOAD, outcome="scaling_work:judged_outcome"),
        environ={"FORGEMQ_REWARD_GRADERS": "2"},
    ),
    "agents": Case(
        service="agents",
        ready="training",
        written=topics.FINISHED_EPISODES,
        workload=msgspec.structs.replace(
            _WORKLOAD, agents=8, play="scaling_work:play", task_source="scaling_work:task"
        ),
        environ={},
    ),
    "gateway": Case(
        service="gateway",
        ready="restored",
        written=topics.DELIVERED_COMPLETIONS,
        workload=msgspec.structs.replace(
            _WORKLOAD, engine_s=1.0, play="scaling_work:talk", task_source="scaling_work:task"
        ),
        environ={
            "FORGEMQ_GATEWAY_REQUESTS_MAX": "8",
            # Those that wait are held until they are served, so that none is asked again.
            "FORGEMQ_GATEWAY_REQUESTS_WAITING_MAX": "256",
            "FORGEMQ_GATEWAY_LANE_HOLD_S": "60",
            "FORGEMQ_GATEWAY_PEER_PORT": "0",
        },
        # Their clients ask again when a gateway goes.
        players="agents",
    ),
}


class Window(Struct, frozen=True):
    """A part of the run, in Unix time: steady with so many processes, or a change of them."""

    name: str
    began_ms: int
    ended_ms: int

    @property
    def duration_s(self) -> float:
        """Its length."""
        return (self.ended_ms - self.began_ms) / 1000


class Processes:
    """The processes of one service in a run: more start, and those that were first end."""

    def __init__(self, case: Case, system: RunningSystem, tasks: asyncio.TaskGroup) -> None:
        self._case = case
        self._supervisor = system.supervisor
        self._spec = system.specs[case.service]
        self._tasks = tasks
        self._running: list[ServiceSpec] = []
        self._count = 0

    async def start(self) -> None:
        """Start one more; returns when it says that it has work."""
        environ = {**self._spec.environ}
        # Under a name among its replicas it would keep its partitions after its end.
        environ.pop("FORGEMQ_SERVICE_INSTANCE")
        name = f"{self._case.service}-{self._count}"
        spec = msgspec.structs.replace(
            self._spec,
            name=name,
            environ=environ,
            log_path=self._spec.log_path.with_name(f"{name}.log"),
        )
        self._count += 1
        self._running.append(spec)
        self._tasks.create_task(self._supervisor.keep(spec, may_end=lambda: True))
        said = f'"event":"{self._case.ready}"'
        async with asyncio.timeout(START_S_MAX):
            while True:
                await asyncio.sleep(LOOK_S)
                if spec.log_path.exists() and said in spec.log_path.read_text():
                    return

    async def end_first(self) -> None:
        """End the one that is up longest, by SIGTERM; returns when it has ended."""
        await self._supervisor.end(self._running.pop(0).name)


async def play(case: Case, *, folder: Path) -> tuple[Sequence[Window], Mapping[str, int]]:
    """Play the run; returns its parts, and when each key was written first, in Unix time."""
    async with (
        running(
            case.service,
            case.workload,
            folder=folder,
            left_out={case.service, case.players},
            environ=case.environ,
        ) as system,
        asyncio.TaskGroup() as tasks,
    ):
        processes = Processes(case, system, tasks)
        await processes.start()
        if case.players:
            players = system.specs[case.players]
            tasks.create_task(system.supervisor.keep(players, may_end=lambda: True))
        await _wait_for_first(system, case.written)
        await asyncio.sleep(case.workload.warm_up_s)
        windows = await _scaled(processes)
        written = await _written(system, case.written)
        await system.supervisor.stop()
    return windows, written


async def _wait_for_first(system: RunningSystem, topic: topics.Topic) -> None:
    places = partitions_of(topic, system.configuration)
    async with asyncio.timeout(START_S_MAX):
        while not sum((await system.log.end_positions(places)).values()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)  # Another process changes it.


async def _scaled(processes: Processes) -> Sequence[Window]:
    """From one process to three and back, with a steady part after each change."""
    began_ms = _now_ms()
    await asyncio.sleep(MEASURE_S)
    windows = [Window("1", began_ms, _now_ms())]
    for name, change in (
        ("2", processes.start),
        ("3", processes.start),
        ("2 again", processes.end_first),
        ("1 again", processes.end_first),
    ):
        began_ms = _now_ms()
        await change()
        await asyncio.sleep(SETTLE_S)
        settled_ms = _now_ms()
        await asyncio.sleep(MEASURE_S)
        windows += [
            Window(f"to {name}", began_ms, settled_ms),
            Window(name, settled_ms, _now_ms()),
        ]
    return windows


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _written(system: RunningSystem, topic: topics.Topic) -> dict[str, int]:
    """When each key of a topic was written first, in Unix time."""
    first: dict[str, int] = {}
    async for records in read_all(system.log, partitions_of(topic, system.configuration)):
        for record in records:
            key, at_ms = record.key.decode(), record.timestamp_ms
            first[key] = min(first.get(key, at_ms), at_ms)
    return first


def report(
    measurement: Measurement, case: str, windows: Sequence[Window], written: Mapping[str, int]
) -> None:
    """Add the rows of one case."""
    times = sorted(written.values())
    rates = {
        window.name: sum(window.began_ms <= at < window.ended_ms for at in times)
        / window.duration_s
        for window in windows
    }
    for name in ("1", "2", "3", "2 again", "1 again"):
        measurement.row(case, f"with {name}", rates[name], "1/s")
        if name != "1":
            measurement.row(case, f"with {name}, over 1", rates[name] / rates["1"], "x")
    for window in windows:
        measurement.row(case, f"longest pause, {window.name}", _longest_pause_s(times, window), "s")


def _longest_pause_s(times: Sequence[int], window: Window) -> float:
    """The longest time in a part of the run in which nothing was written."""
    inside = [at for at in times if window.began_ms <= at < window.ended_ms]
    marks = [window.began_ms, *inside, window.ended_ms]
    return max(after - before for before, after in itertools.pairwise(marks)) / 1000


def main() -> int:
    """Measure the named cases, or all of them."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="scaling",
        question="What does a service do with one, two and three processes?",
        conditions={"each part of a run": f"{MEASURE_S:.0f} s"},
    )
    for name, case in CASES.items():
        if options.case and name not in options.case:
            continue
        before = os.getloadavg()[0]
        try:
            with tempfile.TemporaryDirectory(prefix="forgemq-load-") as folder:
                windows, written = asyncio.run(play(case, folder=Path(folder)))
        except* FAILURES as failures:
            lines = "\n".join(str(cause) or type(cause).__name__ for cause in causes(failures))
            sys.exit(f"{name}: the system under load failed: {lines}")
        report(measurement, name, windows, written)
        measurement.conditions[f"{name}, load average"] = (
            f"{before:.1f} before, {os.getloadavg()[0]:.1f} after"
        )
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
