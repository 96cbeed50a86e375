"""The run's own engines: SGLang servers, one or a pair for each lane."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

from forgemq_launcher.core.phases import BEFORE_ALL, phase
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.engine_servers import LaneServers
from forgemq_launcher.upkeep.supervisor import Note
from forgemq_sglang_cpu.server import EngineServer, EngineServerError

WATCH_EVERY_S = 1.0
"""A restart takes a minute or more; how soon a death is noticed hardly matters."""
WATCHES_OF_A_CHECK = 10
"""An engine that runs is asked for its health every tenth time that it is looked at."""
SILENT_MAX = 6
"""Health checks in a row without an answer, each of 5 s. The engine's main process answers them
from memory, also while generation is paused; its lane has lost it after some 15 s of silence."""
LOG_LINES_MAX = 1000
"""Read for the phase of a start: SGLang logs some 100 lines until it serves."""


class Engines:
    """SGLang servers, one or a pair for each lane.

    Lifecycle: `start` (returns at once), a task `keep` for each lane, `stop`. An engine that dies
    is started again at the same address; its inference process brings it to the newest weights. One
    that gives no answer for `SILENT_MAX` health checks is killed, which is a death too. `add` and
    `remove` change which lanes there are.
    """

    def __init__(
        self,
        lanes: Sequence[LaneServers],
        *,
        policy: RestartPolicy,
        start_timeout_s: float,
        note: Note,
        watch_every_s: float = WATCH_EVERY_S,
    ) -> None:
        self._lanes = dict(enumerate(lanes))
        self._stopping: list[LaneServers] = []
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._watch_every_s = watch_every_s
        self._started_s = time.monotonic()
        self._healthy: set[str] = set()
        self._phases: dict[str, str] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each lane's engine, by number; of a pair that of the decode engine."""
        return tuple(lane.serving.url for lane in self._in_order())

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        """Address of each lane's prefill engine; "" if it has none."""
        return tuple(lane.prefill.url if lane.prefill else "" for lane in self._in_order())

    def has(self, lane: int) -> bool:
        """Whether the lane's engine is one of these."""
        return lane in self._lanes

    @property
    def gpus(self) -> frozenset[int]:
        """GPUs that they take until they have stopped, by their numbers among the visible ones."""
        holders = (*self._lanes.values(), *self._stopping)
        return frozenset[int]().union(*(lane.gpus for lane in holders))

    @property
    def is_up(self) -> bool:
        """Whether every engine answers."""
        return len(self._healthy) == len(self._servers())

    def status(self) -> str:
        """One line: starting (and how far it is) or how many are up."""
        waiting = [name for name, _ in self._servers() if name not in self._healthy]
        if not waiting:
            return f"{len(self._servers())} up"
        waited_s = time.monotonic() - self._started_s
        at = self._phases.get(waiting[0], BEFORE_ALL)
        return f"starting, {waited_s:.0f} s (0.5-3 minutes): {at}"

    def start(self) -> None:
        """Start the processes and return at once; raises EngineServerError if one cannot start."""
        for _, server in self._servers():
            server.start()

    def add(self, lane: int, servers: LaneServers) -> None:
        """Start another lane's engines; raises EngineServerError if one cannot start."""
        self._started_s = time.monotonic()
        self._lanes[lane] = servers
        for _, server in self._of_lane(lane):
            server.start()

    async def remove(self, lane: int) -> None:
        """Stop a lane's engines, if it has some here; its task `keep` must have ended."""
        servers = self._lanes.pop(lane, None)
        if servers is None:
            return
        self._stopping.append(servers)
        try:
            for name, server in _named_servers(lane, servers):
                self._healthy.discard(name)
                await asyncio.to_thread(server.stop)
        finally:
            self._stopping.remove(servers)

    async def keep(self, lane: int) -> None:
        """Wait until the lane's engines answer and restart each that dies, until cancelled.

        Raises:
            EngineServerError: one did not come up, or died too often.
        """
        async with asyncio.TaskGroup() as group:
            for name, server in self._of_lane(lane):
                group.create_task(self._keep_one(name, server))

    async def _keep_one(self, name: str, server: EngineServer) -> None:
        exits_s: list[float] = []
        end = await self._life(name, server)
        while True:
            exits_s.append(time.monotonic())
            delay_s = self._policy.delay_s(exits_s)
            if delay_s is None:
                tail = "\n".join(server.log_tail())
                raise EngineServerError(
                    f"engine {name} was lost {len(exits_s)} times; the last time it {end}:\n{tail}"
                )
            self._note(f"engine {name} {end}; restarting in {delay_s:.1f} s ({server.log_path})")
            await asyncio.sleep(delay_s)
            self._started_s = time.monotonic()
            try:
                await _restart(server)
                end = await self._life(name, server)
            except EngineServerError as error:
                if server.is_running():
                    raise  # It loads for longer than it may.
                # What it lacked, as memory, may be there at the next start.
                end = f"did not start: {str(error).splitlines()[0].rstrip(':')}"

    async def _life(self, name: str, server: EngineServer) -> str:
        """Wait until a server that starts is healthy, then until its end; returns what that was.

        Raises:
            EngineServerError: it did not come up.
        """
        await asyncio.to_thread(self._wait_healthy, name, server)
        self._healthy.add(name)
        self._note(f"engine {name} answers at {server.url}")
        try:
            return await self._end_of(server)
        finally:
            self._healthy.discard(name)

    async def _end_of(self, server: EngineServer) -> str:
        """Watch a server that is healthy until it is not; returns what became of it."""
        silent = 0
        for watches in itertools.count(1):
            if not server.is_running():
                break
            await asyncio.sleep(self._watch_every_s)
            if watches % WATCHES_OF_A_CHECK:
                continue
            silent = 0 if await asyncio.to_thread(server.answers) else silent + 1
            if silent == SILENT_MAX:
                return f"gave no answer to {silent} health checks"
        return "died"

    def _wait_healthy(self, name: str, server: EngineServer) -> None:
        def progress(waited_s: float, line: str) -> None:
            del waited_s, line
            self._phases[name] = phase(server.log_tail(lines_max=LOG_LINES_MAX))

        server.wait_healthy(timeout_s=self._start_timeout_s, progress=progress)

    async def stop(self) -> None:
        """End every server with all its processes."""
        await asyncio.gather(*(asyncio.to_thread(server.stop) for _, server in self._servers()))

    def _in_order(self) -> list[LaneServers]:
        return [servers for _, servers in sorted(self._lanes.items())]

    def _servers(self) -> list[tuple[str, EngineServer]]:
        return [each for lane in sorted(self._lanes) for each in self._of_lane(lane)]

    def _of_lane(self, lane: int) -> Iterator[tuple[str, EngineServer]]:
        return _named_servers(lane, self._lanes[lane])


def _named_servers(lane: int, servers: LaneServers) -> Iterator[tuple[str, EngineServer]]:
    """Every server by the name that notes have for it: its lane's number, and that of its role."""
    if servers.prefill is not None:
        yield f"{lane} (prefill)", servers.prefill
    yield str(lane), servers.serving


async def _restart(server: EngineServer) -> None:
    """Start a server again; a cancellation waits for that, or it would start after its stop."""

    def restart() -> None:
        server.stop()  # Kills what a dead server left of its process group.
        server.start()

    restarting = asyncio.ensure_future(asyncio.to_thread(restart))
    try:
        await asyncio.shield(restarting)
    except asyncio.CancelledError:
        await asyncio.wait([restarting])
        restarting.exception()  # Nobody is left to raise it to.
        raise
