"""Records and requests of the attempts world; only what the policy of attempts reads differs."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import TurnPart
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import Text
from forgemq_gateway.core.turns import OpenTurn


def parse(_: bytes, __: str, ___: Sequence[Mapping[str, Any]], ____: bytes) -> Reply:
    return Reply(parts=(Text("yes"),))


class Client(msgspec.Struct, eq=False):
    """An agent's conversation: one request after the other, each on top of the previous reply."""

    group_id: str
    name: str
    number: int = 0
    parent_id: str | None = None
    waits_for: str | None = None
    turn: OpenTurn | None = None


def admitted_group(group_id: str, *, number: int) -> AdmittedGroup:
    return AdmittedGroup(
        group_id=group_id,
        domain="d",
        purpose="train",
        group_size=2,
        task=b"{}",
        version_at_admission=0,
        queue_index=number,
    )


def opened_episode(group_id: str) -> OpenedEpisode:
    return OpenedEpisode(
        episode_id=f"{group_id}.0.0",
        group_id=group_id,
        index=0,
        attempt=0,
        key_sha256="0" * 64,
        sampling=Sampling(),
        history="append_only",
        lease_s=10,
        opened_ms=0,
    )


def prepared_turn(turn: OpenTurn, *, parent: KnownCompletion | None) -> Prepared:
    """One token behind the parent's context and output."""
    shared = 0 if parent is None else parent.total_tokens
    return Prepared(
        parent=parent,
        shared_tokens=shared,
        context=pack_ids([7]),
        context_tokens=shared + 1,
        sampling=Sampling(),
        part=TurnPart(
            sequence=turn.sequence,
            protocol="chat_completions",
            body_digest=turn.body_digest,
            ordinal=turn.ordinal,
        ),
    )
