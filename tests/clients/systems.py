"""A gateway with a scripted model behind it: with the log in memory, or all of it on Kafka."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.upkeep.machine import listening_socket
from loadtests.stand_in_engine import Generation, Speed, StandInEngine, serving
from tests.clients.scripted_model import ScriptedModel
from tests.integration.gateway_process import GatewayProcess, gateway_on_broker
from tests.unit.gateway.scripted_lane import sampled_as, wall_ms
from tests.unit.gateway.world import SETTINGS, World, configuration_of, running
from tests.unit.rendering.folders import write_model_folder

# Room for the prompts of coding agents in the small vocabulary of the tests' model.
CONTEXT_TOKENS_MAX = 300_000
VOCABULARY = 512  # More than the small tokenizer has.
LANE_S_MAX = 60.0


class System:
    """The gateway that clients ask, and the model that answers by script.

    Attributes:
        world: Its log, and the gateway's address of the moment.
        script: Answers from now on.
        prompts: What the model was asked, by request.
        samplings: How often it was asked.
        kill: Ends the gateway at once.
        restart: Starts it again, and waits until it serves.
    """

    world: World
    script: ScriptedModel
    kill: Callable[[], Awaitable[object]]
    restart: Callable[[], Awaitable[None]]

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.samplings = 0
        self._episodes = 0

    async def answer(self, request_id: str, context: list[int]) -> str:
        """What the model says to this context."""
        self.prompts[request_id] = context
        self.samplings += 1
        return await self.script(self.world.rendering.decode(context))

    async def episode(self) -> dict[str, str]:
        """Claim an episode of a new group."""
        self._episodes += 1
        claim: dict[str, str] = await self.world.claim(
            await self.world.open_group(f"task-{self._episodes}")
        )
        return claim


def _configuration(folder: Path, run: str) -> RunConfiguration:
    model = write_model_folder(folder / "model")
    # What an inference process reads of a model, beside the tokenizer.
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    (model / "model.safetensors").write_bytes(b"none")
    configuration = configuration_of(model, run=run, context_tokens_max=CONTEXT_TOKENS_MAX)
    sampling = Sampling(temperature=1.0, max_tokens=4000)
    episodes = msgspec.structs.replace(configuration.episodes, sampling=sampling)
    return msgspec.structs.replace(configuration, episodes=episodes)


@asynccontextmanager
async def in_memory(folder: Path, *, keepalive_s: float) -> AsyncIterator[System]:
    """The log in memory, the gateway and a scripted lane, all in this process."""
    system = System()
    settings = msgspec.structs.replace(SETTINGS, keepalive_s=keepalive_s)
    async with running(
        MemoryLog(run="r", clock_ms=wall_ms).open,
        _configuration(folder, "r"),
        lambda asked: system.answer(asked.record.request_id, asked.context),
        settings=settings,
    ) as (world, _):
        system.world, system.kill = world, world.kill

        async def restart() -> None:
            assert world.tasks is not None
            await world.start(world.tasks)

        system.restart = restart
        yield system


@asynccontextmanager
async def on_kafka(
    folder: Path, *, bootstrap: str, run: str, keepalive_s: float
) -> AsyncIterator[System]:
    """A real broker, the gateway's and the inference process, and an engine at its `/generate`.

    The gateway's socket is held here, as a launcher holds it: its address outlives it.
    """
    system = System()

    async def decide(body: Generation) -> tuple[list[int], str]:
        request_id = (body.rid or "").rsplit(".", 2)[0]
        text = await system.answer(request_id, msgspec.json.decode(body.input_ids))
        sampling = body.sampling_params
        ids, _, stop = sampled_as(
            text, system.world.rendering, stops=sampling.stop, tokens_max=sampling.max_new_tokens
        )
        return ids, stop

    engine = StandInEngine(Speed(context_tokens_max=CONTEXT_TOKENS_MAX), answer=decide)
    with listening_socket("127.0.0.1", wanted=0) as listener:
        async with (
            serving(engine) as engine_url,
            gateway_on_broker(
                _configuration(folder, run),
                bootstrap=bootstrap,
                blobs=str(folder / "blobs"),
                listener=listener,
                environ={"FORGEMQ_GATEWAY_KEEPALIVE_S": str(keepalive_s)},
            ) as (world, gateway),
            _inference(gateway, engine_url),
        ):
            system.world = world
            system.kill = lambda: gateway.end(signal.SIGKILL)
            system.restart = lambda: gateway.start(world)
            await gateway.start(world)
            try:
                await _serving_lane(world)
                yield system
            finally:
                await gateway.end(signal.SIGTERM)


@asynccontextmanager
async def _inference(gateway: GatewayProcess, engine_url: str) -> AsyncIterator[None]:
    """`python -m forgemq_inference` for lane 0 of the gateway's run."""
    of_run = {name: gateway.environ[name] for name in ("FORGEMQ_RUN", "FORGEMQ_KAFKA")}
    lane = {"FORGEMQ_INFERENCE_LANE": "0", "FORGEMQ_INFERENCE_ENGINE_URL": engine_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq_inference", env={**os.environ, **of_run, **lane}
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _serving_lane(world: World) -> None:
    async with asyncio.timeout(LANE_S_MAX):
        while True:
            reports = await world.records(topics.REPORTED_ENGINES)
            if any(report.is_serving for report in reports):
                return
            await asyncio.sleep(0.2)
