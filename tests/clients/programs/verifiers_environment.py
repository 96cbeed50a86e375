"""Plays an environment of verifiers with the code of the agents service.

verifiers_environment.py SESSION_URL MODULE
"""

import asyncio
import sys
from pathlib import Path

from forgemq_agents.environments import load_environment
from forgemq_contracts.run import Evaluation


class Episode:
    """What an environment uses of an episode."""

    def __init__(self, session_url: str, task: dict) -> None:
        self.session_url, self.task = session_url, task
        self.tool_s, self.result, self.told = 0.0, {}, {}

    async def report_reward(self, name: str, value: float) -> None:
        self.told[name] = value

    def truncate(self, cause: str) -> None:
        self.told["truncated"] = cause


async def play(session_url: str, module: str) -> Episode:
    agent = load_environment(module)
    task = agent.tasks(Evaluation(), is_pool=False)(0, "d", 0)
    episode = Episode(session_url, task)
    await agent(episode)
    return episode


played = asyncio.run(play(*sys.argv[1:]))
assert 0 < played.tool_s < 60
if played.told == {"outcome": 1.0}:
    # The environment's own file is gone with its folder; its reward has read it.
    Path("out.txt").write_text("hello")
sys.stdout.write(f"{played.told}\n")
