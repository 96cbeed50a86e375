"""User code of the runs that tests break: a dialogue of three turns with a reward by lot.

The reward is a keyed hash of what the policy said, so groups differ whatever the policy is, even
where an engine stands in that samples noise.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgemq_agents import Episode
from forgemq_contracts.grading import GradingEpisode

TURNS = 3
RULES = 60
TOOL_S = 0.02


def task(seed: int, domain: str, k: int, difficulty: float = 0) -> dict[str, Any]:
    """A number to talk about."""
    return {"number": 1000 * seed + k, "difficulty": difficulty}


async def play(episode: Episode) -> None:
    """Three turns; a pause between them stands for a tool."""
    await _talk(episode, tool_s=TOOL_S)
    episode.result = {"turns": TURNS}


async def play_at_pace(episode: Episode) -> None:
    """As `play`, with pauses as the file PACE_FILE has them now; the result says who played."""
    await _talk(episode, tool_s=pace_s())
    episode.result = {"turns": TURNS, "process": os.getpid()}


def pace_s() -> float:
    """The pauses that the test wants now."""
    return float(Path(os.environ["PACE_FILE"]).read_text(encoding="utf-8"))


async def _talk(episode: Episode, *, tool_s: float) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Talk about {episode.task['number']}."},
        # An engine that samples by the context alone would give siblings the same words.
        {"role": "user", "content": f"You are number {episode.episode_id.split('.')[-2]}."},
    ]
    for turn in range(TURNS):
        completion = await episode.chat(messages)
        messages += [completion.message, {"role": "user", "content": f"Go on, {turn}."}]
        await asyncio.sleep(tool_s)
        episode.tool_s += tool_s


async def play_instructed(episode: Episode) -> None:
    """As `play`, after instructions of some 500 tokens which are the same in every episode."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": " ".join(f"Rule {n}: talk." for n in range(RULES))},
        {"role": "user", "content": f"Episode {episode.episode_id}."},
    ]
    for turn in range(TURNS):
        completion = await episode.chat(messages)
        messages += [completion.message, {"role": "user", "content": f"Go on, {turn}."}]
    episode.result = {"turns": TURNS}


async def play_badly(episode: Episode) -> None:
    """An agent with a bug: it never gets to a result."""
    await episode.chat([{"role": "user", "content": "Say something."}])
    raise ValueError("out of words")


def outcome(episode: GradingEpisode) -> float:
    """0 or 1 by lot, the same for the same words."""
    return float(_digest([completion.text for completion in episode.completions])[0] % 2)


def _digest(texts: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join(texts).encode()).digest()
