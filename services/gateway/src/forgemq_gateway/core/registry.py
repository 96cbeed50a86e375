"""All groups and their episodes, as they follow from the records of the log.

A restart and a serving gateway apply the same records. What clients ask for changes it in the same
way: the record is written first, then applied.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.admin import GroupStatus
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.completions import (
    CancelledCompletion,
    DeliveredCompletion,
    FinishedCompletion,
    RequestedCompletion,
    TurnPart,
)
from forgemq_contracts.episodes import FinishedEpisode, OpenedEpisode
from forgemq_contracts.groups import AdmittedGroup, ClosedGroup, RequestedGroup, RetiredGroup
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.turn_reading import is_raw, may_be_referred_to
from forgemq_gateway.core.attempts import RestoredTurn
from forgemq_gateway.core.digests import EMPTY_PATH
from forgemq_gateway.core.episodes import HeldEpisode, facts_of
from forgemq_gateway.core.group import Group
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.core.known_completion import (
    TOKEN_BYTES,
    KnownCompletion,
    began_under,
    known_before,
)
from forgemq_gateway.core.lane_caches import FirstPrompts
from forgemq_gateway.core.lane_results import LaneResult
from forgemq_gateway.core.leases import Leases
from forgemq_gateway.core.message_paths import Branch
from forgemq_gateway.core.reading import context_tail, tools_of
from forgemq_gateway.core.replies import Reply, cut_at
from forgemq_gateway.core.task_results import TaskResults
from forgemq_gateway.core.turns import OpenTurn, restored

# (output, request id, tools or None for plain text, tail of the context) -> the parsed reply.
Parse: TypeAlias = Callable[[bytes, str, Sequence[Mapping[str, Any]] | None, bytes], Reply]

RETIRED_STATUSES_MAX = 16_384
"""Retired groups whose reason and position the gateway still tells by id, some hundred bytes each.
A repeated request for an older one is recognised by its key, for the whole run."""

# An id from outside with more digits is unknown: Python refuses to read thousands of them.
_INDEX_DIGITS_MAX = 9


class _Restored(NamedTuple):
    """A turn read back, in its episode."""

    episode: HeldEpisode
    turn: OpenTurn


class Registry:
    """Groups by id, and how far training is."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.retired: OrderedDict[str, GroupStatus] = OrderedDict()  # as of `RetiredIds`
        self.asked = AskedKeys()
        self.results: dict[str, TaskResults] = {}
        self.steps_trained = 0
        self.training_ended = False
        self._restored: dict[str, _Restored] = {}
        self._held = HeldBytes()
        self._first_prompts = FirstPrompts()
        self._leases = Leases(self.episode)

    def apply_requested_group(self, record: RequestedGroup) -> None:
        """Add a group that waits for its slot; idempotent."""
        self.asked.add(record.idempotency_key, domain=record.domain)
        group = self._enter(record)
        if group is not None:
            # A restart may read the admission first, which has neither.
            key, number = record.idempotency_key, record.task_number
            facts = msgspec.structs.replace(group.facts, idempotency_key=key, task_number=number)
            group.facts = facts

    def apply_admitted_group(self, record: AdmittedGroup) -> None:
        """Let the group's episodes be claimed."""
        group = self._enter(record)
        if group is not None:
            group.state, group.queue_index = "admitted", record.queue_index

    def apply_closed_group(self, record: ClosedGroup) -> None:
        """Let nobody claim an episode of the group: what is unfinished is to be ended."""
        group = self.groups.get(record.group_id)
        if group is not None:
            group.closed = record.detail or "past its deadline"

    def _enter(self, record: RequestedGroup | AdmittedGroup) -> Group | None:
        if record.group_id in self.retired:
            return None
        group = self.groups.get(record.group_id)
        if group is None:
            self._held.total += len(record.task)
            group = self.groups[record.group_id] = Group(
                facts_of(record), of_run=self._first_prompts
            )
        return group

    def apply_retired_group(self, record: RetiredGroup) -> Group | None:
        """Drop the group and its trees; returns it, so that its open turns can be ended."""
        self.apply_result(record)
        group = self.groups.pop(record.group_id, None)
        if group is not None:
            self._held.total -= len(group.facts.task)
            for episode in group.episodes.values():
                episode.history.held.release()
        if record.group_id not in self.retired:
            self.retired[record.group_id] = GroupStatus(
                group_id=record.group_id,
                state="retired",
                retire_reason=record.reason,
                group_size=0 if group is None else group.facts.group_size,
                queue_index=record.queue_index,
                open=0,
                finished=0 if group is None else len(group.finished),
            )
        return group

    def apply_result(self, record: RetiredGroup) -> None:
        """Note the result of a curriculum's group."""
        if record.result is not None:
            self.results.setdefault(record.domain, TaskResults()).add(record.result)

    def forget_retired(self) -> None:
        """Keep the newest `RETIRED_STATUSES_MAX`; call it when all that was read is applied.

        Not before: a record of a group may be read after its retirement.
        """
        while len(self.retired) > RETIRED_STATUSES_MAX:
            self.retired.popitem(last=False)

    def apply_opened_episode(
        self, record: OpenedEpisode, *, lease_until_s: float
    ) -> HeldEpisode | None:
        """Add a newer attempt, or the known attempt's rewards; an older attempt changes nothing."""
        group = self.groups.get(record.group_id)
        if group is None:
            return None
        episode = group.episodes.get(record.index)
        if episode is not None and episode.opened.attempt > record.attempt:
            return None
        if episode is None or episode.opened.attempt < record.attempt:
            if episode is not None:
                episode.history.held.release()
            episode = group.episodes[record.index] = HeldEpisode(
                record,
                lease_until_s=lease_until_s,
                held=self._held,
                first_prompts=group.first_prompts,
            )
            self._leases.add(episode)
        else:
            episode.add_rewards(record)
        return episode

    def apply_finished_episode(self, record: FinishedEpisode) -> None:
        """End (group, index); the first record in the log counts."""
        group = self.groups.get(record.group_id)
        if group is None:
            return
        group.finished.setdefault(record.index, record.episode_id)
        episode = group.episodes.get(record.index)
        if episode is not None:
            episode.state = "ended"
            episode.history.bodies.forget()

    def apply_requested_completion(self, record: RequestedCompletion) -> None:
        """Restore a turn that went to a lane, so that a client's retry continues it."""
        episode = self.episode(record.episode_id)
        if episode is None:
            return
        self._note(episode, record.turn, record.request_id)
        parent = self._note_echo(episode, record)
        if record.request_id in episode.history.completions:
            return
        if record.parent_id is not None and parent is None:
            return
        known = episode.turns.get(record.request_id)
        if known is None or known.sent <= record.attempt:
            after = _path_before(record.turn, parent=parent)
            episode.history.note(Branch(record.turn.message_digests, after))
            turn = restored(record, parent=parent)
            episode.turns[record.request_id] = turn
            self._restored[record.request_id] = _Restored(episode, turn)

    def apply_cancelled_completion(self, record: CancelledCompletion) -> None:
        """Note on a restart that no lane works on this attempt."""
        known = self._restored.get(record.request_id)
        if known is not None:
            known.episode.note_ended_attempt(record.request_id, record.attempt)

    def take_restored_turns(self) -> list[RestoredTurn]:
        """Return the turns that were open at the previous stop; call it once, when all is read."""
        known, self._restored = self._restored, {}
        return [
            RestoredTurn(turn=turn, is_on_lane=episode.ended_attempt(request_id) < turn.sent - 1)
            for request_id, (episode, turn) in known.items()
        ]

    def apply_finished_completion(
        self, record: FinishedCompletion, *, offset: int, finished_ms: int, parse: Parse
    ) -> LaneResult | None:
        """Apply a lane's result. None if its episode is not open, or has its completion already."""
        episode = self.episode(record.episode_id)
        if episode is None or record.request_id in episode.history.completions:
            return None
        self._note(episode, record.turn, record.request_id)
        if not is_candidate(record):
            # On a restart this comes before the request itself is read back.
            episode.note_ended_attempt(record.request_id, record.attempt)
            return LaneResult(
                episode=episode,
                request_id=record.request_id,
                attempt=record.attempt,
                completion=None,
                failure=record.failure or "engine",
                error=record.error or record.finish_reason,
                is_constraint_refused=record.is_constraint_refused,
            )
        completion = self._completion(
            episode, record, offset=offset, finished_ms=finished_ms, parse=parse
        )
        return LaneResult(
            episode=episode,
            request_id=record.request_id,
            attempt=record.attempt,
            completion=completion,
            error="" if completion is not None else "the parent completion is unknown",
        )

    def apply_delivered_completion(self, record: DeliveredCompletion) -> None:
        """Note that a client of another gateway has had the whole completion, or has not."""
        episode = self.episode(record.episode_id)
        if episode is None or record.request_id in episode.recorded:
            return
        if record.is_withdrawn:
            episode.delivered.discard(record.request_id)
        else:
            episode.delivered.add(record.request_id)

    def apply_trained_step(self, record: TrainedStep) -> None:
        """Note how far training is, and whether it has ended."""
        self.steps_trained = max(self.steps_trained, record.step + 1)
        self.training_ended = self.training_ended or record.is_last

    def episode(self, episode_id: str) -> HeldEpisode | None:
        """The episode with this id, if it is the newest attempt of an open group."""
        group_id, index, _ = episode_id.rsplit(".", 2)
        group = self.groups.get(group_id)
        if group is None or len(index) > _INDEX_DIGITS_MAX:
            return None
        episode = group.episodes.get(int(index))
        return episode if episode is not None and episode.episode_id == episode_id else None

    def episodes(self) -> Iterator[tuple[Group, HeldEpisode]]:
        """The newest attempts of all open groups."""
        for group in self.groups.values():
            for episode in group.episodes.values():
                yield group, episode

    def has_ended(self, episode_id: str) -> bool:
        """Whether the final record of this episode is on the log, so that nothing extends it."""
        return (episode := self.episode(episode_id)) is not None and episode.state == "ended"

    def waiting_count(self, domain: str) -> int:
        """Number of groups of the domain that are requested and not admitted."""
        return sum(
            group.state == "requested" and group.facts.domain == domain
            for group in self.groups.values()
        )

    def size_bytes(self) -> int:
        """Approximate memory of histories and tasks."""
        return self._held.total

    def lapsed(self, now_s: float) -> list[HeldEpisode]:
        """Open episodes whose lease has lapsed."""
        return self._leases.lapsed(now_s)

    def release(self, episode: HeldEpisode, *, now_s: float) -> None:
        """Let the lease of an episode lapse now."""
        episode.release(now_s)
        self._leases.add(episode)

    def renew_leases(self, now_s: float) -> None:
        """Let every lease that has not lapsed run from now, because no agent could be heard."""
        for episode in [each for _, each in self.episodes() if each.state == "open"]:
            episode.renew(now_s)

    def view(self, group_id: str) -> GroupStatus | None:
        """The group as the admin API shows it; None if it was never requested."""
        group = self.groups.get(group_id)
        if group is None:
            return self.retired.get(group_id)
        return GroupStatus(
            group_id=group_id,
            state=group.state,
            retire_reason="",
            group_size=group.facts.group_size,
            queue_index=group.queue_index,
            open=group.open_count(),
            finished=len(group.finished),
            task_number=group.facts.task_number,
        )

    def _note(self, episode: HeldEpisode, part: TurnPart, request_id: str) -> None:
        """Take over what any record of a turn says about its episode."""
        episode.note_sequence(part.sequence)
        episode.note_body(part.body_digest, request=request_id, ordinal=part.ordinal)
        if part.tools and part.tools_digest not in episode.tools:
            tools = tuple(msgspec.json.decode(part.tools))
            episode.note_tools(part.tools_digest, tools, len(part.tools))

    def _note_echo(
        self, episode: HeldEpisode, record: RequestedCompletion | FinishedCompletion
    ) -> KnownCompletion | None:
        """Mark the completion that a request extends: it shows that the client has it."""
        if record.parent_id is None:
            return None
        parent = episode.history.completions.get(record.parent_id)
        if parent is not None and not record.turn.is_fork:
            parent.echoed = True
        return parent

    def _completion(
        self,
        episode: HeldEpisode,
        record: FinishedCompletion,
        *,
        offset: int,
        finished_ms: int,
        parse: Parse,
    ) -> KnownCompletion | None:
        parent = self._note_echo(episode, record)
        if record.parent_id is not None and parent is None:
            return None
        part = record.turn
        context = context_tail(
            episode, record.context, parent=parent, shared_tokens=record.shared_prefix_tokens
        )
        completion = KnownCompletion(
            request_id=record.request_id,
            offset=offset,
            sequence=part.sequence,
            parent=parent,
            shared_tokens=record.shared_prefix_tokens,
            context=record.context,
            output=record.output,
            context_tokens=record.shared_prefix_tokens + len(record.context) // TOKEN_BYTES,
            path=EMPTY_PATH,
            reply=cut_at(
                parse(record.output, record.request_id, tools_of(episode, part), context),
                record.stop_string,
            ),
            tools_digest=part.tools_digest,
            lane=record.lane,
            epoch=record.epoch,
            weights=began_under(record),
            sampled_end=record.finish_reason,
            stop_string=record.stop_string,
            engine_s=record.engine_s,
            alone_s=record.alone_s,
            cached_tokens=record.cached_tokens,
            taken_ms=finished_ms - round(1000 * (record.queued_s + record.engine_s)),
            finished_ms=finished_ms,
            temperature=record.temperature,
            messages=part.messages if may_be_referred_to(part) else b"",
            logprobs=record.logprobs,
            top_tokens=record.top_tokens,
            is_fork=part.is_fork,
            after_offset=known_before(part, parent=parent),
        )
        episode.history.add(
            completion,
            keys=part.message_digests,
            after=_path_before(part, parent=parent),
        )
        episode.note_fork(part, parent=parent)
        if parent is None:
            episode.first_prompts.note(completion)
        return completion


def _path_before(part: TurnPart, *, parent: KnownCompletion | None) -> bytes:
    """The path that the messages of a turn follow; a prompt without a template is a path alone."""
    return EMPTY_PATH if parent is None or part.is_fork or is_raw(part) else parent.path
