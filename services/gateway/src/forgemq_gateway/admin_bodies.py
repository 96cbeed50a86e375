"""Bodies of the admin API."""

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from forgemq_contracts.fields import REWARD_SIZE_MAX


class GroupRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/groups."""

    domain: str
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=200)]
    task: Raw
    purpose: Literal["train", "eval"] = "train"
    group_size: Annotated[int, Meta(ge=1, le=4096)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    round_name: Annotated[str, Meta(max_length=80)] = ""


class ClaimRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/groups/{group_id}/claim."""

    wait_s: Annotated[float, Meta(ge=0)] = 0.0


class RewardRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/episodes/{episode_id}/rewards."""

    reward_id: Annotated[str, Meta(min_length=1, max_length=200)]
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    value: Annotated[float, Meta(ge=-REWARD_SIZE_MAX, le=REWARD_SIZE_MAX)]
    completion_id: str | None = None


class FinishRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/episodes/{episode_id}/finish."""

    result: Raw = Raw(b"null")
    tool_s: Annotated[float, Meta(ge=0)] = 0.0
    virtual_s: Annotated[float, Meta(ge=0)] | None = None


class AbortRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/episodes/{episode_id}/abort."""

    detail: str = ""


class Claim(Struct, frozen=True, kw_only=True):
    """An episode in an agent's hands."""

    episode_id: str
    group_id: str
    index: int
    attempt: int
    key: str
    base_url: str
    session_url: str
    lease_s: float
    task: Raw
    temperature: float


class RunStatus(Struct, frozen=True, kw_only=True):
    """The run as agents see it."""

    run: str
    steps: int
    steps_trained: int
    training_ended: bool
    domains: tuple[str, ...]
