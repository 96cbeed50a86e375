"""The merger's state machine: one partition of groups, from finished completions to trees.

Rules it keeps:
- Exactly one MergedGroup per ScoredGroup, in the same transaction as its tree.
- Topics have no order among each other, so a scored group waits until the offsets of the
  completions it names have been read. A completion that is not there by then is missing.
- A group is dropped once it is merged or retired; late completions of closed groups are ignored.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Event, Message, Output, References, Tick
from forgemq_contracts.topics import FINISHED_COMPLETIONS, MERGED_GROUPS, MERGED_TREES
from forgemq_merger.core.completions import GroupCompletions, KeptCompletion
from forgemq_merger.core.merge import merge_group, not_merged

QUIET_MS_MAX = 60_000
"""How long a scored group waits for the completions it names while the partition is silent.

They come before it in time but on another topic, so the usual wait is one batch. After a minute
without a record the missing one was bad and is a dead letter: waiting would hold a slot until the
group's deadline.
"""


class MergerState(Struct, frozen=True, kw_only=True):
    """The snapshot: sorted tuples, so equal states give equal bytes."""

    run_ms: int
    heard_ms: int
    completions_position: int
    groups: tuple[tuple[str, tuple[KeptCompletion, ...]], ...]
    """Groups that were open when logic version 2 took over, whose records may be trimmed."""
    waiting: tuple[tuple[int, ScoredGroup], ...]
    merged: bytes
    retired: bytes
    offsets: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Of each group the records that hold its completions."""


class MergerCore:
    """The `Core` of one group partition."""

    def __init__(
        self, partition: int, *, tree_tokens_max: int | None = None, has_teacher: bool = False
    ) -> None:
        self._partition = partition
        self._tree_tokens_max = tree_tokens_max
        self._has_teacher = has_teacher
        self._run_ms = 0
        self._heard_ms = 0
        self._completions_position = 0
        self._groups: dict[str, GroupCompletions] = {}
        self._waiting: list[tuple[int, ScoredGroup]] = []
        self._merged = RetiredIds()
        self._retired = RetiredIds()

    def handle(self, event: Event) -> Sequence[Output]:
        """Apply one event; returns trees and summaries, each tree before its summary."""
        if isinstance(event, Tick):
            return self._tick(event.run_ms)
        record = event.record
        if isinstance(record, FinishedCompletion):
            return self._finished(record, event)
        if isinstance(record, ScoredGroup):
            return self._scored(record)
        assert isinstance(record, RetiredGroup), f"{event.topic} is no input of the merger"
        return self._end(record)

    def snapshot(self) -> bytes:
        """All state; equal states give equal bytes."""
        state = MergerState(
            run_ms=self._run_ms,
            heard_ms=self._heard_ms,
            completions_position=self._completions_position,
            groups=tuple(
                (group_id, group.in_log_order())
                for group_id, group in sorted(self._groups.items())
                if not group.is_named
            ),
            waiting=tuple(self._waiting),
            merged=self._merged.to_bytes(),
            retired=self._retired.to_bytes(),
            offsets=tuple(
                (group_id, group.offsets)
                for group_id, group in sorted(self._groups.items())
                if group.is_named
            ),
        )
        return msgspec.msgpack.encode(state)

    def restore(self, snapshot: bytes) -> None:
        """Replace all state with that of a `snapshot()`."""
        state = msgspec.msgpack.decode(snapshot, type=MergerState)
        self._run_ms = state.run_ms
        self._heard_ms = state.heard_ms
        self._completions_position = state.completions_position
        self._groups = {group_id: GroupCompletions(kept) for group_id, kept in state.groups}
        for group_id, offsets in state.offsets:
            self._groups[group_id] = GroupCompletions(offsets=offsets)
        self._waiting = list(state.waiting)
        self._merged.restore(state.merged)
        self._retired.restore(state.retired)

    def references(self) -> Sequence[References]:
        """The completions of open groups: a snapshot names their records."""
        groups = [group for group in self._groups.values() if group.is_named]
        offsets = sorted(offset for group in groups for offset in group.offsets)
        return (
            References(
                topic=FINISHED_COMPLETIONS.name, partition=self._partition, offsets=tuple(offsets)
            ),
        )

    def recall(self, message: Message) -> None:
        """Take back a completion of an open group."""
        record = message.record
        assert isinstance(record, FinishedCompletion), f"{message.topic} is never recalled"
        self._groups[record.group_id].recall(record, offset=message.offset)

    def _finished(self, record: FinishedCompletion, message: Message) -> list[Output]:
        self._completions_position = message.offset + 1
        self._heard_ms = self._run_ms
        if record.group_id not in self._merged and record.group_id not in self._retired:
            group = self._groups.setdefault(record.group_id, GroupCompletions())
            group.add(record, offset=message.offset)
        return self._merge_ready()

    def _scored(self, scored: ScoredGroup) -> list[Output]:
        is_known = any(waiting.group_id == scored.group_id for _, waiting in self._waiting)
        if is_known or scored.group_id in self._merged:
            return []
        if scored.group_id in self._retired:
            # It still gets its MergedGroup: reward wrote a ScoredGroup, and each has exactly one.
            return self._conclude(scored, is_retired=True)
        self._waiting.append((self._run_ms, scored))
        return self._merge_ready()

    def _end(self, retired: RetiredGroup) -> list[Output]:
        group_id = retired.group_id
        self._groups.pop(group_id, None)
        self._retired.add(group_id)
        cut_off = [scored for _, scored in self._waiting if scored.group_id == group_id]
        self._waiting = [waiting for waiting in self._waiting if waiting[1].group_id != group_id]
        return [output for scored in cut_off for output in self._conclude(scored, is_retired=True)]

    def _tick(self, run_ms: int) -> list[Output]:
        self._run_ms = run_ms
        return self._merge_ready()

    def _merge_ready(self) -> list[Output]:
        outputs: list[Output] = []
        still_waiting = []
        for since_ms, scored in self._waiting:
            if self._is_ready(scored, since_ms=since_ms):
                outputs.extend(self._conclude(scored, is_retired=False))
            else:
                still_waiting.append((since_ms, scored))
        self._waiting = still_waiting
        return outputs

    def _is_ready(self, scored: ScoredGroup, *, since_ms: int) -> bool:
        needed = max((completion.offset for completion in scored.completions), default=-1)
        if scored.not_trainable or needed < self._completions_position:
            return True  # the largest offset is read, and offsets are read in order
        return self._run_ms - max(since_ms, self._heard_ms) >= QUIET_MS_MAX

    def _conclude(self, scored: ScoredGroup, *, is_retired: bool) -> list[Output]:
        group = self._groups.pop(scored.group_id, GroupCompletions())
        self._merged.add(scored.group_id)
        if is_retired:
            summary = not_merged(
                scored,
                partition=self._partition,
                reason=scored.not_trainable or "failed",
                detail=scored.detail or "retired before it was merged",
            )
            return [self._output(MERGED_GROUPS.name, summary)]
        tree, summary = merge_group(
            scored,
            group.in_log_order(),
            partition=self._partition,
            tree_tokens_max=self._tree_tokens_max,
            has_teacher=self._has_teacher,
        )
        outputs = [] if tree is None else [self._output(MERGED_TREES.name, tree)]
        return [*outputs, self._output(MERGED_GROUPS.name, summary)]

    def _output(self, topic: str, record: Struct) -> Output:
        return Output(topic=topic, partition=self._partition, record=record)
