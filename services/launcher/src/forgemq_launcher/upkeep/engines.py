"""The run's own engines: SGLang servers, one for each lane."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.gpus import engine_gpus, visible_gpus
from forgemq_launcher.core.phases import BEFORE_ALL, phase
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.machine import MachineError, installed_gpus
from forgemq_launcher.upkeep.supervisor import Note
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool
from forgemq_sglang_cpu.server import EngineServer, EngineServerError

WATCH_EVERY_S = 1.0
"""A restart takes a minute or more; how soon a death is noticed hardly matters."""
LOG_LINES_MAX = 1000
"""Read for the phase of a start: SGLang logs some 100 lines until it serves."""


class Engines:
    """SGLang servers, one for each lane.

    Lifecycle: `start` (returns at once), a task `keep` for each lane, `stop`. An engine that dies
    is started again at the same address; its inference process brings it to the newest weights.
    `add` and `remove` change which lanes there are.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        *,
        policy: RestartPolicy,
        start_timeout_s: float,
        note: Note,
    ) -> None:
        self._servers = dict(enumerate(servers))
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._started_s = time.monotonic()
        self._healthy: set[int] = set()
        self._phases: dict[int, str] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each lane's engine, by number."""
        return tuple(server.url for _, server in sorted(self._servers.items()))

    def has(self, lane: int) -> bool:
        """Whether the lane's engine is one of these."""
        return lane in self._servers

    @property
    def is_up(self) -> bool:
        """Whether every engine answers."""
        return len(self._healthy) == len(self._servers)

    def status(self) -> str:
        """One line: starting (and how far it is) or how many are up."""
        waiting = [lane for lane in sorted(self._servers) if lane not in self._healthy]
        if not waiting:
            return f"{len(self._servers)} up"
        waited_s = time.monotonic() - self._started_s
        at = self._phases.get(waiting[0], BEFORE_ALL)
        return f"starting, {waited_s:.0f} s (1-3 minutes): {at}"

    def start(self) -> None:
        """Start the processes and return at once; raises EngineServerError if one cannot start."""
        for server in self._servers.values():
            server.start()

    def add(self, lane: int, server: EngineServer) -> None:
        """Start another lane's engine; raises EngineServerError if it cannot start."""
        server.start()
        self._started_s = time.monotonic()
        self._servers[lane] = server

    async def remove(self, lane: int) -> None:
        """Stop a lane's engine, if it has one here; cancel its task `keep` before."""
        server = self._servers.pop(lane, None)
        self._healthy.discard(lane)
        if server is not None:
            await asyncio.to_thread(server.stop)

    async def keep(self, lane: int) -> None:
        """Wait until the lane's engine answers and restart it when it dies, until cancelled.

        Raises:
            EngineServerError: it did not come up, or died too often.
        """
        server = self._servers[lane]
        exits_s: list[float] = []
        while True:
            await asyncio.to_thread(self._wait_healthy, lane, server)
            self._healthy.add(lane)
            self._note(f"engine {lane} answers at {server.url}")
            while server.is_running():  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(WATCH_EVERY_S)
            self._healthy.discard(lane)
            exits_s.append(time.monotonic())
            delay_s = self._policy.delay_s(exits_s)
            if delay_s is None:
                tail = "\n".join(server.log_tail())
                raise EngineServerError(f"engine {lane} died {len(exits_s)} times; last:\n{tail}")
            self._note(f"engine {lane} died; restarting in {delay_s:.1f} s ({server.log_path})")
            await asyncio.sleep(delay_s)
            self._started_s = time.monotonic()
            await asyncio.to_thread(_restart, server)

    def _wait_healthy(self, lane: int, server: EngineServer) -> None:
        def progress(waited_s: float, line: str) -> None:
            del waited_s, line
            self._phases[lane] = phase(server.log_tail(lines_max=LOG_LINES_MAX))

        server.wait_healthy(timeout_s=self._start_timeout_s, progress=progress)

    async def stop(self) -> None:
        """End every server with all its processes."""
        await asyncio.gather(*(asyncio.to_thread(each.stop) for each in self._servers.values()))


def servers(
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    addresses: Sequence[tuple[str, int]],
) -> tuple[EngineServer, ...]:
    """A server for each lane of the run, at these hosts and ports; not started.

    Raises:
        MachineError: the machine has GPUs, but not one for each engine, or none for this pool.
    """
    lane_options = options_of_lanes(configuration, gpus=installed_gpus(), environ=environ)
    lane_options = with_pool(lane_options, configuration, own_folder=folder / "pool")
    return tuple(
        EngineServer(
            configuration.model.path,
            folder / f"lane-{lane}",
            port=port,
            options=options,
            host=host,
            inherited=environ,
        )
        for lane, (options, (host, port)) in enumerate(zip(lane_options, addresses, strict=True))
    )


def added_server(
    lane: int,
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    address: tuple[str, int],
) -> EngineServer:
    """The server of a lane that is added while the run is up, as `servers` makes them.

    Raises:
        MachineError: there is no GPU for another engine, or none for this pool.
    """
    layout = msgspec.structs.replace(configuration.log, lanes=lane + 1, lanes_max=None)
    larger = msgspec.structs.replace(configuration, log=layout)
    addresses = [address] * (lane + 1)  # Of the others no server is started.
    return servers(larger, folder=folder, environ=environ, addresses=addresses)[lane]


def options_of_lanes(
    configuration: RunConfiguration, *, gpus: int, environ: Mapping[str, str]
) -> tuple[EngineOptions, ...]:
    """Start options of each lane's engine: each has one GPU, or all use the CPU.

    Args:
        configuration: Says how many lanes and trainer ranks there are.
        gpus: Installed on this machine.
        environ: May hide some of them, and says where the trainer computes.

    Raises:
        MachineError: there are GPUs, but not one for each engine.
    """
    # No context limit is given, so the model's own holds: SGLang reserves a few tokens of its
    # limit, while gateway and inference enforce the run's limit to the token.
    lanes = configuration.log.lanes
    seen = visible_gpus(gpus, cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"))
    usual = _usual_options(configuration)
    if seen == 0:
        return (usual,) * lanes
    try:
        indices = engine_gpus(
            lanes=lanes,
            gpus=seen,
            trainer_device=environ.get("FORGEMQ_TRAINER_DEVICE", "cpu"),
            ranks=configuration.trainer.world_size,
        )
    except ValueError as error:
        raise MachineError(str(error)) from error
    return tuple(msgspec.structs.replace(usual, has_gpu=True, gpu_first=gpu) for gpu in indices)


def _usual_options(configuration: RunConfiguration) -> EngineOptions:
    """What the run asks of each of its engines, on any machine."""
    if configuration.speculation is None:
        return EngineOptions()
    speculation = configuration.speculation
    return EngineOptions(head=speculation.head, draft_steps=speculation.steps)


def with_pool(
    lane_options: tuple[EngineOptions, ...], configuration: RunConfiguration, *, own_folder: Path
) -> tuple[EngineOptions, ...]:
    """The options with the run's pool, if it has one.

    Args:
        lane_options: Without a pool.
        configuration: Of the run.
        own_folder: For K/V if the run's file names no folder.

    Raises:
        MachineError: engines on a CPU cannot use this storage.
    """
    pool = configuration.pool
    if pool is None:
        return lane_options
    if pool.storage != "file" and not all(options.has_gpu for options in lane_options):
        raise MachineError(
            f"pool.storage must be file for engines on a CPU, got {pool.storage}: SGLang's "
            "clients of other storages need a GPU"
        )
    folder = pool.folder or str(own_folder)
    engine_pool = EnginePool(
        storage=pool.storage,
        folder=folder if pool.storage == "file" else "",
        folder_gb_max=pool.folder_gb_max,
        extra_config=pool.extra_config,
        page_tokens=pool.page_tokens,
        host_gb=pool.host_gb,
        prefetch=pool.prefetch,
    )
    return tuple(msgspec.structs.replace(options, pool=engine_pool) for options in lane_options)


def _restart(server: EngineServer) -> None:
    server.stop()  # Kills what a dead server left of its process group.
    server.start()
