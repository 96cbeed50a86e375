"""The agent: hands episodes to a program with mini-swe-agent, and runs the commands of its policy.

The program reaches the gateway, and what the policy asks it to run does not: each episode has a
sandbox here, without network, environment, processes and files of this machine.
"""

import asyncio
import json
from asyncio import Queue, SubprocessProtocol
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shop_desk.shop import order_of

from command_line.desk import ENVIRON, commands
from forgemq_agents import Episode
from forgemq_agents.errors import AgentFailedError
from forgemq_graders import Execution, Sandbox, SandboxLimits, Shell

CODE = Path(__file__).parent.parent
# Where `python -m tests.clients.install mini_swe_agent` puts it.
PYTHON = CODE.parents[1] / ".cache/clients/mini_swe_agent/venv/bin/python"

LIMITS = SandboxLimits(
    time_s=10, cpu_s=5, memory_bytes=2**27, processes=16, output_bytes=2**16, folder_bytes=2**20
)
SANDBOX = Sandbox(LIMITS)


class Player(SubprocessProtocol):
    """The program `player.py`: started by the first episode, ended by the end of its input.

    A program that has ended fails the episodes it had, and the next episode starts another.
    """

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._program: Any = None
        self._said: dict[str, Queue[dict[str, Any]]] = {}
        self._line_begun = b""

    async def play(self, episode: Episode) -> dict[str, Any]:
        """What came of the episode.

        Raises:
            AgentFailedError: mini-swe-agent failed, or the program ended.
            IsolationRefusedError: this machine cannot isolate commands.
        """
        async with self._starting:
            if self._program is None:
                await self._start(episode.environ)
        said = self._said[episode.episode_id] = Queue()
        result: dict[str, Any] = {}
        try:
            files = commands(order_of(episode.task))
            async with Shell(SANDBOX, files=files, environ=ENVIRON) as shell:
                where = {"base_url": episode.base_url, "key": episode.key}
                self._tell(episode, task=episode.task, **where)
                while "command" in (line := await said.get()):
                    self._tell(episode, **observed(await shell.run(merged(line["command"]))))
                result = line
        finally:
            del self._said[episode.episode_id]
            if not result:
                self._tell(episode, is_over=True)  # Its thread may wait for a command.
        if "error" in result:
            raise AgentFailedError(result["error"])
        return result

    def close(self) -> None:
        """Kill the program."""
        if self._program is not None:
            self._program.close()

    async def _start(self, environ: Mapping[str, str]) -> None:
        environ = {
            **environ,
            "PYTHONPATH": str(CODE),
            "MSWEA_SILENT_STARTUP": "1",
            # litellm would load a list of prices from the network.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = (str(PYTHON), "-m", "command_line.player")
        self._program, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self, *command, env=environ, stderr=None
        )

    def _tell(self, episode: Episode, **fields: object) -> None:
        if self._program is not None:
            line = json.dumps({"id": episode.episode_id, **fields})
            self._program.get_pipe_transport(0).write(line.encode() + b"\n")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Hand the lines that are complete to their episodes."""
        del fd
        *lines, self._line_begun = (self._line_begun + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if queue := self._said.get(said.pop("id")):  # An episode may have been cancelled.
                queue.put_nowait(said)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the episodes that are open: the program has ended."""
        del exc
        self._program, self._line_begun = None, b""
        for queue in self._said.values():
            queue.put_nowait({"error": "the player has ended"})


def merged(command: str) -> str:
    """The command with its errors among its output, as mini-swe-agent runs it."""
    return f"exec 2>&1\n{command}"


def observed(execution: Execution) -> dict[str, Any]:
    """What mini-swe-agent knows of a command."""
    is_over = execution.ended in ("exit", "signal")
    return {
        "output": execution.stdout.decode(errors="replace"),
        "returncode": execution.status if is_over else -1,
        "exception_info": "" if is_over else f"the command reached its limit: {execution.ended}",
    }


PLAYER = Player()


async def play(episode: Episode) -> None:
    """Serve one customer."""
    result = await PLAYER.play(episode)
    episode.result = result
    if result["exit_status"] == "LimitsExceeded":
        episode.truncate("too_many_turns")
