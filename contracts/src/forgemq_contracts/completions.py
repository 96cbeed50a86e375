"""Completions: one request to the policy and what it sampled."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.context_cuts import ContextCut
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.fields import (
    CompletionId,
    EpisodeId,
    Epoch,
    ForkReason,
    GroupId,
    JsonBytes,
    Lane,
    Lineage,
    LogProbabilities,
    Seconds,
    TimeMs,
    TokenCount,
    TokenIds,
    Version,
)
from forgemq_contracts.rules import (
    check_finite,
    check_ids,
    check_items,
    check_json_object,
    check_json_objects,
    check_routes,
)

FinishReason: TypeAlias = Annotated[
    Literal["stop", "length", "abort", "error"],
    Meta(description="abort and error are never the completion: another attempt follows."),
]
FailureKind: TypeAlias = Annotated[
    Literal["cancelled", "context_missing", "context_overflow", "deadline", "engine"],
    Meta(
        description="Why an attempt gave no completion. cancelled: nobody waits for it. "
        "context_missing: the lane does not hold the parent, so send the whole context. "
        "context_overflow: too long for the engine, so every attempt fails. deadline: it passed. "
        "engine: the engine or its lane failed, so another attempt may succeed."
    ),
]
Support: TypeAlias = Annotated[
    Literal["full", "top_p", "top_k", "grammar", "penalty", "greedy"],
    Meta(description="Anything but full is truncated support: context and not loss (G4)."),
]


CONSTRAINT_CHARACTERS_MAX = 256 * 1024
"""Tens of times the schemas of real agents; an engine takes seconds to compile more."""


class Constraint(Struct, frozen=True, kw_only=True):
    """The only outputs that a completion may have; its support is then `grammar`."""

    structural_tag: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=CONSTRAINT_CHARACTERS_MAX,
            description="A structural tag of XGrammar as JSON, over the whole output: what SGLang "
            "takes as the sampling parameter of this name.",
        ),
    ]

    def __post_init__(self) -> None:
        check_json_object("structural_tag", self.structural_tag.encode())


class TurnPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway needs to rebuild the episode's message tree, as a delta."""

    sequence: Annotated[int, Meta(ge=0, description="Admission order within the episode.")]
    protocol: Literal["chat_completions", "messages", "responses", "completions"]
    body_digest: Annotated[str, Meta(description="blake2b of the body without stream fields.")]
    ordinal: Annotated[
        int,
        Meta(ge=0, description="Counts the same body, sent again after it was delivered in full."),
    ] = 0
    is_fork: Annotated[
        bool,
        Meta(
            description="The whole history was rendered again: `messages` is all of it, and the "
            "parent only says how many leading tokens are the same."
        ),
    ] = False
    fork_reason: Annotated[
        ForkReason | None, Meta(description="None if it is no fork, or was recorded without one.")
    ] = None
    tools_digest: str = ""
    tools: Annotated[
        bytes, Meta(description="JSON array; empty if the parent has the same tools.")
    ] = b""
    messages: Annotated[
        JsonBytes, Meta(description="JSON array of the messages after the parent's reply.")
    ] = b"[]"
    message_digests: Annotated[
        tuple[str, ...], Meta(description="Match key of each message in `messages`.")
    ] = ()
    message_ends: Annotated[
        tuple[int, ...],
        Meta(description="Index in the context after the last token of each message."),
    ] = ()
    asked: Annotated[bytes, Meta(description="Sampling fields as the client sent them, JSON.")] = (
        b""
    )
    after_offset: Annotated[
        int | None,
        Meta(
            description="Offset of the episode's newest completion that the gateway had when this "
            "was requested: what a client can have waited for. -1: none. None: not recorded."
        ),
    ] = None
    cuts: Annotated[
        tuple[ContextCut, ...],
        Meta(
            description="What the agent says that it did to its context before this request, in "
            "order. () if it did nothing, or says nothing."
        ),
    ] = ()

    def __post_init__(self) -> None:
        if self.tools:
            check_json_objects("tools", self.tools)
        check_json_objects("messages", self.messages)
        if self.asked:
            check_json_object("asked", self.asked)


TOP_TOKENS_MAX = 20
"""What OpenAI's clients may ask for."""


class TopTokens(Struct, frozen=True, kw_only=True):
    """The most likely tokens beside each output token, the same number of them for each."""

    ids: Annotated[TokenIds, Meta(description="int32[output tokens, number], most likely first.")]
    logprobs: Annotated[
        LogProbabilities,
        Meta(description="Of these tokens; minus infinity for what a constraint forbids."),
    ]

    def __post_init__(self) -> None:
        check_items("logprobs", self.logprobs, count=check_ids("ids", self.ids))


class RequestedCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a completion, for one lane; all attempts have the same request id."""

    request_id: CompletionId
    attempt: Annotated[int, Meta(ge=0)]
    episode_id: EpisodeId
    group_id: GroupId
    lane: Lane
    epoch: Epoch
    sampling: Sampling
    deadline_ms: TimeMs
    requested_ms: TimeMs
    turn: TurnPart
    parent_id: CompletionId | None = None
    shared_prefix_tokens: Annotated[
        TokenCount,
        Meta(description="Leading tokens that the parent's context and output also begin with."),
    ] = 0
    context: Annotated[
        TokenIds, Meta(description="All context tokens, or those after the shared prefix.")
    ] = b""
    is_delta: Annotated[
        bool, Meta(description="True: `context` starts after the shared prefix of the parent.")
    ] = False
    constraint: Annotated[
        Constraint | None, Meta(description="None: the output may be anything.")
    ] = None
    top_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=TOP_TOKENS_MAX,
            description="How many of the most likely tokens to record beside each output token.",
        ),
    ] = 0
    is_live: Annotated[
        bool,
        Meta(description="A client reads the tokens while they are sampled: write them as chunks."),
    ] = False
    given: Annotated[
        TokenIds,
        Meta(
            description="The output, of a conversation that was finished elsewhere: the engine "
            "reads it and samples nothing. b'': the engine samples."
        ),
    ] = b""

    def __post_init__(self) -> None:
        check_ids("given", self.given)
        count = check_ids("context", self.context)
        _check_prefix(self.parent_id, self.shared_prefix_tokens)
        if not self.is_delta and count < self.shared_prefix_tokens:
            raise ValueError(
                f"context: has {count} tokens, {self.shared_prefix_tokens} are shared already"
            )


class CancelledCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nobody waits for this attempt; the lane may stop."""

    request_id: CompletionId
    attempt: Annotated[int, Meta(ge=0)]
    lane: Lane
    group_id: GroupId | None = None


class SampledChunk(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some tokens of an attempt that is still sampled, for a client that reads along.

    Nothing depends on it: the completion's record has all tokens, and a lost chunk is not missed.
    """

    request_id: CompletionId
    attempt: Annotated[int, Meta(ge=0)]
    group_id: GroupId
    start: Annotated[int, Meta(ge=0, description="Tokens that the attempt sampled before these.")]
    tokens: TokenIds

    def __post_init__(self) -> None:
        check_ids("tokens", self.tokens)


class WeightSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output tokens [start, end) were sampled by one version of the weights."""

    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=0)]
    lineage: Lineage
    version: Version


class FinishedCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine sampled. The first record of a request id without error counts."""

    request_id: CompletionId
    attempt: Annotated[int, Meta(ge=0)]
    episode_id: EpisodeId
    group_id: GroupId
    lane: Lane
    epoch: Epoch
    finish_reason: FinishReason
    turn: TurnPart
    parent_id: CompletionId | None = None
    shared_prefix_tokens: TokenCount = 0
    context: Annotated[TokenIds, Meta(description="Context tokens after the shared prefix.")] = b""
    output: Annotated[TokenIds, Meta(description="Sampled tokens, or those given.")] = b""
    logprobs: Annotated[
        LogProbabilities, Meta(description="Behaviour log-probability of each output token.")
    ] = b""
    is_given: Annotated[
        bool,
        Meta(
            description="The output was given with the request: nothing was sampled, and the "
            "log-probabilities are those that the weights of `spans` have for it."
        ),
    ] = False
    top_tokens: Annotated[
        TopTokens | None, Meta(description="None if the request asked for none.")
    ] = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    support: Support = "full"
    spans: Annotated[tuple[WeightSpan, ...], Meta(description="Cover the output, in order.")] = ()
    routes: Annotated[
        bytes,
        Meta(
            description="int16[output tokens, layers, top_k], little-endian: expert routes of the "
            "engine's newest pass over the token before each output token. That is the pass that "
            "sampled it, unless the engine retracted the request after it. b'' for dense models, "
            "truncated support, or if none were recorded."
        ),
    ] = b""
    queued_s: Annotated[
        Seconds, Meta(description="From when the lane read the request until its engine took it.")
    ] = 0.0
    engine_s: Annotated[Seconds, Meta(description="Prefill and decode.")] = 0.0
    alone_s: Annotated[
        Seconds | None,
        Meta(
            description="engine_s over the slowdown by the mean batch that it ran in, by the "
            "engine's own measured steps. None: not recorded."
        ),
    ] = None
    cached_tokens: Annotated[
        TokenCount, Meta(description="Context tokens that the engine did not have to compute.")
    ] = 0
    cached_tokens_host: Annotated[
        TokenCount,
        Meta(description="Of cached_tokens: from the host memory of an engine with a pool."),
    ] = 0
    cached_tokens_storage: Annotated[
        TokenCount, Meta(description="Of cached_tokens: from the pool that engines share.")
    ] = 0
    retractions: Annotated[int, Meta(ge=0)] = 0
    verifications: Annotated[
        int,
        Meta(
            ge=0,
            description="Passes of the policy over drafted tokens; output tokens without those of "
            "a prefill, over them, is the acceptance length. 0 without speculation.",
        ),
    ] = 0
    stop_string: Annotated[
        str,
        Meta(
            description="The stop string that ended the output, which has its tokens; the client's "
            "text ends before it. '' if a token or a limit ended it."
        ),
    ] = ""
    repeated_tokens: Annotated[
        TokenCount,
        Meta(
            description="The output ended because so many tokens in a row were each nearly "
            "certain (`episodes.repetition_stop`); finish_reason is then length. 0 if not."
        ),
    ] = 0
    teacher_logprobs: Annotated[
        LogProbabilities,
        Meta(
            description="Of each output token under the teacher of `[distillation]`; b'' without "
            "one, if it did not answer, or if the output does not train."
        ),
    ] = b""
    error: Annotated[
        str, Meta(description="The failure in words, for people; '' for a completion.")
    ] = ""
    failure: Annotated[
        FailureKind | None, Meta(description="What kind of failure; None for a completion.")
    ] = None
    is_constraint_refused: Annotated[
        bool,
        Meta(
            description="Of the failure `engine`: the engine cannot compile the constraint, so "
            "every attempt fails."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_ids("context", self.context)
        count = check_ids("output", self.output)
        check_finite("logprobs", self.logprobs, count=count)
        check_routes("routes", self.routes, count=count)
        if self.teacher_logprobs:
            check_finite("teacher_logprobs", self.teacher_logprobs, count=count)
        if self.top_tokens is not None and count and len(self.top_tokens.ids) % len(self.output):
            raise ValueError(f"top_tokens: not the same number for each of {count} output tokens")
        _check_prefix(self.parent_id, self.shared_prefix_tokens)
        if self.spans:
            _check_spans(self.spans, count=count)


class DeliveredCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client is there and gets this completion to its last byte; written before that byte is."""

    request_id: CompletionId
    episode_id: EpisodeId
    group_id: GroupId
    delivered_ms: TimeMs
    is_withdrawn: Annotated[
        bool, Meta(description="The client left before the last byte: it was not delivered.")
    ] = False


def _check_prefix(parent_id: str | None, shared_prefix_tokens: int) -> None:
    if shared_prefix_tokens and parent_id is None:
        raise ValueError(
            f"shared_prefix_tokens: {shared_prefix_tokens} tokens are shared with no parent"
        )


def _check_spans(spans: tuple[WeightSpan, ...], *, count: int) -> None:
    """Refuse spans that do not cover the output, one after the other and without a gap."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise ValueError(f"spans: [{span.start}, {span.end}) does not follow token {end}")
        end = span.end
    if end != count:
        raise ValueError(f"spans: cover {end} of {count} output tokens")
