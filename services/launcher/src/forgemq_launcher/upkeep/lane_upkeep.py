"""The engine and the inference process of each lane, as the run's plan of lanes wants them."""

import asyncio
from collections.abc import Callable, Mapping

from forgemq_contracts.engine_address import engine_address
from forgemq_contracts.lane_plan import PlannedLane
from forgemq_launcher.upkeep.engine_servers import LaneServers
from forgemq_launcher.upkeep.engines import Engines
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.named_engines import NamedEngines
from forgemq_launcher.upkeep.supervisor import (
    Note,
    ProcessFailedError,
    ServiceSpec,
    Supervisor,
)
from forgemq_sglang_cpu.server import EngineServerError
from forgemq_telemetry.causes import causes

_GIVEN_UP = (ProcessFailedError, EngineServerError, MachineError, OSError)
"""What ends an added lane. The run goes on without it, as it did before."""


class LaneUpkeep:
    """Starts and stops the processes of lanes.

    Lifecycle: `begin` once with the lanes of the run's configuration, whose failure is the run's,
    then `follow` for each change of the plan. All tasks end with the group that `begin` got.

    Args:
        engines: Of the lanes with which the run begins.
        supervisor: Keeps the inference processes.
        spec_of: The inference process of a lane beside the engine at an address, and beside the
            prefill engine at another one, "" without one.
        engines_of: The engines of a lane that is added without an address.
        note: Shows a line to the people at the terminal.
    """

    def __init__(
        self,
        engines: Engines | NamedEngines,
        supervisor: Supervisor,
        *,
        spec_of: Callable[[int, str, str], ServiceSpec],
        engines_of: Callable[[int], LaneServers],
        note: Note,
    ) -> None:
        self._engines = engines
        self._supervisor = supervisor
        self._spec_of = spec_of
        self._engines_of = engines_of
        self._note = note
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._urls: dict[int, str] = {}

    def begin(
        self,
        group: asyncio.TaskGroup,
        first: Mapping[int, ServiceSpec],
        *,
        may_end: Callable[[], bool],
    ) -> None:
        """Keep up the lanes with which the run begins: their engines and these processes."""
        self._group, self._may_end = group, may_end
        self._urls = dict(enumerate(self._engines.urls))
        for lane, spec in first.items():
            self._tasks[lane] = group.create_task(self._keep(lane, spec))

    async def follow(self, plan: Mapping[int, PlannedLane]) -> None:
        """Start lanes that are in the plan and not here, stop those that are here and not in it.

        A lane with which the run began may have been removed, and added with another engine, before
        a resume: it has that engine, as everybody else reads in the plan.
        """
        for lane in sorted(set(self._tasks) - set(plan)):
            await self._stop(lane, why="is removed; its processes end")
        for lane in sorted(set(plan) & set(self._tasks)):
            if url := self._other_engine(plan[lane]):
                await self._stop(lane, why=f"was added with the engine at {url}, and has that one")
        for lane in sorted(set(plan) - set(self._tasks)):
            url = self._urls[lane] = plan[lane].engine_url
            self._tasks[lane] = self._group.create_task(self._keep_added(lane, url))

    def _other_engine(self, planned: PlannedLane) -> str:
        """The address in the plan of an engine that the lane does not have; '' if it has it."""
        url, held = planned.engine_url, self._urls[planned.lane]
        return url if url and engine_address(url) != engine_address(held) else ""

    async def _keep(self, lane: int, spec: ServiceSpec) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.keep(spec, may_end=self._may_end))
            if self._engines.has(lane):
                group.create_task(self._engines.keep(lane))

    async def _keep_added(self, lane: int, url: str) -> None:
        """Keep an added lane up; if it fails, say so, and leave it to be removed."""
        try:
            urls = (url, "") if url else self._own_engines(lane)
            await self._keep(lane, self._spec_of(lane, *urls))
        except* _GIVEN_UP as errors:
            why = "; ".join(map(str, causes(errors)))
            self._note(f"lane {lane} is given up: {why}")
            self._note(f"`forgemq remove-lane` takes lane {lane} out of the run")
            await self._supervisor.end(f"inference-{lane}")
            await self._engines.remove(lane)

    def _own_engines(self, lane: int) -> tuple[str, str]:
        """Start the engines of a lane; returns their addresses, the prefill engine's last."""
        if isinstance(self._engines, NamedEngines):
            raise MachineError(
                "the engines of this run are named and not started by it: add the lane with "
                "the address of its engine"
            )
        servers = self._engines_of(lane)
        self._engines.add(lane, servers)
        url = servers.serving.url
        self._note(f"lane {lane} is added; SGLang starts at {url} (0.5-3 minutes)")
        return url, servers.prefill.url if servers.prefill else ""

    async def _stop(self, lane: int, *, why: str) -> None:
        """End a lane's processes: requests that do not end in time go to other lanes."""
        self._note(f"lane {lane} {why}")
        await self._supervisor.end(f"inference-{lane}")
        keeping = self._tasks.pop(lane)
        keeping.cancel()
        await asyncio.wait([keeping])
        await self._engines.remove(lane)
