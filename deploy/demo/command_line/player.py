r"""Plays episodes with mini-swe-agent's own agent and model; its commands run in a sandbox.

A program for mini-swe-agent's environment, in which nothing of ForgeMQ is installed. Lines of its
input begin an episode, and lines of its output say what came of one:

    {"id": "e1", "base_url": "http://...", "key": "...", "task": {...}}
    {"id": "e1", "exit_status": "Submitted", "submission": "41\n", "steps": 4}

Between them it asks for each command to be run in the sandbox of the episode, and is answered:

    {"id": "e1", "command": "price lamp"}
    {"id": "e1", "output": "lamp costs 13\n", "returncode": 0, "exception_info": ""}

It stays up for many episodes, because Python and litellm take seconds to start.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from shop_desk.shop import order_of

from command_line.desk import AGENT, MODEL

EPISODES_AT_ONCE_MAX = 128


class Sandboxed(LocalEnvironment):  # type: ignore[misc]  # it is in no environment of ForgeMQ's
    """mini-swe-agent's local environment; the process that started this one runs its commands.

    Args:
        asked: Runs a command in the sandbox and returns what it came to.
    """

    def __init__(self, asked: Callable[[str], dict[str, Any]]) -> None:
        super().__init__(cwd="/tmp")
        self._asked = asked

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run the command; its folder and its time are the sandbox's."""
        del cwd, timeout
        output = self._asked(action.get("command", ""))
        self._check_finished(output)
        return output


class Episodes:
    """Episodes that are played in threads, and the lines that are written and read for them."""

    def __init__(self, results: IO[str]) -> None:
        self._results = results
        self._answers: dict[str, SimpleQueue[dict[str, Any]]] = {}
        self._pool = ThreadPoolExecutor(EPISODES_AT_ONCE_MAX)

    def take(self, said: dict[str, Any]) -> None:
        """Begin an episode, or hand an answer to the thread that waits for it."""
        if "task" in said:
            self._answers[said["id"]] = SimpleQueue()
            self._pool.submit(self._play_line, said)
        elif answers := self._answers.get(said["id"]):
            answers.put(said)

    def _play_line(self, episode: dict[str, Any]) -> None:
        try:
            said = play(episode, lambda command: self._ask(episode["id"], command))
        except Exception as error:  # noqa: BLE001 - whatever it is, other episodes go on
            said = {"error": f"{type(error).__name__}: {error}"}
        del self._answers[episode["id"]]
        self._write({"id": episode["id"], **said})

    def _ask(self, episode_id: str, command: str) -> dict[str, Any]:
        self._write({"id": episode_id, "command": command})
        answer = self._answers[episode_id].get()
        if "is_over" in answer:
            raise RuntimeError("the episode is over")
        return answer

    def _write(self, line: dict[str, Any]) -> None:
        # One write of a whole line, so that lines of threads do not mix.
        self._results.write(json.dumps(line) + "\n")


def play(episode: dict[str, Any], asked: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Let mini-swe-agent serve one customer."""
    order = order_of(episode["task"])
    where = {"api_base": episode["base_url"], "api_key": episode["key"]}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=where, cost_tracking="ignore_errors", **MODEL
    )
    agent = DefaultAgent(model, Sandboxed(asked), **AGENT)
    end = agent.run(order.question)
    return {**end, "steps": agent.n_calls}


def main() -> None:
    """Play what comes in; the end of the input ends what is still played, too."""
    # Others may print; what they say goes to stderr.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    episodes = Episodes(results)
    for line in sys.stdin:
        episodes.take(json.loads(line))
    # Who asked is gone. Threads would go on for minutes, because mini-swe-agent asks ten times.
    os._exit(0)


if __name__ == "__main__":
    main()
