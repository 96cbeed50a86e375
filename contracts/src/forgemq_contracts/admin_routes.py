"""Routes of the group and episode API: which request gets which answer, and why it is refused.

The gateway serves exactly these, and the OpenAPI document is generated from them.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.admin import (
    AbortRequest,
    Claim,
    ClaimRequest,
    DomainResults,
    FinishRequest,
    GroupQuery,
    GroupRequest,
    GroupStatus,
    Lease,
    Recorded,
    Released,
    ResultsQuery,
    RewardRequest,
    RunStatus,
)
from forgemq_contracts.fields import DomainName, EpisodeId, GroupId, Lane

RefusalStatus: TypeAlias = Literal[400, 401, 404, 409, 410, 413, 429, 503]


class Route(Struct, frozen=True, kw_only=True):
    """One method on one path."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[Struct]
    body: type[Struct] | None = None
    query: type[Struct] | None = None
    nothing: Annotated[str, Meta(description="When the answer is 204; '' if never.")] = ""
    refusals: tuple[tuple[RefusalStatus, str], ...] = ()

    @property
    def all_refusals(self) -> dict[RefusalStatus, str]:
        """Refusals of this route and of every route, by status."""
        bad_input: dict[RefusalStatus, str] = {}
        if self.body is not None or self.query is not None:
            bad_input[400] = "A field breaks its rule: `error.param` names it."
        if self.body is not None:
            bad_input[413] = "The body is too long."
        return dict(sorted((bad_input | _EVERYWHERE | dict(self.refusals)).items()))


PATH_FIELDS = {"group_id": GroupId, "episode_id": EpisodeId, "lane": Lane, "domain": DomainName}
"""Types of the names in braces in the paths."""

RETRIED: tuple[RefusalStatus, ...] = (429, 503)
"""The same request may succeed after the seconds in the header Retry-After."""

_EVERYWHERE: dict[RefusalStatus, str] = {
    401: "The admin key is missing or wrong.",
    503: "Not yet: the gateway rebuilds its state after a start, or still writes the record.",
}
_EPISODE_REFUSALS: tuple[tuple[RefusalStatus, str], ...] = (
    (404, "There is no such episode."),
    (409, "The episode has ended, or a later attempt replaced it."),
    (410, "The group is over."),
)

REQUEST_GROUP = Route(
    name="request_group",
    method="POST",
    path="/v1/groups",
    summary="Ask for a group of episodes of one task; the same idempotency key asks only once.",
    body=GroupRequest,
    answer=GroupStatus,
    refusals=(
        (409, "The key asked for another group before, which is open; names what differs."),
        (410, "Training has ended: no training group is taken."),
        (429, "Too many groups of the domain wait for a slot, or open groups fill the memory."),
    ),
)
READ_GROUP = Route(
    name="read_group",
    method="GET",
    path="/v1/groups/{group_id}",
    summary="Read the group's state, if asked for only when it changes.",
    query=GroupQuery,
    answer=GroupStatus,
    refusals=((404, "There is no such group."),),
)
CLAIM_EPISODE = Route(
    name="claim_episode",
    method="POST",
    path="/v1/groups/{group_id}/claim",
    summary="Take a free episode of the group. Not idempotent: each claim takes another episode.",
    body=ClaimRequest,
    answer=Claim,
    nothing="No episode is free: the group waits for its slot, or agents hold all its episodes.",
    refusals=((404, "There is no such group."), (410, "All episodes of the group have ended.")),
)
RENEW_LEASE = Route(
    name="renew_lease",
    method="POST",
    path="/v1/episodes/{episode_id}/heartbeat",
    summary="Keep the episode. A chat completion with its key renews the lease, too.",
    answer=Lease,
    refusals=_EPISODE_REFUSALS,
)
RELEASE_EPISODE = Route(
    name="release_episode",
    method="POST",
    path="/v1/episodes/{episode_id}/release",
    summary="Give the episode back: another agent may have its next attempt at once.",
    answer=Released,
    refusals=_EPISODE_REFUSALS,
)
REPORT_REWARD = Route(
    name="report_reward",
    method="POST",
    path="/v1/episodes/{episode_id}/rewards",
    summary="Add a reward to the episode or to one of its completions.",
    body=RewardRequest,
    answer=Recorded,
    refusals=_EPISODE_REFUSALS,
)
FINISH_EPISODE = Route(
    name="finish_episode",
    method="POST",
    path="/v1/episodes/{episode_id}/finish",
    summary="End the episode: its completions are graded. A second end changes nothing.",
    body=FinishRequest,
    answer=Recorded,
    refusals=_EPISODE_REFUSALS,
)
ABORT_EPISODE = Route(
    name="abort_episode",
    method="POST",
    path="/v1/episodes/{episode_id}/abort",
    summary="Give the episode up: it is masked, never scored as zero.",
    body=AbortRequest,
    answer=Recorded,
    refusals=_EPISODE_REFUSALS,
)
READ_RUN = Route(
    name="read_run",
    method="GET",
    path="/v1/run",
    summary="Read how far the run is.",
    answer=RunStatus,
)
READ_RESULTS = Route(
    name="read_results",
    method="GET",
    path="/v1/domains/{domain}/results",
    summary="Read what the groups of a domain's curriculum showed of their tasks.",
    query=ResultsQuery,
    answer=DomainResults,
    refusals=((404, "There is no such domain."),),
)

ALL = (
    REQUEST_GROUP,
    READ_GROUP,
    CLAIM_EPISODE,
    RENEW_LEASE,
    RELEASE_EPISODE,
    REPORT_REWARD,
    FINISH_EPISODE,
    ABORT_EPISODE,
    READ_RUN,
    READ_RESULTS,
)
