"""The rewards that are not ready ones. They read what was sampled, not what agents report."""

import json
import re
from collections.abc import Mapping

from forgemq_contracts.grading import GradingCompletion, GradingEpisode
from forgemq_graders import SandboxLimits, code_tests
from forgemq_graders.answers import answer_code, answer_text
from four_domains import bookings, programs

PARTLY_RIGHT_MAX = 0.4
"""For an answer with some right entries: below 0.5, from which on an episode counts as solved."""

_ENTRY = re.compile(r"([a-z]+) (\d+)")


def listed(episode: GradingEpisode) -> float:
    """1 if the answer has all wanted entries and no other; up to 0.4 for some of them."""
    entries = _ENTRY.findall(answer_text(episode))
    wanted: Mapping[str, int] = episode.task["wanted"]
    found = {name: int(number) for name, number in entries}
    if found == wanted and len(entries) == len(wanted):
        return 1.0
    right = sum(found.get(name) == number for name, number in wanted.items())
    return PARTLY_RIGHT_MAX * right / len(wanted)


def _program(episode: GradingEpisode) -> str:
    return programs.with_table(answer_code(episode))


program = code_tests(limits=SandboxLimits(time_s=5.0, cpu_s=5), program=_program)
"""1 if the program returns what is expected for every hidden example: one sandbox an episode."""


def booked(episode: GradingEpisode) -> float:
    """1 if the right codes were booked, each once, and the agent ended; up to 0.4 for some."""
    codes = [code for completion in episode.completions for code in _codes(completion)]
    wanted = set(episode.task["codes"].values())
    is_ended = bool(episode.completions) and _is_end(episode.completions[-1])
    if is_ended and sorted(codes) == sorted(wanted):
        return 1.0
    return PARTLY_RIGHT_MAX * len(wanted & set(codes)) / max(len(wanted), len(codes))


def haste(episode: GradingEpisode) -> float:
    """Of a right episode, the share of the turns that it left; 0 for others."""
    if booked(episode) < 1.0:
        return 0.0
    return 1.0 - len(episode.completions) / bookings.TURNS_MAX


def bad_calls(episode: GradingEpisode) -> list[float]:
    """-1 for a turn with a call that the desk cannot answer, else 0."""
    return [-float(_is_bad(completion)) for completion in episode.completions]


def _is_bad(completion: GradingCompletion) -> bool:
    """Whether a call did not parse, or did but is of no tool or has other arguments."""
    calls = [call["function"] for call in completion.message.get("tool_calls") or ()]
    is_unfit = any(
        bookings.argument_of(call["name"], json.loads(call["arguments"])) is None for call in calls
    )
    return completion.malformed_tool_calls > 0 or is_unfit


def _codes(completion: GradingCompletion) -> list[str]:
    calls = (call["function"] for call in completion.message.get("tool_calls") or ())
    found = (
        bookings.argument_of("book", json.loads(call["arguments"]))
        for call in calls
        if call["name"] == "book"
    )
    return [code for code in found if code is not None]


def _is_end(completion: GradingCompletion) -> bool:
    has_calls = bool(completion.message.get("tool_calls")) or completion.malformed_tool_calls > 0
    return completion.finish_reason != "length" and not has_calls
