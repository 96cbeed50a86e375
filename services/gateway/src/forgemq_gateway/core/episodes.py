"""One attempt at one episode: its lease, its history and its requests in flight."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from forgemq_contracts.admin import RewardRequest
from forgemq_contracts.completions import TurnPart
from forgemq_contracts.episodes import FinishedEpisode, ForkCount, OpenedEpisode, ReportedReward
from forgemq_contracts.fields import ForkReason, Source, TruncationCause
from forgemq_contracts.groups import AdmittedGroup, RequestedGroup
from forgemq_contracts.partitions import request_id
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.core.history import History
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_caches import FirstPrompts
from forgemq_gateway.core.manifest import counted, critical_path_s, manifest
from forgemq_gateway.core.message_paths import NO_BRANCH, Branch
from forgemq_gateway.core.turns import OpenTurn

EpisodeState: TypeAlias = Literal["open", "lapsed", "finishing", "ended"]


_TOOLS_BYTES = 5
"""About what a byte of tools in JSON takes once it is decoded: short texts in small objects."""


class Ending(Struct, frozen=True, kw_only=True):
    """How an episode ended: the agent ended it, a limit did, or its lease lapsed."""

    status: Literal["completed", "aborted", "failed"]
    truncated_by: TruncationCause | None = None
    result: bytes = b""
    tool_s: float = 0.0
    virtual_s: float | None = None
    detail: str = ""


class GroupFacts(Struct, frozen=True, kw_only=True):
    """What never changes about a group."""

    group_id: str
    domain: str
    purpose: Literal["train", "eval"]
    group_size: int
    task: bytes
    temperature: float | None = None
    round_name: str = ""
    source: Source = "agent"
    idempotency_key: str = ""
    stage: int | None = None
    task_number: int | None = None


def facts_of(record: RequestedGroup | AdmittedGroup) -> GroupFacts:
    """What this record says about its group."""
    return GroupFacts(
        group_id=record.group_id,
        domain=record.domain,
        purpose=record.purpose,
        group_size=record.group_size,
        task=record.task,
        temperature=record.temperature,
        round_name=record.round_name,
        source=record.source,
        stage=record.stage,
    )


class KnownBody(Struct, frozen=True, kw_only=True):
    """The newest request with one body digest.

    Attributes:
        is_asked_anew: A later request was refused, so that its retry has no answer here.
    """

    request_id: str
    ordinal: int
    is_asked_anew: bool = False


class HeldEpisode:
    """What the gateway knows of one attempt at an episode.

    Lifecycle: open -> (lapsed -> open again if its agent is heard of) -> finishing -> ended. A
    later attempt replaces it in any state.

    Attributes:
        episode_id: Group, index and attempt in one.
        first_prompts: Of all episodes of its group.
        turns: Open turns by request id; `Attempts` removes them.
        delivered: Ids of completions that a client has had in full.
        recorded: Those whose deliveries this gateway has recorded itself: it knows of them before
            it reads them back.
        clients: Connections that wait for an answer.
        continued: Completions that another one extends.
        is_context_full: Whether the newest completion was refused because its context is full.
        is_released: Whether its agent has given it back.
        given: The final record, if the log may have it although its write failed. No other one
            ends the episode, and nothing that is not in it is taken.
    """

    def __init__(
        self,
        opened: OpenedEpisode,
        *,
        lease_until_s: float,
        held: HeldBytes | None = None,
        first_prompts: FirstPrompts | None = None,
    ) -> None:
        self.opened = opened
        self.episode_id = opened.episode_id
        self.first_prompts = first_prompts or FirstPrompts()
        self.lease_until_s = lease_until_s
        self.is_released = False
        self.state: EpisodeState = "open"
        self.history = History(held)
        self.turns: dict[str, OpenTurn] = {}
        self.delivered: set[str] = set()
        self.recorded: set[str] = set()
        self.tools: dict[str, tuple[dict[str, Any], ...]] = {}
        self.clients = 0
        self.next_sequence = 0
        self.forks = 0
        self.fork_reasons: Counter[ForkReason] = Counter()
        self.continued: set[str] = set()
        self.is_context_full = False
        self.given: FinishedEpisode | None = None
        self._bodies: dict[str, KnownBody] = {}
        self._ended_attempts: dict[str, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether its final record is on the log or may be, or is being written."""
        return self.given is not None or self.state in ("finishing", "ended")

    @property
    def is_unused(self) -> bool:
        """Whether no request of it was ever for a lane: all were refused before, if any came."""
        return not self._bodies and not self.history.completions

    def has_undelivered(self) -> bool:
        """Whether it has a completion that no client is known to have had."""
        return not self.history.completions.keys() <= self.delivered

    def release(self, now_s: float) -> None:
        """Let the lease end now for good, because its agent will not go on."""
        self.is_released = True
        self.lease_until_s = min(self.lease_until_s, now_s)

    def renew(self, now_s: float) -> None:
        """Let the lease run from now, because the agent was heard of."""
        if self.is_released:  # Connections of the agent may end later than it said so.
            return
        self.lease_until_s = now_s + self.opened.lease_s
        if self.state == "lapsed":
            self.state = "open"

    def has_lapsed(self, now_s: float) -> bool:
        """Whether the agent was silent for a whole lease and no client waits for an answer."""
        return self.state == "open" and not self.clients and now_s >= self.lease_until_s

    def known(self, body_digests: Sequence[str], *, is_retry: bool = False) -> list[str | None]:
        """Ids of the requests that these bodies continue: open, or answered but not delivered.

        None for a new request. The bodies are those of one request's choices: once all of them are
        delivered, each asks for another sample; until then none does. A retry says that the
        delivery failed, and that holds until a request extends one of the answers.
        """
        bodies = [self._bodies.get(digest) for digest in body_digests]
        newest = max((body.ordinal for body in bodies if body is not None), default=0)
        # A choice that is behind the others was refused before a lane had it.
        known = [body if body is not None and body.ordinal == newest else None for body in bodies]
        ids = [None if body is None else body.request_id for body in known]
        if not all(request_id in self.delivered for request_id in ids):
            return ids
        is_repeated = is_retry and not any(body is None or self._is_had(body) for body in known)
        return ids if is_repeated else [None] * len(ids)

    def _is_had(self, body: KnownBody) -> bool:
        """Whether the client has shown that it has the delivered answer to this body."""
        completion = self.history.completions.get(body.request_id)
        return completion is None or completion.echoed or body.is_asked_anew

    def begin(
        self,
        body_digest: str,
        *,
        branch: Branch = NO_BRANCH,
        matched: str | None,
        requested_ms: int,
        deadline_ms: int,
        held_s: float = 0.0,
    ) -> OpenTurn:
        """Add a turn for this body, the next in the episode; times are wall clock.

        Args:
            body_digest: Of the request.
            branch: Its messages behind those of the completion that it extends.
            matched: Id of that completion; None if it is rendered from its start.
            requested_ms: When it came.
            deadline_ms: Until when its clients wait for an answer.
            held_s: How long its client was held before.
        """
        self.history.note(branch)
        earlier = self._bodies.get(body_digest)
        ordinal = 0 if earlier is None else earlier.ordinal + 1
        turn = OpenTurn(
            request_id=request_id(
                episode=self.episode_id, parent=matched, body_digest=body_digest, ordinal=ordinal
            ),
            episode_id=self.episode_id,
            group_id=self.opened.group_id,
            body_digest=body_digest,
            branch=branch,
            ordinal=ordinal,
            sequence=self.next_sequence,
            requested_ms=requested_ms,
            after_offset=self.history.newest_offset,
            deadline_ms=deadline_ms,
            held_s=held_s,
            earlier_id=None if earlier is None else earlier.request_id,
        )
        self.next_sequence += 1
        self.note_body(body_digest, request=turn.request_id, ordinal=ordinal)
        self.turns[turn.request_id] = turn
        return turn

    def forget(self, turn: OpenTurn) -> None:
        """Drop a turn that never reached a lane; its body and messages are new again."""
        self.turns.pop(turn.request_id, None)
        self.history.forget(turn.branch)
        body = self._bodies.get(turn.body_digest)
        if body is None or body.request_id != turn.request_id:
            return
        if turn.earlier_id is None:
            del self._bodies[turn.body_digest]
        else:
            self._bodies[turn.body_digest] = KnownBody(
                request_id=turn.earlier_id, ordinal=turn.ordinal - 1, is_asked_anew=True
            )

    def note_body(self, body_digest: str, *, request: str, ordinal: int) -> None:
        """Note which request a body led to; the highest ordinal wins."""
        known = self._bodies.get(body_digest)
        if known is None or ordinal >= known.ordinal:
            self._bodies[body_digest] = KnownBody(request_id=request, ordinal=ordinal)

    def note_tools(self, digest: str, tools: tuple[dict[str, Any], ...], json_bytes: int) -> None:
        """Keep the tools of a request; a client may send others with each, so they count."""
        if digest not in self.tools:
            self.tools[digest] = tools
            self.history.held.grow(_TOOLS_BYTES * json_bytes)

    def note_ended_attempt(self, request: str, attempt: int) -> None:
        """Note that this attempt at a request failed or was cancelled."""
        self._ended_attempts[request] = max(attempt, self.ended_attempt(request))

    def ended_attempt(self, request: str) -> int:
        """The newest attempt at a request that failed or was cancelled; -1 for no such attempt."""
        return self._ended_attempts.get(request, -1)

    def note_fork(self, part: TurnPart, *, parent: KnownCompletion | None) -> None:
        """Count a completion's fork, if its turn is one; if not, its parent is continued."""
        if parent is not None and not part.is_fork:
            self.continued.add(parent.request_id)
        self.forks += part.is_fork or part.fork_reason is not None
        if part.fork_reason is not None:
            self.fork_reasons[part.fork_reason] += 1

    def note_sequence(self, sequence: int) -> None:
        """Note that a sequence number, read back from the log, is taken."""
        self.next_sequence = max(self.next_sequence, sequence + 1)

    def with_reward(self, reward: ReportedReward) -> OpenedEpisode | None:
        """The record that adds this reward; None if the reward id is known."""
        if any(known.reward_id == reward.reward_id for known in self.opened.rewards):
            return None
        return msgspec.structs.replace(
            self.opened, rewards=(reward,), rewards_before=len(self.opened.rewards)
        )

    def add_rewards(self, record: OpenedEpisode) -> None:
        """Add the rewards of a later record; one that is behind changes nothing."""
        known, before = self.opened.rewards, record.rewards_before
        rewards = (*known[:before], *record.rewards)
        if before <= len(known) <= len(rewards):
            self.opened = msgspec.structs.replace(record, rewards=rewards, rewards_before=0)

    def truncated_by(self, said: TruncationCause | UnsetType | None) -> TruncationCause | None:
        """The limit that ended the episode, as the agent said, else as the requests show."""
        if said is not UNSET:
            return said
        return "context_full" if self.is_context_full else None

    def final_record(
        self, ending: Ending, *, group: GroupFacts, finished_ms: int
    ) -> FinishedEpisode:
        """The record that ends this episode."""
        opened = self.opened
        kept = counted(self.history.completions.values(), delivered=self.delivered)
        return FinishedEpisode(
            episode_id=opened.episode_id,
            group_id=opened.group_id,
            domain=group.domain,
            purpose=group.purpose,
            group_size=group.group_size,
            index=opened.index,
            attempt=opened.attempt,
            status=ending.status,
            manifest=manifest(kept),
            task=group.task,
            result=ending.result,
            rewards=opened.rewards,
            engine_s=critical_path_s(kept),
            alone_s=critical_path_s(kept, alone=True),
            tool_s=ending.tool_s,
            virtual_s=ending.virtual_s,
            duration_s=max(0, finished_ms - opened.opened_ms) / 1000,
            forks=self.forks,
            fork_reasons=tuple(
                ForkCount(reason=reason, count=count)
                for reason, count in sorted(self.fork_reasons.items())
            ),
            temperature=opened.sampling.temperature,
            round_name=group.round_name,
            source=group.source,
            detail=ending.detail,
            truncated_by=ending.truncated_by,
        )


def reported_reward(request: RewardRequest) -> ReportedReward:
    """The reward in a request, with the id of its completion as the records have it."""
    completion = request.completion_id
    return ReportedReward(
        reward_id=request.reward_id,
        name=request.name,
        value=request.value,
        # Chat completions write it before the id.
        completion_id=None if completion is None else completion.removeprefix("chatcmpl-"),
    )
