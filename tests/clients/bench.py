"""Plays one real client against the gateway, and says what the gateway recorded."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from msgspec import Struct

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.episodes import Sampling
from tests.clients.install import folder_of
from tests.clients.link import Fault, Link
from tests.clients.scripted_model import (
    ScriptedModel,
    Step,
    has_tools,
    odd_text,
    plain_text,
    tool_results,
)
from tests.unit.gateway.scripted_lane import ScriptedLane, contexts_of, wall_ms
from tests.unit.gateway.world import World, configuration_of, running
from tests.unit.rendering.folders import write_model_folder

Protocol = Literal["chat", "responses", "messages"]
Mode = Literal[
    "plain",
    "path",
    "odd",
    "parallel",
    "refused",
    "failed",
    "cut_waiting",
    "cut_answer",
    "killed",
]
MODES: tuple[Mode, ...] = (
    "plain",
    "path",
    "odd",
    "parallel",
    "refused",
    "failed",
    "cut_waiting",
    "cut_answer",
    "killed",
)
FAULTS: dict[Mode, Fault] = {
    "refused": "refused",
    "failed": "failed",
    "cut_waiting": "cut_waiting",
    "cut_answer": "cut_answer",
}
# Room for the prompts of coding agents in the small vocabulary of the tests' model.
_CONTEXT_TOKENS_MAX = 300_000
_CLIENT_S_MAX = 120.0
_OUTPUT_CHARACTERS = 4000


class Scene(Struct, frozen=True, kw_only=True):
    """What a client is started with.

    Attributes:
        root: The gateway's address, with the session in its path in the mode `path`.
        home: An empty home directory.
        work: An empty working directory; the task writes `out.txt` into it.
        installed: Where the client is installed.
    """

    root: str
    key: str
    home: Path
    work: Path
    installed: Path


class Launch(Struct, frozen=True):
    """The command of a client, and what its environment adds."""

    argv: tuple[str, ...]
    environment: dict[str, str] = {}


class Client(Struct, frozen=True, kw_only=True):
    """A client, and the task that the scripted model does with its tools.

    Attributes:
        package: Its lock in `locks/`.
        launch: How it is started.
        steps: The task; `parallel_steps` has two calls in its first turn.
        forks: Forks that it is known to make, by their reasons: requests beside the task, as for a
            title, and a history that it edits.
        may_give_up: Modes in which it is known to end with an error, always or at times.
        fault_at: The call of the model at which something goes wrong, counted from 0.
        cut_forks: Forks of the mode `cut_answer`, if it then asks again without a sign of that, and
            so gets another sample.
        done: How many results of tools a prompt shows.
    """

    name: str
    package: str
    protocol: Protocol
    launch: Callable[[Scene], Launch]
    steps: tuple[Step, ...]
    parallel_steps: tuple[Step, ...] = ()
    forks: tuple[str, ...] = ()
    may_give_up: tuple[Mode, ...] = ()
    cut_forks: tuple[str, ...] = ()
    fault_at: int = 1
    is_step: Callable[[str], bool] = has_tools
    done: Callable[[str], int] = tool_results


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of it."""

    exit_code: int | None
    output: str
    file: str
    records: list[Any]
    prompts: dict[str, list[int]]

    def forks(self) -> list[str]:
        return [record.turn.fork_reason for record in self.records if record.turn.fork_reason]

    def leaves(self) -> int:
        """Paths of the episode that no later turn extends."""
        wholes = contexts_of(self.records)
        extended = {
            record.parent_id
            for record in self.records
            if record.parent_id and record.shared_prefix_tokens == len(wholes[record.parent_id])
        }
        return len({record.request_id for record in self.records} - extended)

    def broken_prefixes(self) -> list[str]:
        """Turns that neither extend all tokens of the turn before them nor are a counted fork."""
        wholes = contexts_of(self.records)
        return [
            record.request_id
            for record in self.records
            if not self._extends(record, wholes) and not record.turn.fork_reason
        ]

    def _extends(self, record: Any, wholes: dict[str, list[int]]) -> bool:
        parent = wholes.get(record.parent_id or "", [])
        prompt = self.prompts[record.request_id]
        is_first = record is self.records[0]
        return (bool(parent) or is_first) and prompt[: len(parent)] == parent


Check = Callable[[Client, Mode], Awaitable[Outcome]]


async def play(client: Client, mode: Mode, folder: Path) -> Outcome:
    """Let the client do its task in one episode."""
    model = write_model_folder(folder / "model")
    configuration = configuration_of(model, context_tokens_max=_CONTEXT_TOKENS_MAX)
    episodes = msgspec.structs.replace(
        configuration.episodes, sampling=Sampling(temperature=1.0, max_tokens=4000)
    )
    configuration = msgspec.structs.replace(configuration, episodes=episodes)
    script = ScriptedModel(
        client.parallel_steps if mode == "parallel" else client.steps,
        written=odd_text if mode == "odd" else plain_text,
        is_step=client.is_step,
        done=client.done,
    )
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, script) as (world, lanes):
        fault = FAULTS.get(mode, "none")
        link = Link(lambda: world.base_url, fault=fault, fault_at=client.fault_at)
        address = await link.start()
        try:
            scene = _scene(client, address, (await world.episode())["key"], mode, folder)
            async with asyncio.TaskGroup() as tasks:
                trouble = tasks.create_task(_trouble(mode, world, link, script))
                exit_code, output = await _run(client.launch(scene), scene)
                trouble.cancel()
        finally:
            await link.stop()
        return await _outcome(world, lanes, (exit_code, output), scene)


def _scene(client: Client, address: str, key: str, mode: Mode, folder: Path) -> Scene:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    return Scene(
        root=f"{address}/s/{key}" if mode == "path" else address,
        key="any" if mode == "path" else key,
        home=home,
        work=work,
        installed=folder_of(client.package),
    )


async def _trouble(mode: Mode, world: World, link: Link, script: ScriptedModel) -> None:
    """What goes wrong while the client waits for its second turn."""
    if mode == "cut_waiting":
        script.hold_at = 1
        await script.reached.wait()
        await link.has_cut.wait()
        script.released.set()
    if mode == "killed":
        script.hold_at = 1
        await script.reached.wait()
        await world.kill()
        script.released.set()
        assert world.tasks is not None
        await world.start(world.tasks)


async def _run(launch: Launch, scene: Scene) -> tuple[int | None, str]:
    """Exit code and output of the client; it and its children end with the time limit."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(scene.home), "LANG": "C.UTF-8"}
    process = await asyncio.create_subprocess_exec(
        *launch.argv,
        env={**environment, **launch.environment},
        cwd=scene.work,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    exit_code: int | None = None
    output = asyncio.ensure_future(process.stdout.read())  # type: ignore[union-attr]
    try:
        async with asyncio.timeout(_CLIENT_S_MAX):
            exit_code = await process.wait()
    except TimeoutError:
        pass
    finally:
        _end_left(scene.home)
    return exit_code, (await output).decode(errors="replace")[-_OUTPUT_CHARACTERS:]


def _end_left(home: Path) -> None:
    """End the client and what it left running, also daemons: all have its home directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


async def _outcome(
    world: World, lanes: list[ScriptedLane], ended: tuple[int | None, str], scene: Scene
) -> Outcome:
    file = scene.work / "out.txt"
    return Outcome(
        exit_code=ended[0],
        output=ended[1],
        file=file.read_text() if file.exists() else "",
        records=await world.records(topics.FINISHED_COMPLETIONS),
        prompts={asked.record.request_id: asked.context for lane in lanes for asked in lane.seen},
    )
