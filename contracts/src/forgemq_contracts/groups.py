"""Groups of sibling rollouts, from requested to retired."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.curriculum import TaskNumber, TaskResult
from forgemq_contracts.fields import (
    CompletionId,
    DomainName,
    EpisodeId,
    GroupId,
    JsonBytes,
    Lineage,
    NamedValue,
    Offset,
    Partition,
    Purpose,
    Sha256,
    Source,
    Step,
    TimeMs,
    TokenCount,
    TruncationCause,
    Version,
)
from forgemq_contracts.rules import check_json, check_number, check_trainable

GroupSize: TypeAlias = Annotated[
    int, Meta(ge=1, le=4096, description="G, the number of rollouts of one task.")
]
QueueIndex: TypeAlias = Annotated[
    int, Meta(ge=0, description="Position in the generation queue Q of the domain; gap-free.")
]
StageIndex: TypeAlias = Annotated[int, Meta(ge=0, description="Index of a stage of the run file.")]
NotTrainable: TypeAlias = Literal["", "zero_variance", "failed", "evaluated"]
RetireReason: TypeAlias = Literal[
    "trained", "zero_variance", "stale", "failed", "expired", "cancelled", "evaluated"
]


class RequestedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent asks for a group; written once for each idempotency key, and never refused later."""

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    group_size: GroupSize
    task: Annotated[
        JsonBytes,
        Meta(description="The task as its source made it; only the user's code reads it."),
    ]
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=200)]
    requested_ms: TimeMs
    temperature: Annotated[
        float | None, Meta(description="Replaces the run's temperature; 0 is greedy.")
    ] = None
    round_name: Annotated[
        str, Meta(max_length=80, description="Evaluation round the group belongs to.")
    ] = ""
    source: Source = "agent"
    stage: Annotated[
        StageIndex | None,
        Meta(description="Says context limit and sampling; None: as the queue has them."),
    ] = None
    task_number: Annotated[
        TaskNumber | None, Meta(description="As a curriculum chose it; None without one.")
    ] = None
    results_known: Annotated[
        int, Meta(ge=0, description="Results of its domain that the choice was made from.")
    ] = 0

    def __post_init__(self) -> None:
        check_json("task", self.task)
        check_trainable(self.purpose, source=self.source)


class AdmittedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The group has a slot; the order of these records is the generation queue Q."""

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    group_size: GroupSize
    task: JsonBytes
    version_at_admission: Annotated[
        Version, Meta(description="Oldest version that its tokens may be sampled from.")
    ]
    queue_index: Annotated[
        QueueIndex | None, Meta(description="None for evaluation groups: they take no slot.")
    ] = None
    temperature: float | None = None
    round_name: str = ""
    lineage_at_admission: Annotated[
        Lineage,
        Meta(description="Lanes behind it and version_at_admission get none of its requests."),
    ] = 0
    source: Source = "agent"
    stage: Annotated[StageIndex | None, Meta(description="As it was requested.")] = None

    def __post_init__(self) -> None:
        check_json("task", self.task)


class ClosedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The group is past its deadline: its unfinished episodes end, the finished ones are scored.

    At most one for each admitted group. The gateway ends the episodes as failed, so that they are
    masked; the group then goes the way of every group.
    """

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    detail: str = ""


class ScoredCompletion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trainable completion with its return-to-go and its advantage."""

    completion_id: CompletionId
    offset: Annotated[Offset, Meta(description="In the group's partition of finished-completions.")]
    episode_index: Annotated[int, Meta(ge=0)]
    sequence: Annotated[int, Meta(ge=0, description="Admission order within the episode.")]
    return_to_go: float
    advantage: float
    parent_id: CompletionId | None = None

    def __post_init__(self) -> None:
        check_number("return_to_go", self.return_to_go)
        check_number("advantage", self.advantage)


class EpisodeScore(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one episode of the group ended, for people and for the evaluation report."""

    episode_id: EpisodeId
    outcome: float
    speed: float
    process: Annotated[float, Meta(description="Sum over the episode's completions.")]
    total: Annotated[float, Meta(description="alpha * process + beta * speed + outcome.")]
    is_masked: bool = False
    metrics: tuple[NamedValue, ...] = ()
    truncated_by: TruncationCause | None = None


class ScoredGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every episode of the group has ended and is graded; exactly one for each admitted group."""

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    episodes: tuple[EpisodeScore, ...]
    completions: Annotated[
        tuple[ScoredCompletion, ...], Meta(description="By episode index, then sequence.")
    ] = ()
    not_trainable: NotTrainable = ""
    detail: str = ""
    temperature: float | None = None
    round_name: str = ""


class MergedGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the scheduler decides by; exactly one for each scored group."""

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    partition: Annotated[Partition, Meta(description="Of merged-trees, where the tree is.")]
    tree_sha256: Annotated[Sha256 | None, Meta(description="None if there is no tree.")] = None
    tree_tokens: TokenCount = 0
    loss_tokens: Annotated[TokenCount, Meta(description="Number of loss entries.")] = 0
    attention_pairs: Annotated[int, Meta(ge=0, description="Sum of depth + 1 over the tree.")] = 0
    request_tokens: Annotated[
        TokenCount, Meta(description="Tokens if each request were one training sample.")
    ] = 0
    append_tokens: Annotated[
        TokenCount, Meta(description="Tokens after append-only merging of each episode.")
    ] = 0
    version_min: Annotated[
        Version, Meta(description="Oldest version that sampled a loss token.")
    ] = 0
    not_trainable: NotTrainable = ""
    detail: str = ""
    scored: Annotated[int, Meta(ge=0, description="Episodes that are not masked.")] = 0
    solved: Annotated[int, Meta(ge=0, description="Those with an outcome of at least 0.5.")] = 0


class RetiredGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group is over; exactly one for each admitted group (G1).

    Also for a group that was never admitted because its request does not decode.
    """

    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    reason: RetireReason
    queue_index: QueueIndex | None = None
    step: Annotated[Step | None, Meta(description="Only if the reason is trained.")] = None
    detail: str = ""
    result: Annotated[
        TaskResult | None, Meta(description="Of a training group with a task number.")
    ] = None
