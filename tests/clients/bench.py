"""Plays one real client against the gateway, and says what the gateway recorded."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from msgspec import Struct

from forgemq_contracts import topics
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
from tests.clients.systems import Part, System
from tests.unit.gateway.scripted_lane import contexts_of

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
    "killed_late",
    "inference_killed",
    "engine_killed",
]
# Modes of the log in memory too.
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
    "killed_late",
)
# What is killed and started again in a turn, by mode.
KILLED: dict[Mode, Part] = {
    "killed": "gateway",
    "killed_late": "gateway",
    "inference_killed": "inference",
    "engine_killed": "engine",
}
# Modes that need processes of their own, and so the real log.
ON_KAFKA: tuple[Mode, ...] = ("inference_killed", "engine_killed")
FAULTS: dict[Mode, Fault] = {
    "refused": "refused",
    "failed": "failed",
    "cut_waiting": "cut_waiting",
    "cut_answer": "cut_answer",
}
# How long a kill waits for a stream to open.
_OPENS_S_MAX = 8.0
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
        asks_again: Whether its program asks once more itself, in the mode `killed_late`, when its
            stream ends with an error.
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
    asks_again: bool = False
    may_give_up: tuple[Mode, ...] = ()
    cut_forks: tuple[str, ...] = ()
    fault_at: int = 1
    is_step: Callable[[str], bool] = has_tools
    done: Callable[[str], int] = tool_results


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        records: Its completions.
        failed: What lanes said of attempts that gave none.
        delivered: Requests whose answer a client had, one for each record that says so.
        prompts: What the model was asked, by request.
        samplings: How often it was asked.
        model_calls: Requests for the model that the client sent, retries included.
    """

    exit_code: int | None
    output: str
    file: str
    records: list[Any]
    prompts: dict[str, list[int]]
    samplings: int
    failed: list[Any] = []
    delivered: list[str] = []
    model_calls: int = 0

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
ASKED_AGAIN = "asked again"  # What a program prints that did.


def keepalive_s(mode: Mode) -> float:
    """Of the gateway: in `killed` it is dead before a keep-alive; later modes wait for one."""
    return 3.0 if mode == "killed" else 0.4


async def play(
    client: Client, mode: Mode, folder: Path, system: System, *, installed: Path | None = None
) -> Outcome:
    """Let the client, installed in its own folder or in this one, do its task in one episode."""
    script = system.script = ScriptedModel(
        client.parallel_steps if mode == "parallel" else client.steps,
        written=odd_text if mode == "odd" else plain_text,
        is_step=client.is_step,
        done=client.done,
    )
    fault, before = FAULTS.get(mode, "none"), system.samplings
    link = Link(lambda: system.world.base_url, fault=fault, fault_at=client.fault_at)
    address = await link.start()
    try:
        claim = await system.episode()
        scene = _scene(address, claim["key"], mode, folder, installed or folder_of(client.package))
        async with asyncio.TaskGroup() as tasks:
            trouble = tasks.create_task(_trouble(mode, system, link, script))
            exit_code, output = await _run(_launch(client, mode, scene), scene)
            trouble.cancel()
    finally:
        await link.stop()
    file = scene.work / "out.txt"
    episode_id = claim["episode_id"]
    records = await _of_episode(system, topics.FINISHED_COMPLETIONS, episode_id)
    deliveries = await _of_episode(system, topics.DELIVERED_COMPLETIONS, episode_id)
    return Outcome(
        exit_code=exit_code,
        output=output,
        file=file.read_text() if file.exists() else "",
        records=[record for record in records if record.finish_reason != "error"],
        prompts=system.prompts,
        samplings=system.samplings - before,
        failed=[record for record in records if record.finish_reason == "error"],
        delivered=[each.request_id for each in deliveries if not each.is_withdrawn],
        model_calls=link.model_calls,
    )


async def _of_episode(system: System, topic: topics.Topic, episode_id: str) -> list[Any]:
    return [each for each in await system.world.records(topic) if each.episode_id == episode_id]


def _scene(address: str, key: str, mode: Mode, folder: Path, installed: Path) -> Scene:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    return Scene(
        root=f"{address}/s/{key}" if mode == "path" else address,
        key="any" if mode == "path" else key,
        home=home,
        work=work,
        installed=installed,
    )


def _launch(client: Client, mode: Mode, scene: Scene) -> Launch:
    launch = client.launch(scene)
    if mode == "killed_late" and client.asks_again:
        return Launch(launch.argv, {**launch.environment, "ASKS_AGAIN": "1"})
    return launch


async def _trouble(mode: Mode, system: System, link: Link, script: ScriptedModel) -> None:
    """What goes wrong while the client waits for its second turn."""
    if mode == "cut_waiting":
        script.hold_at = 1
        await script.reached.wait()
        await link.has_cut.wait()
        script.released.set()
    if mode in KILLED:
        script.hold_at = 1
        await script.reached.wait()
        if mode == "killed_late":
            await _kept_alive(link)
        await system.kill(KILLED[mode])
        if mode not in ON_KAFKA:
            script.released.set()
        await system.restart(KILLED[mode])
        if mode in ON_KAFKA:
            await _kept_alive(link)
            script.released.set()


async def _kept_alive(link: Link) -> None:
    """Wait until a client that streams has read a keep-alive; another one has nothing to read.

    Raises:
        TimeoutError: none came.
    """
    if link.is_streamed:
        link.has_passed.clear()  # The next part is the keep-alive of this turn.
        await asyncio.wait_for(link.has_passed.wait(), _OPENS_S_MAX)


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
