"""Field types shared by several records: one meaning, one unit and one bound for each name."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

GroupId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9-]{1,64}$",
        description="A group of G rollouts of one task; derived from the idempotency key.",
    ),
]
EpisodeId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9-]{1,64}\.[0-9]+\.[0-9]+$",
        description="<group id>.<index in group>.<attempt>, both counted from 0.",
    ),
]
CompletionId: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{32}$",
        description="The request id: hash of episode, parent, body digest and ordinal.",
    ),
]
DomainName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[a-z0-9_]{1,40}$", description="A task domain; one queue each.")
]
Purpose: TypeAlias = Annotated[
    Literal["train", "eval"],
    Meta(description="Evaluation groups take no slot, get no tree and never train."),
]
Source: TypeAlias = Annotated[
    Literal["agent", "import", "live"],
    Meta(
        description="agent: played through the gateway. import: a conversation that was finished "
        "elsewhere; it trains only in a domain that is supervised. live: recorded from "
        "the callers of an API key, who claim no episode; it has no siblings, so it never trains."
    ),
]
Lane: TypeAlias = Annotated[
    int, Meta(ge=0, le=65535, description="One engine, one lane, one request partition.")
]
Epoch: TypeAlias = Annotated[
    int, Meta(ge=0, description="Counts the starts of the lane's inference process.")
]
Lineage: TypeAlias = Annotated[
    int, Meta(ge=0, description="Raised by every start of the trainer; fences the previous one.")
]
Version: TypeAlias = Annotated[
    int, Meta(ge=0, description="Number of trained steps in the weights; 0 is the base model.")
]
Step: TypeAlias = Annotated[
    int, Meta(ge=0, description="Optimizer step; step k turns version k into version k + 1.")
]
Partition: TypeAlias = Annotated[int, Meta(ge=0, description="Partition number.")]
Offset: TypeAlias = Annotated[int, Meta(ge=0, description="Offset of the record itself.")]
TokenCount: TypeAlias = Annotated[int, Meta(ge=0, description="Number of tokens.")]
TreeTokensMax: TypeAlias = Annotated[
    int,
    Meta(
        ge=2,
        description="A group whose tree has more tokens fails in the merger and frees its slot. "
        "None: only the trainer's memory bounds a tree, when it reads it.",
    ),
]
ShardRanks: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        description="Ranks that hold the model's parameters once, each a shard. trainer.world_size "
        "is a multiple: every further group of so many ranks holds them again. None: all ranks.",
    ),
]
ExpertRanks: TypeAlias = Annotated[
    int,
    Meta(
        ge=1,
        description="Ranks that hold each layer's experts between them, to which tokens travel. "
        "Divides trainer.shard_ranks and the number of experts. 1: experts are gathered like other "
        "weights.",
    ),
]
TokenIds: TypeAlias = Annotated[
    bytes, Meta(description="Token ids, little-endian int32, 4 bytes each.")
]
LogProbabilities: TypeAlias = Annotated[
    bytes, Meta(description="Natural log-probabilities, little-endian float32, 4 bytes each.")
]
Sha256: TypeAlias = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{64}$", description="SHA-256 in lower-case hexadecimal.")
]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, description="Duration in seconds.")]
TimeMs: TypeAlias = Annotated[
    int, Meta(ge=0, description="Wall-clock time, milliseconds since the Unix epoch.")
]
TruncationCause: TypeAlias = Annotated[
    Literal["context_full", "too_many_turns", "turn_too_long", "out_of_time", "declared"],
    Meta(
        description="The limit that the policy ran into. context_full: its messages do not fit "
        "the context window. too_many_turns: the agent's limit. turn_too_long: a completion was "
        "cut at its token limit. out_of_time: the agent's own limit. declared: any other limit "
        "of the agent, or its program failed on what the policy wrote."
    ),
]
ForkReason: TypeAlias = Annotated[
    Literal["side_request", "compaction", "edited", "other_tools", "resampled", "rewritten"],
    Meta(
        description="Why a request did not extend the recorded tokens. side_request: another "
        "conversation, such as a title's. compaction: earlier turns are left out. edited: a "
        "message or an echoed reply is changed. other_tools: the tools are changed. resampled: the "
        "same messages again. rewritten: the model's template changes earlier messages."
    ),
]
JsonBytes: TypeAlias = Annotated[bytes, Meta(description="A UTF-8 JSON document.")]

REWARD_SIZE_MAX = 1e12
"""Largest absolute value of a reward, and of the weighted sum of an episode's rewards.

Trees and gradients are float32, whose largest number is 3.4e38. An advantage is at most twice
this, so its square is at most 4e24: the trainer squares gradients that an advantage has scaled,
and has a factor of 1e13 to spare. Sums over a group are float64 and far from overflow.
"""


class NamedValue(Struct, frozen=True, kw_only=True):
    """One scalar that a user's function reports by name."""

    name: Annotated[str, Meta(min_length=1, max_length=80)]
    value: float


class BlobReference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a payload over the inline limit is; the record's header `blob` holds this."""

    uri: Annotated[str, Meta(min_length=1, description="fsspec address, content-addressed.")]
    sha256: Sha256
    size_bytes: Annotated[int, Meta(ge=0)]
    value_bytes: Annotated[
        int, Meta(ge=0, description="Of the payload, which may be compressed there; 0: not known.")
    ] = 0
