"""The group and episode API over HTTP: what agents send to the gateway, and what it answers.

The gateway, the agents and the load tests decode and encode these structs and no others;
`admin_routes.py` says which route carries which. Tasks and results are JSON that only the user
reads: `Raw` keeps their bytes as they came.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from forgemq_contracts.asked_keys import number_of
from forgemq_contracts.curriculum import TaskNumber, TaskResult
from forgemq_contracts.fields import (
    REWARD_SIZE_MAX,
    DomainName,
    EpisodeId,
    GroupId,
    Purpose,
    Seconds,
    Source,
    TruncationCause,
)
from forgemq_contracts.groups import GroupSize, QueueIndex, RetireReason, StageIndex
from forgemq_contracts.rules import check_trainable

BODY_BYTES_MAX = 16 * 1024 * 1024
"""Longest body of a request. The gateway keeps the task of every open group in memory."""

RESULTS_MAX = 4096
"""Results in one answer: less than half a megabyte."""

DETAIL_CHARACTERS_MAX = 2000
"""Longest reason of an abort: the end of a traceback. It is read by people."""

GroupState: TypeAlias = Annotated[
    Literal["requested", "admitted", "retired"],
    Meta(description="requested: waits for a slot. admitted: may be claimed. retired: is over."),
]
Temperature: TypeAlias = Annotated[
    float, Meta(ge=0, le=10, description="Sampling temperature; 0 is greedy.")
]
ErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "conflict_error",
    "gone_error",
    "rate_limit_error",
    "server_error",
]
EndedBy: TypeAlias = Annotated[
    TruncationCause | UnsetType | None,
    Meta(
        description="The limit that ended the episode; null: no limit. If left out, the gateway "
        "says context_full if it refused the episode's newest completion for that, else null."
    ),
]
_WAIT = "Answer after at most this many seconds; the gateway caps it at its LONG_POLL_S_MAX."


class GroupRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/groups: a group of episodes of one task."""

    domain: DomainName
    idempotency_key: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="The same key asks for the same group, for the life of the run. Keys that "
            "end in '/<number>' and count up, as 'shop/0', 'shop/1', have no limit; of all other "
            "keys a run takes 49,152.",
        ),
    ]
    task: Annotated[
        Raw,
        Meta(
            description="Any JSON value; agents and graders get it as it is, but half of a "
            "surrogate pair as U+FFFD."
        ),
    ]
    purpose: Purpose = "train"
    group_size: Annotated[
        GroupSize | None, Meta(description="null: as the domain's queue is configured.")
    ] = None
    temperature: Annotated[
        Temperature | None, Meta(description="null: as the run is configured.")
    ] = None
    round_name: Annotated[
        str, Meta(max_length=80, description="Evaluation round that the group belongs to.")
    ] = ""
    source: Annotated[
        Source,
        Meta(
            description="import: with the purpose train only in a domain that is supervised, and "
            "there alone."
        ),
    ] = "agent"
    takes_known: Annotated[
        bool,
        Meta(
            description="Answer with the open group of this key even if this request differs from "
            "the one that made it. false: such a request is refused."
        ),
    ] = False
    stage: Annotated[
        StageIndex | None,
        Meta(
            description="Stage of the run whose context limit and sampling the group has. null: of "
            "a training group the stage of the step that trains next; evaluation has none."
        ),
    ] = None
    task_number: Annotated[
        TaskNumber | None,
        Meta(
            description="Number of the task in a pool: the group's result is then among those of "
            "its domain. Needs a key '<domain>/<n>' and a training group."
        ),
    ] = None
    results_known: Annotated[
        int, Meta(ge=0, description="Results of the domain that the choice was made from.")
    ] = 0

    def __post_init__(self) -> None:
        check_trainable(self.purpose, source=self.source)
        if self.task_number is not None:
            _check_choice(self.purpose, key=self.idempotency_key, domain=self.domain)
        if self.stage is not None and self.purpose != "train":
            raise ValueError("stage: must be null for evaluation: its rounds are compared")
        if self.source == "live":
            raise ValueError("source: must be agent or import: the gateway itself records live")


def _check_choice(purpose: Purpose, *, key: str, domain: str) -> None:
    if purpose != "train":
        raise ValueError("task_number: must be null for evaluation: what it plays is no result")
    if number_of(key, source=domain) is None:
        raise ValueError(f"task_number: needs the key '{domain}/<n>', got {key!r}")


class GroupStatus(Struct, frozen=True, kw_only=True):
    """How far a group is."""

    group_id: GroupId
    state: GroupState
    retire_reason: Annotated[
        Literal[RetireReason, ""],
        Meta(description="'' before the group retires, and if it retired too long ago."),
    ]
    group_size: Annotated[
        int,
        Meta(ge=0, le=4096, description="0 if the group retired before this gateway started."),
    ]
    queue_index: Annotated[
        QueueIndex | None, Meta(description="null before the group has a slot, and for evaluation.")
    ]
    open: Annotated[int, Meta(ge=0, description="Episodes that agents hold.")]
    finished: Annotated[int, Meta(ge=0, description="Episodes that have ended.")]
    task_number: Annotated[
        TaskNumber | None,
        Meta(description="As it was asked for; null if it was not, and if the group is retired."),
    ] = None


class ResultsQuery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Query of GET /v1/domains/{domain}/results."""

    after: Annotated[int, Meta(ge=0, description="Results that the caller has.")] = 0


class DomainResults(Struct, frozen=True, kw_only=True):
    """What ended groups of a domain's curriculum showed, by index, without gaps."""

    results: Annotated[
        tuple[TaskResult, ...],
        Meta(max_length=RESULTS_MAX, description="Ask again while there are as many as may be."),
    ]


class GroupQuery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Query of GET /v1/groups/{group_id}."""

    wait_s: Annotated[Seconds, Meta(description=f"Wait for a change of state. {_WAIT}")] = 0.0
    state: Annotated[
        GroupState | None,
        Meta(
            description="The state that the caller knows: if the group has another one, the answer "
            "comes at once. Without it the gateway waits for the next change, and does not notice "
            "one that came between the caller's previous answer and this request."
        ),
    ] = None


class ClaimRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/groups/{group_id}/claim."""

    wait_s: Annotated[Seconds, Meta(description=f"Wait for a free episode. {_WAIT}")] = 0.0


class Claim(Struct, frozen=True, kw_only=True):
    """One episode that the agent holds until its lease lapses."""

    episode_id: EpisodeId
    group_id: GroupId
    index: Annotated[int, Meta(ge=0, description="Index of the episode in its group.")]
    attempt: Annotated[int, Meta(ge=0, description="Earlier attempts whose lease has lapsed.")]
    key: Annotated[
        str, Meta(min_length=1, description="API key for chat completions of this episode alone.")
    ]
    base_url: Annotated[str, Meta(description="OpenAI base URL for that key.")]
    session_url: Annotated[
        str, Meta(description="Base URL with the key in its path, if a client cannot send one.")
    ]
    lease_s: Annotated[
        float, Meta(gt=0, description="Without a request for this long the episode is free again.")
    ]
    task: Annotated[Raw, Meta(description="The task as it was requested.")]
    temperature: Temperature
    context_tokens_max: Annotated[
        int, Meta(ge=0, description="Context and output together; 0: not known.")
    ] = 0


class Lease(Struct, frozen=True, kw_only=True):
    """The lease is renewed."""

    lease_s: Annotated[float, Meta(gt=0, description="Its length from this answer on.")]


class Released(Struct, frozen=True):
    """The lease is over. If that gets lost, it lapses when it would have."""


class RewardRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/episodes/{episode_id}/rewards."""

    reward_id: Annotated[
        str,
        Meta(min_length=1, max_length=200, description="Only the first reward of an id counts."),
    ]
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    value: Annotated[float, Meta(ge=-REWARD_SIZE_MAX, le=REWARD_SIZE_MAX)]
    completion_id: Annotated[
        Annotated[str, Meta(pattern=r"^(chatcmpl-)?[0-9a-f]{32}$")] | None,
        Meta(description="Id of a chat completion of this episode; null rewards the episode."),
    ] = None


def _null() -> Raw:
    return Raw(b"null")


class FinishRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/episodes/{episode_id}/finish."""

    result: Annotated[Raw, Meta(description="Any JSON value, for graders; null if left out.")] = (
        field(default_factory=_null)
    )
    tool_s: Annotated[Seconds, Meta(description="Time spent in tools.")] = 0.0
    virtual_s: Annotated[
        Seconds | None, Meta(description="Time on the environment's own clock, if it has one.")
    ] = None
    truncated_by: EndedBy = UNSET
    detail: Annotated[
        str,
        Meta(max_length=DETAIL_CHARACTERS_MAX, description="On what a program failed, for people."),
    ] = ""


class AbortRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /v1/episodes/{episode_id}/abort.

    The episode is masked, unless a limit ended it: most programs crash on a full context, and that
    is what the policy did.
    """

    detail: Annotated[
        str, Meta(max_length=DETAIL_CHARACTERS_MAX, description="Why, for people.")
    ] = ""
    truncated_by: EndedBy = UNSET


class Recorded(Struct, frozen=True):
    """The log holds it; there is nothing else to say."""


class RunStatus(Struct, frozen=True, kw_only=True):
    """How far the run is."""

    run: str
    steps: Annotated[int, Meta(ge=0, description="Steps that the run is to train.")]
    steps_trained: Annotated[int, Meta(ge=0)]
    training_ended: Annotated[bool, Meta(description="No further training group is taken.")]
    domains: tuple[DomainName, ...]
    supervised_domains: Annotated[
        tuple[DomainName, ...], Meta(description="Those whose imports train.")
    ] = ()
    first_tasks: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(
            description="By domain: the lowest n whose group with the idempotency key "
            "'<domain>/<n>' is not over. An agent that counts its tasks begins there."
        ),
    ] = {}


class ErrorBody(Struct, frozen=True, kw_only=True):
    """What is wrong, in OpenAI's shape."""

    message: Annotated[str, Meta(description="Names the field and the rule, for people.")]
    type: ErrorType
    param: Annotated[
        str | None, Meta(description="Path of the field that is wrong; null if no single one is.")
    ] = None
    code: Annotated[str | None, Meta(description="Reason for programs, if it has a name.")] = None


class Refusal(Struct, frozen=True, kw_only=True):
    """Body of every 4xx and 5xx: nothing has changed."""

    error: ErrorBody
