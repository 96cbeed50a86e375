"""Episodes: one rollout of one agent, from opened to graded."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import (
    CompletionId,
    DomainName,
    EpisodeId,
    ForkReason,
    GroupId,
    NamedValue,
    Offset,
    Purpose,
    Seconds,
    Source,
    TimeMs,
    TokenCount,
    TruncationCause,
)
from forgemq_contracts.groups import GroupSize
from forgemq_contracts.rules import check_number

HistoryPolicy: TypeAlias = Annotated[
    Literal["append_only", "template"],
    Meta(
        description="Earlier turns in a context: as their stored token ids, or as the model's "
        "chat template renders them."
    ),
]
StreamPolicy: TypeAlias = Annotated[
    Literal["recorded", "live"],
    Meta(
        description="What a streamed answer waits for. recorded: its completion is on the log. "
        "live: its tokens are sampled."
    ),
]
EpisodeStatus: TypeAlias = Annotated[
    Literal["completed", "aborted", "failed"],
    Meta(
        description="completed: the agent finished it. aborted: the agent gave it up; masked. "
        "failed: infrastructure (a lapsed lease, a lost engine); masked."
    ),
]


STOP_STRINGS_MAX = 32
"""What SGLang takes in one request; it refuses more."""


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters as used: those that the episode pins replace the client's."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="-1 switches it off.")] = -1
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


class ReportedReward(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reward that the agent posted; the first one with a reward_id counts."""

    reward_id: Annotated[str, Meta(min_length=1, max_length=200)]
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    value: float
    completion_id: Annotated[
        CompletionId | None, Meta(description="None credits the whole episode.")
    ] = None


class OpenedEpisode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent holds this episode; a later attempt replaces an earlier one.

    Written again with each reward that the agent posts. The newest record of an episode is the one
    that holds, with the rewards of the records before it.
    """

    episode_id: EpisodeId
    group_id: GroupId
    index: Annotated[int, Meta(ge=0)]
    attempt: Annotated[int, Meta(ge=0)]
    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="Of the episode key.")]
    sampling: Sampling
    history: HistoryPolicy
    stream: StreamPolicy = "recorded"
    context_tokens_max: Annotated[
        int, Meta(ge=0, description="Context and output together; 0: as the model's.")
    ] = 0
    lease_s: Seconds
    opened_ms: TimeMs
    rewards: tuple[ReportedReward, ...] = ()
    rewards_before: Annotated[
        int,
        Meta(ge=0, description="How many of the rewards so far come before `rewards`."),
    ] = 0
    session: Annotated[
        str,
        Meta(max_length=200, description="Of live traffic: as its caller named it; '' if not."),
    ] = ""


class ManifestEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One completion of the episode that counts: it was delivered, or a later request quotes it."""

    completion_id: CompletionId
    offset: Annotated[Offset, Meta(description="In the group's partition of finished-completions.")]
    sequence: Annotated[int, Meta(ge=0)]
    output_tokens: TokenCount
    parent_id: CompletionId | None = None


class ForkCount(Struct, frozen=True, kw_only=True):
    """Forks of one episode for one reason."""

    reason: ForkReason
    count: Annotated[int, Meta(ge=1)]


class FinishedEpisode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of an episode; of each (group, index) the first record in the log counts."""

    episode_id: EpisodeId
    group_id: GroupId
    domain: DomainName
    purpose: Purpose
    group_size: GroupSize
    index: Annotated[int, Meta(ge=0)]
    attempt: Annotated[int, Meta(ge=0)]
    status: EpisodeStatus
    manifest: tuple[ManifestEntry, ...]
    task: Annotated[bytes, Meta(description="The group's task, JSON.")]
    result: Annotated[
        bytes, Meta(description="What the agent reported at the end, JSON; b'' if nothing.")
    ] = b""
    rewards: tuple[ReportedReward, ...] = ()
    engine_s: Annotated[Seconds, Meta(description="Decode time on the critical path.")] = 0.0
    alone_s: Annotated[
        Seconds | None,
        Meta(
            description="As engine_s, each completion as if it had run alone in its engine. None: "
            "not recorded."
        ),
    ] = None
    tool_s: Annotated[Seconds, Meta(description="Tool time as the agent reported it.")] = 0.0
    virtual_s: Annotated[
        Seconds | None, Meta(description="By the clock of a simulated environment, if it has one.")
    ] = None
    duration_s: Annotated[Seconds, Meta(description="Wall clock, opened to finished.")] = 0.0
    forks: Annotated[
        int, Meta(ge=0, description="Requests whose history was not what the episode had recorded.")
    ] = 0
    fork_reasons: Annotated[
        tuple[ForkCount, ...], Meta(description="The forks by reason, in the order of the names.")
    ] = ()
    temperature: float | None = None
    round_name: str = ""
    detail: str = ""
    truncated_by: Annotated[
        TruncationCause | None,
        Meta(
            description="Only if completed: a limit ended it, not the agent's own decision; "
            "`rewards.truncated` says what that earns."
        ),
    ] = None
    source: Source = "agent"


class ProcessReward(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dense reward on one completion; it credits this one and those before it."""

    completion_id: CompletionId
    value: float


class GradedEpisode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reward parts of one finished episode; the first one of an episode_id counts."""

    episode_id: EpisodeId
    group_id: GroupId
    grader: Annotated[str, Meta(description="module:function names that graded.")]
    grader_version: str
    outcome: float
    speed: float
    process: tuple[ProcessReward, ...] = ()
    is_masked: Annotated[bool, Meta(description="Counts in no baseline and no denominator.")] = (
        False
    )
    detail: str = ""
    metrics: tuple[NamedValue, ...] = ()

    def __post_init__(self) -> None:
        check_number("outcome", self.outcome)
        check_number("speed", self.speed)
        for reward in self.process:
            check_number("process", reward.value)
