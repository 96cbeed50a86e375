"""Process rewards over calls, repetition and length; each value is from -1 to 0, one a completion.

A penalty for one turn credits that turn and those before it, as every process reward does.
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from forgemq_contracts.grading import GradingEpisode

ProcessReward: TypeAlias = Callable[[GradingEpisode], Sequence[float]]
AsyncProcessReward: TypeAlias = Callable[[GradingEpisode], Coroutine[Any, Any, Sequence[float]]]

# Scripts without spaces between words: a character counts as a word. Anything else that is no space
# and no part of a word counts by itself too, so that a row of signs is a repetition.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f]|\w+|[^\w\s]")


def weighted(*parts: tuple[float, ProcessReward]) -> ProcessReward:
    """The sum of several process rewards, each times its weight.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("weighted needs at least one pair of a weight and a process reward")

    def reward(episode: GradingEpisode) -> Sequence[float]:
        columns = [[weight * value for value in one(episode)] for weight, one in parts]
        return [sum(values) for values in zip(*columns, strict=True)]

    return reward


def weighted_async(
    *parts: tuple[float, ProcessReward | AsyncProcessReward],
) -> AsyncProcessReward:
    """As `weighted`, also of functions that are `async`, as a judge's; these run one after another.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("weighted_async needs at least one pair of a weight and a process reward")

    async def reward(episode: GradingEpisode) -> Sequence[float]:
        columns = []
        for weight, one in parts:
            found = one(episode)
            values = await found if isawaitable(found) else found
            columns.append([weight * value for value in values])
        return [sum(values) for values in zip(*columns, strict=True)]

    return reward


def malformed_calls(episode: GradingEpisode) -> Sequence[float]:
    """-1 for a completion with a tool call that could not be parsed, else 0."""
    return [-float(completion.malformed_tool_calls > 0) for completion in episode.completions]


def repetition(*, words: int = 20) -> ProcessReward:
    """Minus the share of a completion's runs of so many words that it has said before.

    0 for a completion with no more words than that. A word repeated n times without end comes near
    -1. Source: repetition penalty, arXiv 2502.03373 section 4.3; differs: it is the completion's,
    not each token's.

    Raises:
        ValueError: `words` is below 1.
    """
    if words < 1:
        raise ValueError(f"words must be at least 1, got {words}")

    def reward(episode: GradingEpisode) -> Sequence[float]:
        return [-_repeated(completion.text, words=words) for completion in episode.completions]

    return reward


def overlong(*, tokens_max: int, buffer_tokens: int) -> ProcessReward:
    """0 up to `tokens_max` - `buffer_tokens` output tokens, then falling evenly to -1.

    Source: soft overlong punishment, DAPO, arXiv 2503.14476 eq. 13, of each completion.

    Args:
        tokens_max: From here on it is -1.
        buffer_tokens: Over which it falls; the paper has 4,096 of 20,480.

    Raises:
        ValueError: `buffer_tokens` is not in 1..tokens_max.
    """
    if not 1 <= buffer_tokens <= tokens_max:
        raise ValueError(f"buffer_tokens must be in 1..{tokens_max}, got {buffer_tokens}")
    free = tokens_max - buffer_tokens

    def reward(episode: GradingEpisode) -> Sequence[float]:
        return [
            -min(1.0, max(0, completion.output_tokens - free) / buffer_tokens)
            for completion in episode.completions
        ]

    return reward


def _repeated(text: str, *, words: int) -> float:
    """Share of the text's runs of `words` words that are not their first occurrence."""
    found = _WORD.findall(text)
    runs = len(found) - words + 1
    if runs < 2:
        return 0.0
    return 1 - len({tuple(found[start : start + words]) for start in range(runs)}) / runs
