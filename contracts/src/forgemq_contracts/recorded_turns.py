"""One turn of a played episode in full, as files of episodes have it and imports carry it."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from forgemq_contracts.completions import FinishReason, Support
from forgemq_contracts.context_cuts import ContextCut
from forgemq_contracts.fields import (
    CompletionId,
    ForkReason,
    LogProbabilities,
    TokenCount,
    TokenIds,
)
from forgemq_contracts.rules import check_finite, check_ids, check_number


class RecordedTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the policy, what it sampled, and what that earned.

    In JSON its arrays are base64 of little-endian bytes.
    """

    completion_id: CompletionId
    sequence: Annotated[int, Meta(ge=0, description="Admission order within the episode.")]
    reply: Annotated[dict[str, Any], Meta(description="The assistant's message as sent.")]
    output_ids: Annotated[TokenIds, Meta(description="int32, sampled tokens.")]
    logprobs: Annotated[
        LogProbabilities, Meta(description="float32, behaviour log-probability of each of them.")
    ]
    versions: Annotated[
        bytes, Meta(description="int32, the weight version that sampled each of them.")
    ]
    context_ids: Annotated[
        TokenIds, Meta(description="int32, context tokens after those shared with the parent.")
    ] = b""
    parent_id: CompletionId | None = None
    shared_prefix_tokens: Annotated[
        TokenCount,
        Meta(description="Leading tokens that the parent's context and output also begin with."),
    ] = 0
    is_fork: Annotated[
        bool, Meta(description="`messages` is the whole history, not what follows the parent.")
    ] = False
    fork_reason: ForkReason | None = None
    messages: Annotated[
        tuple[dict[str, Any], ...], Meta(description="Messages after the parent's reply.")
    ] = ()
    tools: Annotated[
        tuple[dict[str, Any], ...], Meta(description="What the policy could call in this turn.")
    ] = ()
    counts: Annotated[
        bool,
        Meta(description="False: nobody got the reply; another turn continues its tokens."),
    ] = True
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    support: Support = "full"
    finish_reason: FinishReason = "stop"
    process: Annotated[float | None, Meta(description="Process reward; None: none was given.")] = (
        None
    )
    return_to_go: float | None = None
    advantage: Annotated[
        float | None, Meta(description="None: its group does not train, or is not scored.")
    ] = None
    cuts: Annotated[
        tuple[ContextCut, ...],
        Meta(
            description="What the agent did to its context before this turn, in order: which "
            "function, behind which completion. What was left of it is `messages`."
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_ids("context_ids", self.context_ids)
        count = check_ids("output_ids", self.output_ids)
        check_finite("logprobs", self.logprobs, count=count)
        if check_ids("versions", self.versions) != count:
            raise ValueError(f"versions: must have {count} items, as output_ids has")
        for name in ("process", "return_to_go", "advantage"):
            check_number(name, getattr(self, name) or 0.0)
        if self.shared_prefix_tokens and self.parent_id is None:
            raise ValueError(
                f"shared_prefix_tokens: {self.shared_prefix_tokens} are shared with no parent_id"
            )
