"""A gateway with a scripted model behind it: with the log in memory, or all of it on Kafka."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
from stand_in_answers import Generation

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.upkeep.machine import listening_socket
from forgemq_settings.ports import free_port
from tests.clients.processes import CONTEXT_TOKENS_MAX, Child, deciding
from tests.clients.scripted_model import ScriptedModel
from tests.integration.gateway_process import GatewayProcess, gateway_on_broker
from tests.unit.gateway.scripted_lane import sampled_as, wall_ms
from tests.unit.gateway.world import SETTINGS, World, configuration_of, running
from tests.unit.rendering.folders import write_model_folder

VOCABULARY = 512  # More than the small tokenizer has.
LANE_S_MAX = 60.0

Part = Literal["gateway", "inference", "engine"]


class System:
    """The gateway that clients ask, and the model that answers by script.

    Attributes:
        world: Its log, and the gateway's address of the moment.
        script: Answers from now on.
        prompts: What the model was asked, by request.
        samplings: How often it was asked.
        kill: Ends a part at once; with the log in memory, the gateway is the only one.
        restart: Starts it again as a launcher does; a gateway serves when this returns.
    """

    world: World
    script: ScriptedModel
    kill: Callable[[Part], Awaitable[object]]
    restart: Callable[[Part], Awaitable[None]]

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

        async def kill(part: Part) -> None:
            assert part == "gateway", f"{part} is no process with the log in memory"
            await world.kill()

        async def restart(part: Part) -> None:
            assert part == "gateway", f"{part} is no process with the log in memory"
            await world.start_another()

        system.world, system.kill, system.restart = world, kill, restart
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

    with listening_socket("127.0.0.1", wanted=0) as listener:
        async with (
            deciding(decide) as decides_at,
            gateway_on_broker(
                _configuration(folder, run),
                bootstrap=bootstrap,
                blobs=str(folder / "blobs"),
                listener=listener,
                environ={"FORGEMQ_GATEWAY_KEEPALIVE_S": str(keepalive_s)},
            ) as (world, gateway),
        ):
            children = _lane_of(gateway, decides_at)
            _let_end(system, world, gateway, children)
            try:
                for child in children.values():
                    await child.start()
                await gateway.start(world)
                await _serving_lane(world)
                yield system
            finally:
                await gateway.end(signal.SIGTERM)
                for child in children.values():
                    await child.end(signal.SIGTERM)


def _lane_of(gateway: GatewayProcess, decides_at: str) -> dict[Part, Child]:
    """Inference for lane 0 of the gateway's run, and its engine at one port."""
    port = free_port()
    of_run = {name: gateway.environ[name] for name in ("FORGEMQ_RUN", "FORGEMQ_KAFKA")}
    lane = {
        "FORGEMQ_INFERENCE_LANE": "0",
        "FORGEMQ_INFERENCE_ENGINE_URL": f"http://127.0.0.1:{port}",
    }
    return {
        "inference": Child("-m", "forgemq_inference", environ={**of_run, **lane}),
        "engine": Child("-m", "tests.clients.processes", str(port), decides_at),
    }


def _let_end(
    system: System, world: World, gateway: GatewayProcess, children: dict[Part, Child]
) -> None:
    """Let the test end and start each part."""

    async def kill(part: Part) -> None:
        if part == "gateway":
            await gateway.end(signal.SIGKILL)
        else:
            await children[part].end(signal.SIGKILL)

    async def restart(part: Part) -> None:
        if part == "gateway":
            await gateway.start(world)
        else:
            await children[part].start()

    system.world, system.kill, system.restart = world, kill, restart


async def _serving_lane(world: World) -> None:
    async with asyncio.timeout(LANE_S_MAX):
        while True:
            reports = await world.records(topics.REPORTED_ENGINES)
            if any(report.is_serving for report in reports):
                return
            await asyncio.sleep(0.2)
