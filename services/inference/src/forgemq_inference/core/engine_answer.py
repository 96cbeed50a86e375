"""What an engine answers to /generate, and which answers cannot be true.

An engine may have an error, or be another server than the lane's. What it says becomes a record
that many services read, so nothing gets there that a reader cannot use.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.arrays import pack_floats
from forgemq_contracts.completions import WeightSpan
from forgemq_contracts.episodes import Sampling
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.weights import Weights

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Also a token's id. An answer with a number that no record can have is unreadable."""

_FLOAT32_MAX = 3.4e38
_LOGPROB_MAX = 0.01
"""Above 0 by the rounding of an engine's kernels."""


class EngineSpan(Struct, frozen=True):
    """Output tokens [start, end) and the name of the weights that sampled them."""

    version: str
    start: int
    end: int


class EngineFinish(Struct, frozen=True):
    """Why the engine stopped: the stop token or string that matched, `message` if it aborted.

    `repeated` is set by ForgeMQ's plug-in of SGLang: tokens of a run that ended the output.
    """

    type: str
    message: str | None = None
    matched: int | str | list[int] | None = None
    repeated: Count = 0


class EngineCached(Struct, frozen=True):
    """Where the engine found K/V of the context: tokens of each tier beside its own cache."""

    host: Count = 0
    storage: Count = 0


class EngineMeta(Struct, frozen=True):
    """What SGLang 0.5.23 returns about a generation, as far as it is used."""

    finish_reason: EngineFinish
    weight_version: str = ""
    weight_versions: list[EngineSpan] | None = None
    output_token_logprobs: list[tuple[float | None, Count, str | None]] = []
    input_token_logprobs: list[tuple[float | None, Count, str | None]] = []
    output_top_logprobs: list[list[tuple[float | None, Count, str | None]] | None] = []
    cached_tokens: Count = 0
    cached_tokens_details: EngineCached | None = None
    num_retractions: Count = 0
    spec_verify_ct: Count = 0
    queue_time: float | None = None
    routed_experts: bytes | None = None


class EngineProgress(Struct, frozen=True):
    """All tokens so far, from one event of a streamed /generate."""

    output_ids: list[Count]


class EngineAnswer(Struct, frozen=True):
    """The body of a successful /generate, or the last event of a streamed one."""

    output_ids: list[Count]
    meta_info: EngineMeta


class InvalidAnswerError(Exception):
    """The engine's answer contradicts itself or what it was asked; the text says how."""


def check_weights(spans: Iterable[WeightSpan], *, oldest: Weights, newest: Weights) -> None:
    """Refuse an output of weights that the engine of this lane cannot have.

    Such an engine is another one at the same address, or one that somebody else loads. Staleness
    and K/V would be counted for weights that nobody has published.

    Args:
        spans: Of the output.
        oldest: What the lane served when it asked.
        newest: The newest that are published.

    Raises:
        InvalidAnswerError: names the weights.
    """
    for span in spans:
        weights = Weights(span.lineage, span.version)
        if not oldest <= weights <= newest:
            raise InvalidAnswerError(
                f"sampled with weights {weights.name}, and the lane has {oldest.name} to "
                f"{newest.name}"
            )


def packed_logprobs(values: Iterable[float | None]) -> bytes:
    """Log-probabilities as float32.

    Raises:
        InvalidAnswerError: one is missing, not finite, or above 0.
    """
    checked = []
    for value in values:
        if value is None or not -_FLOAT32_MAX <= value <= _LOGPROB_MAX:
            raise InvalidAnswerError(f"the engine gave {value} for a log-probability")
        checked.append(value)
    return pack_floats(checked)


def check_output(ids: list[int], sampling: Sampling, limits: EngineLimits) -> None:
    """Refuse tokens that were not asked for; raises InvalidAnswerError."""
    if len(ids) > sampling.max_tokens:
        raise InvalidAnswerError(
            f"{len(ids)} tokens, and at most {sampling.max_tokens} were asked for"
        )
    if ids and max(ids) >= limits.vocabulary_size:
        raise InvalidAnswerError(
            f"token {max(ids)} is outside the vocabulary of {limits.vocabulary_size}"
        )
