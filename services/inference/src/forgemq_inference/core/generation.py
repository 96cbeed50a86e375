"""What the engine is asked for one request, and the record that its answer becomes.

SGLang returns the log-probability of each sampled token after dividing the logits by the
temperature, penalties included, over the whole vocabulary. If nothing truncates the support, that
is exactly the sampling distribution. At temperature 0 it returns that of the model's own
distribution; the record then says temperature 0 and support `greedy`. Log-probabilities under top-p
and top-k are not renormalised. Those under a constraint are: SGLang masks the logits first, so that
they are of what the constraint allows, and a token that it dictates has 0. The trainer knows no
mask and computes over the whole vocabulary: none of these tokens ever train.
"""

import math
from typing import Any, NamedTuple

from msgspec import Raw

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import (
    Constraint,
    FinishedCompletion,
    RequestedCompletion,
    TopTokens,
    WeightSpan,
)
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.repetition import RepetitionStop
from forgemq_inference.core.context import TOKEN_BYTES, TokenContext
from forgemq_inference.core.engine_answer import (
    EngineAnswer,
    EngineCached,
    EngineFinish,
    EngineMeta,
    EngineSpan,
    InvalidAnswerError,
    check_output,
    packed_logprobs,
)
from forgemq_inference.core.engine_limits import EngineLimits, overflow, unreadable
from forgemq_inference.core.lane import CANCELLED, Refused
from forgemq_inference.core.repetition import NO_REPETITION_STOP, repetition_parameters
from forgemq_inference.core.routes import Experts, InvalidRoutesError, packed_routes
from forgemq_inference.core.support import GREEDY_BELOW, support_of
from forgemq_inference.core.weights import Weights, weights_of_name

_STREAM_INTERVAL_TOKENS = 4
"""Each event of a streamed answer has all tokens and log-probabilities before it."""

_CONSTRAINT_REFUSALS = ("Failed to compile", "Grammar preprocessing", "Grammar-based generation")
"""How SGLang 0.5.23's errors begin that are about a grammar (its `GrammarManager`)."""


class Timing(NamedTuple):
    """Seconds a request waited before the engine took it, in the engine, and there by itself."""

    queued_s: float
    engine_s: float
    alone_s: float | None = None


NOT_STARTED = Timing(0.0, 0.0)


def timing_of(meta: EngineMeta, *, queued_s: float, waited_s: float) -> Timing:
    """Timing of a request, with its wait inside the engine counted as queueing."""
    inside_s = max(0.0, min(waited_s, meta.queue_time or 0.0))
    return Timing(queued_s + inside_s, max(0.0, waited_s - inside_s))


def generate_body(
    request: RequestedCompletion,
    *,
    rid: str,
    context: TokenContext,
    limits: EngineLimits,
    weights: Weights,
    repetition: RepetitionStop = NO_REPETITION_STOP,
) -> dict[str, Any] | Refused:
    """The body of /generate, or why the engine must not see this request.

    Args:
        request: Its own tokens are checked against the vocabulary.
        rid: The engine's name for the request.
        context: All tokens that the engine reads.
        limits: Of the engine.
        weights: That the engine holds; K/V is filed under their name and found under no other.
        repetition: Ends outputs of which a constraint dictates nothing.
    """
    tokens_count = context.tokens_count
    room = limits.context_tokens_max - tokens_count
    if room < 1 or tokens_count > limits.input_tokens_max:
        return overflow(tokens_count, limits)
    if (refused := unreadable(context, request.context, limits=limits)) is not None:
        return refused
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": Raw(b"[" + context.text + b"]"),
        "return_logprob": True,
        "extra_key": weights.name,
        "sampling_params": sampling_parameters(
            request.sampling, tokens_max=room, constraint=request.constraint
        ),
    }
    body["sampling_params"] |= repetition_parameters(repetition, constraint=request.constraint)
    if request.is_live:
        body["stream"] = True
        body["sampling_params"]["stream_interval"] = _STREAM_INTERVAL_TOKENS
    if request.top_tokens:
        body["top_logprobs_num"] = request.top_tokens
    if _recorded_experts(request, limits) is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": tokens_count - 1}
    return body


def sampling_parameters(
    sampling: Sampling, *, tokens_max: int, constraint: Constraint | None = None
) -> dict[str, Any]:
    """SGLang's parameters for one request of at most `tokens_max` output tokens."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "max_new_tokens": min(sampling.max_tokens, tokens_max),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "skip_special_tokens": False,
    }
    if constraint is not None:
        parameters["structural_tag"] = constraint.structural_tag
    return parameters


def finished_completion(
    request: RequestedCompletion,
    answer: EngineAnswer,
    *,
    limits: EngineLimits,
    timing: Timing,
    is_cancelled: bool,
) -> FinishedCompletion:
    """The record of a generation.

    Args:
        request: The request as it was read.
        answer: The engine's, to the body from `generate_body`.
        limits: The same as there.
        timing: Of the request.
        is_cancelled: If the engine aborted: whether it did so because of a cancellation.

    Raises:
        InvalidAnswerError: tokens, log-probabilities, spans and routes do not fit together, or the
            request did not ask for such an output.
    """
    meta = answer.meta_info
    reason = meta.finish_reason.type
    if reason not in ("stop", "length"):
        message = meta.finish_reason.message or "aborted"
        return refused_completion(
            request, _aborted(message, is_cancelled=is_cancelled), timing=timing
        )
    check_output(answer.output_ids, request.sampling, limits)
    logprobs = _logprobs(answer)
    tiers = meta.cached_tokens_details or EngineCached()
    is_greedy = request.sampling.temperature < GREEDY_BELOW
    return completion_record(
        request,
        finish_reason="stop" if reason == "stop" else "length",
        output=pack_ids(answer.output_ids),
        stop_string=_stop_string(meta.finish_reason),
        repeated_tokens=meta.finish_reason.repeated,
        logprobs=logprobs,
        top_tokens=_top_tokens(answer, request.top_tokens),
        temperature=0.0 if is_greedy else request.sampling.temperature,
        support=support_of(request.sampling, constraint=request.constraint),
        spans=spans_of(meta, tokens_count=len(answer.output_ids)),
        routes=_routes(answer, _recorded_experts(request, limits)),
        queued_s=timing.queued_s,
        engine_s=timing.engine_s,
        alone_s=timing.alone_s,
        cached_tokens=meta.cached_tokens,
        cached_tokens_host=tiers.host,
        cached_tokens_storage=tiers.storage,
        retractions=meta.num_retractions,
        verifications=meta.spec_verify_ct,
    )


def refused_completion(
    request: RequestedCompletion, reason: Refused, *, timing: Timing = NOT_STARTED
) -> FinishedCompletion:
    """The FinishedCompletion of a request that failed; it never counts as its completion."""
    return completion_record(
        request,
        finish_reason=reason.finish_reason,
        failure=reason.failure,
        error=reason.error,
        is_constraint_refused=request.constraint is not None
        and any(words in reason.error for words in _CONSTRAINT_REFUSALS),
        queued_s=timing.queued_s,
        engine_s=timing.engine_s,
    )


def cached_by_tier(record: FinishedCompletion) -> dict[str, int]:
    """Tokens of `cached_tokens` by where they were: `device` is the engine's own cache."""
    elsewhere = record.cached_tokens_host + record.cached_tokens_storage
    return {
        "device": max(0, record.cached_tokens - elsewhere),
        "host": record.cached_tokens_host,
        "storage": record.cached_tokens_storage,
    }


def spans_of(meta: EngineMeta, *, tokens_count: int) -> tuple[WeightSpan, ...]:
    """Weight versions over the output, without gaps, neighbours of one version joined.

    Raises:
        InvalidAnswerError: the spans have gaps, or a name has no lineage and version.
    """
    if tokens_count == 0:
        return ()
    spans = meta.weight_versions or [EngineSpan(meta.weight_version, 0, tokens_count)]
    joined: list[WeightSpan] = []
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            raise InvalidAnswerError(f"weight spans have a gap at {position}: {spans}")
        position = span.end
        if span.end == span.start:
            continue
        weights = _weights(span.version)
        if joined and (joined[-1].lineage, joined[-1].version) == weights:
            start = joined.pop().start
        else:
            start = span.start
        joined.append(WeightSpan(start=start, end=span.end, lineage=weights[0], version=weights[1]))
    if position != tokens_count:
        raise InvalidAnswerError(f"weight spans cover {position} of {tokens_count} tokens")
    return tuple(joined)


def _weights(name: str) -> Weights:
    weights = weights_of_name(name)
    if weights is None:
        raise InvalidAnswerError(f"weights are named {name!r}, not <lineage>.<version>")
    return weights


def _logprobs(answer: EngineAnswer) -> bytes:
    entries = answer.meta_info.output_token_logprobs
    if len(entries) != len(answer.output_ids):
        raise InvalidAnswerError(
            f"{len(answer.output_ids)} tokens but {len(entries)} log-probabilities"
        )
    if [entry[1] for entry in entries] != answer.output_ids:
        raise InvalidAnswerError("log-probabilities are of other tokens than the output")
    return packed_logprobs(entry[0] for entry in entries)


def _top_tokens(answer: EngineAnswer, number: int) -> TopTokens | None:
    if not number:
        return None
    rows = [row or [] for row in answer.meta_info.output_top_logprobs]
    if [len(row) for row in rows] != [number] * len(answer.output_ids):
        raise InvalidAnswerError(f"there are not {number} tokens beside each output token")
    entries = [entry for row in rows for entry in row]
    # The engine writes no number if a constraint forbids the token.
    logprobs = [-math.inf if entry[0] is None else entry[0] for entry in entries]
    return TopTokens(ids=pack_ids(entry[1] for entry in entries), logprobs=pack_floats(logprobs))


def _recorded_experts(request: RequestedCompletion, limits: EngineLimits) -> Experts | None:
    """The model's experts if the engine is asked for routes: only for tokens that may train."""
    may_train = support_of(request.sampling, constraint=request.constraint) == "full"
    return limits.experts if limits.records_routes and may_train else None


def _routes(answer: EngineAnswer, experts: Experts | None) -> bytes:
    if experts is None or not answer.output_ids:
        return b""
    recorded = answer.meta_info.routed_experts
    if recorded is None:
        raise InvalidAnswerError("routes were asked for and are not there")
    try:
        return packed_routes(recorded, tokens_count=len(answer.output_ids), experts=experts)
    except InvalidRoutesError as error:
        raise InvalidAnswerError(str(error)) from error


def _stop_string(finish: EngineFinish) -> str:
    """The stop string that ended the output; its tokens are in the output."""
    return finish.matched if isinstance(finish.matched, str) else ""


def _aborted(message: str, *, is_cancelled: bool) -> Refused:
    if is_cancelled:
        return CANCELLED
    return Refused("abort", "engine", f"engine: {message}")


def completion_record(request: RequestedCompletion, **fields: object) -> FinishedCompletion:
    """The record of this request with these fields of its end."""
    skipped_bytes = 0 if request.is_delta else request.shared_prefix_tokens * TOKEN_BYTES
    return FinishedCompletion(
        request_id=request.request_id,
        attempt=request.attempt,
        episode_id=request.episode_id,
        group_id=request.group_id,
        lane=request.lane,
        epoch=request.epoch,
        turn=request.turn,
        parent_id=request.parent_id,
        shared_prefix_tokens=request.shared_prefix_tokens,
        context=request.context[skipped_bytes:],
        **fields,  # type: ignore[arg-type]  # each caller names fields of the record
    )
