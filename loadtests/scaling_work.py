"""What waits in the load test `scaling`: an agent for its tools, and a grader for its judge."""

import asyncio
import time
from typing import Any

from forgemq_agents import Episode
from forgemq_contracts.grading import GradingEpisode

TURNS = 2
TOOL_S = 1.0
JUDGE_S = 0.5


def task(seed: int, domain: str, k: int) -> dict[str, Any]:
    """A number to talk about."""
    return {"domain": domain, "number": 1000 * seed + k}


async def play(episode: Episode) -> None:
    """Two turns with a tool after each, which takes a second."""
    await talk(episode, tool_s=TOOL_S)


async def talk(episode: Episode, *, tool_s: float = 0.0) -> None:
    """Two turns, without a tool unless it takes some time."""
    messages = [{"role": "user", "content": f"Talk about {episode.episode_id}."}]
    for _ in range(TURNS):
        completion = await episode.chat(messages)
        messages += [completion.message, {"role": "user", "content": "Go on."}]
        await asyncio.sleep(tool_s)
    episode.result = {"turns": TURNS}


def outcome(episode: GradingEpisode) -> float:
    """0 or 1 by the episode's place in its group."""
    return float(int(episode.episode_id.split(".")[-2]) % 2)


def judged_outcome(episode: GradingEpisode) -> float:
    """As `outcome`, from a judge that takes half a second and answers one at a time."""
    time.sleep(JUDGE_S)
    return outcome(episode)
