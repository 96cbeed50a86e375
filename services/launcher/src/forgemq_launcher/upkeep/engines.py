"""The run's own engines: SGLang servers, one or a pair for each lane."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from forgemq_contracts.lane_engines import (
    EngineShape,
    LaneEngines,
    every_lane,
    is_paired,
    shapes_of,
)
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.gpus import engine_gpus, visible_gpus
from forgemq_launcher.core.phases import BEFORE_ALL, phase
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.upkeep.machine import MachineError, installed_gpus
from forgemq_launcher.upkeep.supervisor import Note
from forgemq_sglang_cpu.options import EngineOptions, is_mixture
from forgemq_sglang_cpu.pair import EXPERTS_REFUSAL, Role
from forgemq_sglang_cpu.pool import EnginePool
from forgemq_sglang_cpu.server import EngineServer, EngineServerError

WATCH_EVERY_S = 1.0
"""A restart takes a minute or more; how soon a death is noticed hardly matters."""
LOG_LINES_MAX = 1000
"""Read for the phase of a start: SGLang logs some 100 lines until it serves."""


class LaneServers(NamedTuple):
    """The servers of one lane: one that serves it, and one that reads contexts for that one."""

    serving: EngineServer
    prefill: EngineServer | None = None


class Engines:
    """SGLang servers, one or a pair for each lane.

    Lifecycle: `start` (returns at once), `keep` one task, `stop`. An engine that dies is started
    again at the same address; its inference process brings it to the newest weights.
    """

    def __init__(
        self,
        lanes: Sequence[LaneServers],
        *,
        policy: RestartPolicy,
        start_timeout_s: float,
        note: Note,
    ) -> None:
        self._lanes = tuple(lanes)
        self._servers = dict(_named_servers(lanes))
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._note = note
        self._started_s = time.monotonic()
        self._healthy: set[str] = set()
        self._phases: dict[str, str] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """Address of each lane's engine; of a pair that of the decode engine."""
        return tuple(lane.serving.url for lane in self._lanes)

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        """Address of each lane's prefill engine; "" if it has none."""
        return tuple(lane.prefill.url if lane.prefill else "" for lane in self._lanes)

    @property
    def is_up(self) -> bool:
        """Whether every engine answers."""
        return len(self._healthy) == len(self._servers)

    def status(self) -> str:
        """One line: starting (and how far it is) or how many are up."""
        waiting = [name for name in self._servers if name not in self._healthy]
        if not waiting:
            return f"{len(self._servers)} up"
        waited_s = time.monotonic() - self._started_s
        at = self._phases.get(waiting[0], BEFORE_ALL)
        return f"starting, {waited_s:.0f} s (1-3 minutes): {at}"

    def start(self) -> None:
        """Start the processes and return at once; raises EngineServerError if one cannot start."""
        for server in self._servers.values():
            server.start()

    async def keep(self) -> None:
        """Wait until each engine answers and restart each that dies, until cancelled.

        Raises:
            EngineServerError: one did not come up, or died too often.
        """
        async with asyncio.TaskGroup() as group:
            for name, server in self._servers.items():
                group.create_task(self._keep_one(name, server))

    async def _keep_one(self, name: str, server: EngineServer) -> None:
        exits_s: list[float] = []
        while True:
            await asyncio.to_thread(self._wait_healthy, name, server)
            self._healthy.add(name)
            self._note(f"engine {name} answers at {server.url}")
            while server.is_running():  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(WATCH_EVERY_S)
            self._healthy.discard(name)
            exits_s.append(time.monotonic())
            delay_s = self._policy.delay_s(exits_s)
            if delay_s is None:
                tail = "\n".join(server.log_tail())
                raise EngineServerError(f"engine {name} died {len(exits_s)} times; last:\n{tail}")
            self._note(f"engine {name} died; restarting in {delay_s:.1f} s ({server.log_path})")
            await asyncio.sleep(delay_s)
            self._started_s = time.monotonic()
            await asyncio.to_thread(_restart, server)

    def _wait_healthy(self, name: str, server: EngineServer) -> None:
        def progress(waited_s: float, line: str) -> None:
            del waited_s, line
            self._phases[name] = phase(server.log_tail(lines_max=LOG_LINES_MAX))

        server.wait_healthy(timeout_s=self._start_timeout_s, progress=progress)

    async def stop(self) -> None:
        """End every server with all its processes."""
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers.values()))


def servers(
    configuration: RunConfiguration,
    *,
    folder: Path,
    environ: Mapping[str, str],
    addresses: Sequence[tuple[str, int]],
) -> tuple[LaneServers, ...]:
    """The servers of each lane of the run; not started.

    Args:
        configuration: Of the run.
        folder: For logs, and for K/V that engines share.
        environ: As for `options_of_engines`.
        addresses: Hosts and ports, `addresses_count` of them.

    Raises:
        MachineError: the machine has GPUs, but too few for the engines; or it cannot have this
            pool, or these lanes.
    """
    _check_pairs(configuration)
    options_left = iter(
        with_pool(
            options_of_engines(configuration, gpus=installed_gpus(), environ=environ),
            configuration,
            own_folder=folder / "pool",
        )
    )
    addresses_left = iter(addresses)

    def server(name: str) -> EngineServer:
        (host, port), options = next(addresses_left), next(options_left)
        if options.role == "prefill":
            bootstrap_port = next(addresses_left)[1]
            options = msgspec.structs.replace(options, bootstrap_port=bootstrap_port)
        return EngineServer(
            configuration.model.path,
            folder / name,
            port=port,
            options=options,
            host=host,
            inherited=environ,
        )

    made: list[LaneServers] = []
    for lane, engines in enumerate(_lanes(configuration)):
        prefill = server(f"lane-{lane}-prefill") if is_paired(engines) else None
        made.append(LaneServers(serving=server(f"lane-{lane}"), prefill=prefill))
    return tuple(made)


def addresses_count(configuration: RunConfiguration) -> int:
    """Ports that the run's servers need: one each, and of a prefill engine another one."""
    return sum(3 if is_paired(engines) else 1 for engines in _lanes(configuration))


def options_of_engines(
    configuration: RunConfiguration, *, gpus: int, environ: Mapping[str, str]
) -> tuple[EngineOptions, ...]:
    """Start options of each engine, lane 0 first, of a pair prefill first.

    Args:
        configuration: Says which engines and how many trainer ranks there are.
        gpus: Installed on this machine.
        environ: May hide some of them, and says where the trainer computes.

    Raises:
        MachineError: there are GPUs, but too few; or an engine wants several and there is none.
    """
    # No context limit is given, so the model's own holds: SGLang reserves a few tokens of its
    # limit, while gateway and inference enforce the run's limit to the token.
    seen = visible_gpus(gpus, cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"))
    usual = _usual_options(configuration)
    engines = [
        msgspec.structs.replace(usual, role=role, **_options_of_shape(shape))
        for lane in _lanes(configuration)
        for role, shape in zip(_roles(lane), shapes_of(lane), strict=True)
    ]
    if seen == 0:
        _check_cpu(engines)
        return tuple(engines)
    try:
        firsts = engine_gpus(
            [options.tensor_parallel for options in engines],
            gpus=seen,
            trainer_device=environ.get("FORGEMQ_TRAINER_DEVICE", "cpu"),
            ranks=configuration.trainer.world_size,
        )
    except ValueError as error:
        raise MachineError(str(error)) from error
    return tuple(
        msgspec.structs.replace(options, has_gpu=True, gpu_first=first)
        for options, first in zip(engines, firsts, strict=True)
    )


def _lanes(configuration: RunConfiguration) -> tuple[LaneEngines, ...]:
    return every_lane(configuration.lanes) or (LaneEngines(),) * configuration.log.lanes


def _roles(lane: LaneEngines) -> tuple[Role, ...]:
    return ("prefill", "decode") if is_paired(lane) else ("unified",)


def _options_of_shape(shape: EngineShape) -> dict[str, object]:
    return {
        "tensor_parallel": shape.tensor_parallel,
        "expert_parallel": shape.expert_parallel,
        "attention_data_parallel": shape.attention_data_parallel,
        "extra": shape.flags,
    }


def _check_cpu(engines: Sequence[EngineOptions]) -> None:
    widest = max(options.tensor_parallel for options in engines)
    if widest > 1:
        raise MachineError(
            f"lanes.tensor_parallel must be 1 for engines on a CPU, got {widest}: this machine "
            "shows no GPU"
        )


def _check_pairs(configuration: RunConfiguration) -> None:
    path = Path(configuration.model.path) / "config.json"
    has_pairs = any(map(is_paired, configuration.lanes))
    # A model without the file is refused when its engine starts.
    if has_pairs and path.is_file() and is_mixture(path.read_bytes()):
        raise MachineError(
            f"lanes.prefill must be left out for a mixture of experts: {EXPERTS_REFUSAL}"
        )


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


def _named_servers(lanes: Sequence[LaneServers]) -> Iterator[tuple[str, EngineServer]]:
    """Every server by the name that notes have for it: its lane's number, and that of its role."""
    for lane, each in enumerate(lanes):
        if each.prefill is not None:
            yield f"{lane} (prefill)", each.prefill
        yield str(lane), each.serving


def _restart(server: EngineServer) -> None:
    server.stop()  # Kills what a dead server left of its process group.
    server.start()
