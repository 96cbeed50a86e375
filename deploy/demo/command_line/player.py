r"""Plays episodes with mini-swe-agent's own classes: agent, model and environment, unmodified.

A program for mini-swe-agent's environment, in which nothing of ForgeMQ is installed. Each line of
its input is an episode, and each line of its output what came of one:

    {"id": "e1", "base_url": "http://...", "key": "...", "task": {...}}
    {"id": "e1", "exit_status": "Submitted", "submission": "41\n", "steps": 4}

It stays up for many episodes, because Python and litellm take seconds to start.
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from shop_desk.shop import order_of

from command_line.desk import AGENT, MODEL, environment, lay_out

EPISODES_AT_ONCE_MAX = 128


def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Let mini-swe-agent serve one customer, in a folder of its own."""
    order = order_of(episode["task"])
    with tempfile.TemporaryDirectory(prefix="desk-") as name:
        lay_out(Path(name), order)
        where = {"api_base": episode["base_url"], "api_key": episode["key"]}
        model = LitellmModel(
            model_name="openai/policy", model_kwargs=where, cost_tracking="ignore_errors", **MODEL
        )
        agent = DefaultAgent(model, LocalEnvironment(**environment(Path(name))), **AGENT)
        end = agent.run(order.question)
    return {**end, "steps": agent.n_calls}


def main() -> None:
    """Play what comes in; the end of the input ends what is still played, too."""
    # Others may print; what they say goes to stderr.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pool = ThreadPoolExecutor(EPISODES_AT_ONCE_MAX)
    for line in sys.stdin:
        pool.submit(_play_line, json.loads(line), results)
    # Who asked is gone. Threads would go on for minutes, because mini-swe-agent asks ten times.
    os._exit(0)


def _play_line(episode: dict[str, Any], results: IO[str]) -> None:
    try:
        said = play(episode)
    except Exception as error:  # noqa: BLE001 - whatever it is, the episode failed and others go on
        said = {"error": f"{type(error).__name__}: {error}"}
    # One write of a whole line, so that lines of threads do not mix.
    results.write(json.dumps({"id": episode["id"], **said}) + "\n")


if __name__ == "__main__":
    main()
