"""What the engine is asked about an output that came with its request, and the record of it.

The engine reads context and output and samples nothing. Its log-probabilities of the output's
tokens are those that a sampled output would have at temperature 1.
"""

from typing import Any

from msgspec import Raw

from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion, RequestedCompletion, WeightSpan
from forgemq_inference.core.context import TOKEN_BYTES, TokenContext
from forgemq_inference.core.engine_answer import EngineAnswer, InvalidAnswerError, packed_logprobs
from forgemq_inference.core.engine_limits import EngineLimits, overflow, unreadable
from forgemq_inference.core.generation import Timing, completion_record, refused_completion
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.weights import Weights, weights_of_name


class WeightsChangedError(Exception):
    """Other weights ended the reading of an output than began it: nobody knows which ones read."""


def read_logprobs(answer: EngineAnswer, output: bytes) -> bytes:
    """Log-probability of each output token that the engine has read, float32.

    Raises:
        InvalidAnswerError: the answer is about other tokens, or one has no log-probability.
    """
    ids = unpack_ids(output)
    entries = answer.meta_info.input_token_logprobs[-len(ids) :]
    if [token for _, token, _ in entries] != list(ids):
        raise InvalidAnswerError("the engine answered about other tokens than it was asked about")
    return packed_logprobs(value for value, _, _ in entries)


def reading_fields(context: TokenContext, output: bytes) -> dict[str, Any]:
    """Fields of /generate with which an engine reads context and output, and samples nothing.

    SGLang's log-probabilities begin with the token after `logprob_start_len`, so that of the first
    output token needs the one before it.
    """
    return {
        "input_ids": Raw(b"[" + context.extended(output).text + b"]"),
        "return_logprob": True,
        "logprob_start_len": max(0, context.tokens_count - 1),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }


def reading_body(
    request: RequestedCompletion,
    *,
    rid: str,
    context: TokenContext,
    limits: EngineLimits,
    weights: Weights,
) -> dict[str, Any] | Refused:
    """The body of /generate for a given output, or why the engine must not see it."""
    tokens_count = context.tokens_count + len(request.given) // TOKEN_BYTES
    if tokens_count >= limits.context_tokens_max or tokens_count > limits.input_tokens_max:
        return overflow(tokens_count, limits)
    refused = unreadable(context, request.context + request.given, limits=limits)
    if refused is not None:
        return refused
    return {"rid": rid, "extra_key": weights.name, **reading_fields(context, request.given)}


def read_completion(
    request: RequestedCompletion,
    answer: EngineAnswer,
    *,
    weights: Weights,
    timing: Timing,
) -> FinishedCompletion:
    """The record of a given output that the engine has read.

    Args:
        request: As it was read.
        answer: The engine's, to the body from `reading_body`.
        weights: That the lane served when it asked.
        timing: Of the request.

    Raises:
        InvalidAnswerError: tokens and log-probabilities do not fit together.
        WeightsChangedError: the weights changed while it was read.
    """
    meta = answer.meta_info
    if meta.finish_reason.type not in ("stop", "length"):
        reason = meta.finish_reason.message or "aborted"
        return refused_completion(
            request, Refused("abort", "engine", f"engine: {reason}"), timing=timing
        )
    if weights_of_name(meta.weight_version) != weights:
        raise WeightsChangedError(
            f"weights {meta.weight_version!r} ended what {weights.name!r} began to read"
        )
    return completion_record(
        request,
        finish_reason="stop",
        output=request.given,
        is_given=True,
        logprobs=read_logprobs(answer, request.given),
        temperature=1.0,
        support="full",
        spans=(_span(request.given, weights),),
        queued_s=timing.queued_s,
        engine_s=timing.engine_s,
        alone_s=timing.alone_s,
        cached_tokens=meta.cached_tokens,
        retractions=meta.num_retractions,
    )


def _span(output: bytes, weights: Weights) -> WeightSpan:
    tokens = len(output) // TOKEN_BYTES
    return WeightSpan(start=0, end=tokens, lineage=weights.lineage, version=weights.version)
