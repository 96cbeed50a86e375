"""The reward: for the right numbers. It reads the sampled text, not what the agent reports."""

import re
from collections.abc import Mapping

from archive_desk.archive import inquiry_of
from forgemq_contracts.grading import GradingEpisode

PARTLY_RIGHT_MAX = 0.4
"""For an answer with some right numbers: below 0.5, from which on an episode counts as solved.

A group in which every episode fails still has different returns, so it trains.
"""

_ENTRY = re.compile(r"([a-z]+) (\d+)")


def outcome(episode: GradingEpisode) -> float:
    """1 if the last turn answers with all numbers and no wrong one; up to 0.4 for some of them."""
    if not episode.completions:
        return 0.0
    last = episode.completions[-1]
    text = last.message.get("content")
    if last.finish_reason == "length" or last.message.get("tool_calls"):
        return 0.0
    if not isinstance(text, str) or last.malformed_tool_calls:
        return 0.0
    return score(text, inquiry_of(episode.task).wanted)


def score(answer: str, wanted: Mapping[str, int]) -> float:
    """1 if the answer's entries are these; else 0.4 times the share of them that it has."""
    entries = _ENTRY.findall(answer)
    found = {name: int(number) for name, number in entries}
    if found == wanted and len(entries) == len(wanted):
        return 1.0
    right = sum(found.get(name) == number for name, number in wanted.items())
    return PARTLY_RIGHT_MAX * right / len(wanted)
