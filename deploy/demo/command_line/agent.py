"""The agent: hands episodes to a program that plays them with mini-swe-agent, and waits."""

import asyncio
import json
from asyncio import Future, SubprocessProtocol
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgemq_agents import Episode
from forgemq_agents.errors import AgentFailedError

CODE = Path(__file__).parent.parent
# Where `python -m tests.clients.install mini_swe_agent` puts it.
PYTHON = CODE.parents[1] / ".cache/clients/mini_swe_agent/venv/bin/python"


class Player(SubprocessProtocol):
    """The program `player.py`: started by the first episode, ended by the end of its input.

    A program that has ended fails the episodes it had, and the next episode starts another.
    """

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._program: Any = None
        self._waiting: dict[str, Future[dict[str, Any]]] = {}
        self._line_begun = b""

    async def play(self, episode: Episode) -> dict[str, Any]:
        """What came of the episode.

        Raises:
            AgentFailedError: mini-swe-agent failed, or the program ended.
        """
        async with self._starting:
            if self._program is None:
                await self._start(episode.environ)
        said: Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[episode.episode_id] = said
        fields = {
            "id": episode.episode_id,
            "base_url": episode.base_url,
            "key": episode.key,
            "task": episode.task,
        }
        self._program.get_pipe_transport(0).write(json.dumps(fields).encode() + b"\n")
        result = await said
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

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Settle the episodes whose lines are complete."""
        del fd
        *lines, self._line_begun = (self._line_begun + data).split(b"\n")
        for line in lines:
            result = json.loads(line)
            self._settle(result.pop("id"), result)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the episodes that are open: the program has ended."""
        del exc
        self._program, self._line_begun = None, b""
        for episode_id in list(self._waiting):
            self._settle(episode_id, {"error": "the player has ended"})

    def _settle(self, episode_id: str, result: dict[str, Any]) -> None:
        said = self._waiting.pop(episode_id, None)
        if said is not None and not said.done():  # An episode may have been cancelled.
            said.set_result(result)


PLAYER = Player()


async def play(episode: Episode) -> None:
    """Serve one customer."""
    result = await PLAYER.play(episode)
    episode.result = result
    if result["exit_status"] == "LimitsExceeded":
        episode.truncate("too_many_turns")
