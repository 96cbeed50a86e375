"""Starts a whole run with stand-ins, keeps it up while it is measured, and stops it."""

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
from data_path_agents import DOMAIN
from msgspec import Struct
from pinning import cpu_s
from stand_in_trainer import StandInTrainer

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Log
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.run import (
    Episodes,
    LogLayout,
    Model,
    Queue,
    RunConfiguration,
    StartedRun,
    Trainer,
)
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.records.run_topics import create_topics, write_start
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.broker import RunBroker
from forgemq_launcher.upkeep.machine import listening_socket, port
from forgemq_launcher.upkeep.services import Addresses, service_specs
from forgemq_launcher.upkeep.supervisor import ServiceSpec, Supervisor

LOADTESTS = Path(__file__).parent
DEMO_MODEL = LOADTESTS.parent / "deploy" / "demo" / "model"
HOST = "127.0.0.1"
SERVICES = ("gateway", "inference-0", "reward", "merger", "scheduler")
STAND_INS = ("engine", "agents")
# Agents stop first, so that no request is cut off.
_AGENTS_STAGE, _ENGINE_STAGE = 0, 3


class Workload(Struct, frozen=True, kw_only=True):
    """What agents and engine do in one case.

    Attributes:
        agents: Episodes at once.
        turns: Completions of each episode.
        prompt_messages: Messages before the first turn, the same for all episodes of a group.
        message_words: Length of each of them; a word is two tokens.
        turn_words: Length of every later message of the user.
        output_tokens: Length of every completion.
        engine_s: Time from a request to its answer.
        context_tokens_max: Longest context of the model.
        group_size: G, episodes of a group.
        groups_per_step: P, groups that a step trains.
        slots: N, groups at once.
        warm_up_s: Time before the measurement.
        measure_s: Length of the measurement.
        window: W; None: the default.
        group_partitions: Of the run.
        outcome: The grader, as the run names it.
        play: The agent, as the run names it; "": agents from outside.
        task_source: Of that agent.
    """

    agents: int
    turns: int
    prompt_messages: int
    message_words: int
    turn_words: int
    output_tokens: int
    engine_s: float
    context_tokens_max: int
    group_size: int
    groups_per_step: int
    slots: int
    warm_up_s: float
    measure_s: float
    window: int | None = None
    group_partitions: int = 2
    outcome: str = "data_path_rewards:outcome"
    play: str = ""
    task_source: str = ""


class RunningSystem(Struct, frozen=True, kw_only=True):
    """A run that is up.

    Attributes:
        specs: How each service is started, also those that were left out.
        supervisor: Keeps services and stand-ins running.
        broker: The broker that the run started; None if a setting names another one.
        played: File that the agents write when they end.
        kafka: Address of the broker.
    """

    log: Log
    configuration: RunConfiguration
    folder: RunFolder
    specs: Mapping[str, ServiceSpec]
    supervisor: Supervisor
    trainer: StandInTrainer
    broker: psutil.Process | None
    played: Path
    kafka: str
    gateway_url: str

    def cpu_s(self) -> dict[str, float]:
        """CPU time each process has used so far, with its children's, by name."""
        seconds = {
            status.name: cpu_s(status.pid)
            for status in self.supervisor.statuses()
            if status.pid is not None
        }
        if self.broker is not None:
            seconds["broker"] = cpu_s(self.broker.pid)
        own = psutil.Process().cpu_times()
        seconds["trainer"] = own.user + own.system
        return seconds

    def stored_bytes(self) -> int:
        """Bytes of the run's records in the broker's segments and in the blob store."""
        segments = (self.folder / "kafka" / "data").glob(f"{self.folder.run}.*/*.log")
        blobs = (path for path in (self.folder / "blobs").rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in (*segments, *blobs))


@asynccontextmanager
async def running(
    name: str,
    workload: Workload,
    *,
    folder: Path,
    left_out: Collection[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[RunningSystem]:
    """Start everything, yield the system, and stop everything.

    Args:
        name: Of the case.
        workload: What it does.
        folder: For its files.
        left_out: Services and stand-ins that are not started.
        environ: Further settings of the services.
    """
    async with _announced(name, workload, folder=folder) as (broker, run, log):
        configuration = run.configuration()
        supervisor = Supervisor(policy=RestartPolicy(restarts_max=0), grace_s=20.0, note=_note)
        trainer = StandInTrainer(
            log,
            model=Path(configuration.model.path),
            folder=run / "checkpoints",
            group_partitions=configuration.log.group_partitions,
        )
        listener = listening_socket(HOST, wanted=0)
        addresses = _addresses(broker, run, listener=listener)
        services = service_specs(
            configuration, folder=run, addresses=addresses, environ={**os.environ, **environ}
        )
        specs = _specs(workload, folder=run, addresses=addresses, services=services)
        started = [spec for spec in specs if spec.name not in left_out]
        async with _kept_up(started, supervisor), asyncio.TaskGroup() as tasks:
            training = tasks.create_task(trainer.run())
            yield RunningSystem(
                log=log,
                configuration=configuration,
                folder=run,
                specs={spec.name: spec for spec in services},
                supervisor=supervisor,
                trainer=trainer,
                broker=_java() if broker.is_own else None,
                played=run / "played.jsonl",
                kafka=broker.connection.bootstrap,
                gateway_url=addresses.gateway_url,
            )
            training.cancel()
        listener.close()


@asynccontextmanager
async def _announced(
    name: str, workload: Workload, *, folder: Path
) -> AsyncIterator[tuple[RunBroker, RunFolder, KafkaLog]]:
    """A broker on which the run is announced, the run's folder, and its log."""
    run = RunFolder(folder / name.replace("_", "-"))
    model = model_folder(folder / "model", context_tokens_max=workload.context_tokens_max)
    configuration = run_configuration(run.run, workload, model=model)
    run.make(configuration)
    broker = RunBroker(run / "kafka", environ=os.environ, note=_note)
    await broker.start()
    log = KafkaLog(
        broker.connection,
        run=run.run,
        blobs=BlobStore(str(run / "blobs"), run=run.run),
        inline_bytes_max=configuration.log.inline_bytes_max,
    )
    try:
        await create_topics(log, configuration)
        started = StartedRun(
            run=run.run,
            configuration=configuration,
            blobs=str(run / "blobs"),
            started_ms=time.time_ns() // 1_000_000,
        )
        await write_start(broker.connection, started)
        yield broker, run, log
    finally:
        await log.close()
        await broker.stop()


@asynccontextmanager
async def _kept_up(specs: Sequence[ServiceSpec], supervisor: Supervisor) -> AsyncIterator[None]:
    """Keep these processes up, and at the end stop all that the supervisor has."""
    try:
        async with asyncio.TaskGroup() as tasks:
            kept = [
                tasks.create_task(supervisor.keep(spec, may_end=lambda: False)) for spec in specs
            ]
            yield
            for task in kept:
                task.cancel()
    finally:
        await supervisor.stop()


def run_configuration(run: str, workload: Workload, *, model: Path) -> RunConfiguration:
    """One domain, one lane, and more steps than a load test takes."""
    queue = Queue(
        domain=DOMAIN,
        task_source=workload.task_source,
        agent=workload.play,
        outcome=workload.outcome,
        group_size=workload.group_size,
        groups_per_step=workload.groups_per_step,
        slots=workload.slots,
        window=workload.window,
    )
    return RunConfiguration(
        run=run,
        seed=0,
        model=Model(
            path=str(model), context_tokens_max=workload.context_tokens_max, dtype="float32"
        ),
        queues=(queue,),
        trainer=Trainer(steps=100_000),
        episodes=Episodes(
            sampling=Sampling(max_tokens=workload.output_tokens), concurrent_max=workload.agents
        ),
        log=LogLayout(group_partitions=workload.group_partitions, lanes=1),
        code_paths=(str(LOADTESTS),),
    )


def _addresses(broker: RunBroker, folder: RunFolder, *, listener: socket.socket) -> Addresses:
    return Addresses(
        kafka=broker.connection.bootstrap,
        engine_urls=(f"http://{HOST}:{port(HOST, wanted=0)}",),
        host=HOST,
        gateway_port=listener.getsockname()[1],
        gateway_fd=listener.fileno(),
        console_port=0,
        console_fd=-1,
        admin_key=folder.admin_key(),
    )


def _specs(
    workload: Workload,
    *,
    folder: RunFolder,
    addresses: Addresses,
    services: Sequence[ServiceSpec],
) -> Sequence[ServiceSpec]:
    """The services that are measured, between the stand-ins for engine and agents."""
    shared = services[0].environ

    def stand_in(name: str, settings: Mapping[str, object], *, stage: int) -> ServiceSpec:
        prefix = f"FORGEMQ_LOAD_{name.upper()}_"
        own = {f"{prefix}{key.upper()}": str(value) for key, value in settings.items()}
        return ServiceSpec(
            name=name,
            module=f"data_path_{name}",
            environ={**shared, **own, "PYTHONPATH": _python_path()},
            log_path=folder / "logs" / f"{name}.log",
            stop_stage=stage,
        )

    engine = {
        "port": addresses.engine_urls[0].rpartition(":")[2],
        "latency_s": workload.engine_s,
        "tokens": workload.output_tokens,
        "context_tokens_max": workload.context_tokens_max,
    }
    agents = {
        "url": addresses.gateway_url,
        "admin_key": addresses.admin_key,
        "agents": workload.agents,
        "group_size": workload.group_size,
        "turns": workload.turns,
        "prompt_messages": workload.prompt_messages,
        "message_words": workload.message_words,
        "turn_words": workload.turn_words,
        "tokens_max": workload.output_tokens,
        "out": folder / "played.jsonl",
    }
    return (
        stand_in("engine", engine, stage=_ENGINE_STAGE),
        *(spec for spec in services if spec.name in SERVICES),
        stand_in("agents", agents, stage=_AGENTS_STAGE),
    )


def model_folder(folder: Path, *, context_tokens_max: int) -> Path:
    """Copy the demo's model with a longer context; only its tokenizer is used."""
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = context_tokens_max
    path.write_text(json.dumps(config))
    return folder


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(LOADTESTS), os.environ.get("PYTHONPATH", ""))))


def _java() -> psutil.Process:
    return next(p for p in psutil.Process().children(recursive=True) if "java" in p.name())


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
