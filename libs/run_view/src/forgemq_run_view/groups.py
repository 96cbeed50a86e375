"""Groups of a run: how far each has come, what its episodes scored, and the window over them."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.fields import Source
from forgemq_contracts.groups import (
    AdmittedGroup,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
    ScoredGroup,
)
from forgemq_contracts.messages import Message
from forgemq_contracts.queues import window_of
from forgemq_contracts.run import Queue
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_run_view.evaluation_rounds import EvaluationRounds
from forgemq_run_view.forks import ForkBook
from forgemq_run_view.group_entry import GroupEntry, row, window_positions
from forgemq_run_view.shown_groups import ShownGroups, is_shown
from forgemq_run_view.state import (
    EvaluationPoint,
    ForkTotal,
    GroupRow,
    Position,
    QueueState,
    UntrainedDomain,
    VersionPoint,
)
from forgemq_run_view.tally import Sums

GROUPS_KEPT_MAX = 20_000
"""Groups known one by one, about 1 kB each; of older groups that are over only totals remain."""
RETIRED_SHOWN_MAX = 24
"""Retired groups of a queue that are still shown: about one row of the page."""
FORGET_LOOKS_MAX = 8
"""Groups looked at for each new one, so that a new group costs the same however many are open."""
SETTLED_SHARE = 0.5
"""Episodes that a version needs before its mean is shown, as a share of those of a step: the mean
of fewer is that of the quickest groups."""

_BROKEN_OFF = ("expired", "cancelled", "failed")
_UNTAKEN: tuple[Position, ...] = ("playing", "complete", "ready")


@dataclass(slots=True)
class _Untrained:
    sums: Sums = field(default_factory=Sums)
    conversations: int = 0
    ended: int = 0
    training: int = 0


class GroupBook:
    """All groups of a run.

    Lifecycle: `apply` every record; read the values at any time. A group requested, admitted at
    index 3 and scored counts once in `versions()` under its version at admission. Of more than
    `groups_kept_max` groups the oldest that are over are forgotten one by one; they stay counted.
    """

    def __init__(self, *, groups_kept_max: int = GROUPS_KEPT_MAX) -> None:
        self._groups_kept_max = groups_kept_max
        self._forgotten = RetiredIds()
        self._by_age: deque[str] = deque()
        self._entries: dict[str, GroupEntry] = {}
        self._open: dict[str, set[str]] = {}
        self._behind: dict[str, deque[str]] = {}
        self._waiting: Counter[str] = Counter()
        self._versions: dict[int, Sums] = {}
        self._rounds = EvaluationRounds()
        self._untrained: dict[tuple[Source, str], _Untrained] = {}
        self._shown_groups = ShownGroups()
        self._at_ms = 0  # Time of the record that is applied.
        self.retired: Counter[str] = Counter()
        self.admitted = 0
        self.episodes_finished = 0
        self.episode_ends: Counter[str] = Counter()
        self._forks = ForkBook()

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds and of forgotten groups are ignored."""
        group_id = getattr(message.record, "group_id", None)
        if group_id is not None and not self._is_kept(group_id):
            return
        self._at_ms = message.timestamp_ms
        if group_id is not None and is_shown(message.record):
            entry = self._entry(group_id)
            if group_id in self._shown_groups:
                at = (message.topic, message.partition, message.offset)
                entry.shown_offsets.append(at)
        match message.record:
            case RequestedGroup() as record:
                self._apply_requested(record)
            case AdmittedGroup() as record:
                self._apply_admitted(record)
            case FinishedCompletion() as record:
                self._apply_completion(record, partition=message.partition, offset=message.offset)
            case FinishedEpisode() as record:
                self._apply_episode(record)
            case AuditedGroup() as record:
                self._apply_audited(record)
            case _:
                self._apply_outcome(message)

    def _apply_outcome(self, message: Message) -> None:
        match message.record:
            case ScoredGroup() as record:
                self._apply_scored(record)
            case MergedGroup() as record:
                self._entry(record.group_id).is_ready = not record.not_trainable
            case ScheduledStep() as record:
                for group in record.groups:
                    if self._is_kept(group.group_id):
                        self._entry(group.group_id).scheduled_step = record.step
            case TrainedStep() as record:
                for group_id in record.group_ids:
                    if self._is_kept(group_id):
                        self._entry(group_id).is_trained = True
            case RetiredGroup() as record:
                self._apply_retired(record)
            case _:
                pass

    @property
    def open(self) -> int:
        """Groups admitted and not retired."""
        return sum(len(ids) for ids in self._open.values())

    def knows(self, group_id: str) -> bool:
        """Whether any record named this group, and it is not forgotten."""
        return group_id in self._entries

    def record_offsets(self, group_id: str) -> tuple[tuple[str, int, int], ...]:
        """(topic, partition, offset) of the group's completions, grades, score and imported ends.

        () if they were dropped.
        """
        entry = self._entries.get(group_id)
        if entry is None:
            return ()
        completions = ((FINISHED_COMPLETIONS.name, *at) for at in entry.completion_offsets)
        return (*completions, *entry.shown_offsets)

    def rows(self, *, rows_max: int) -> tuple[GroupRow, ...]:
        """The groups that began last, newest first; the untrained are at most a quarter."""
        newest = self._shown_groups.newest(rows_max=rows_max)
        return tuple(row(self._entries[each]) for each in newest if each in self._entries)

    def forks(self) -> tuple[ForkTotal, ...]:
        """Forks by reason, the most frequent first."""
        return self._forks.totals(episodes_finished=self.episodes_finished)

    def versions(self, queues: Sequence[Queue]) -> tuple[VersionPoint, ...]:
        """Training results by the version at admission, of versions with enough episodes."""
        of_a_step = sum(queue.groups_per_step * queue.group_size for queue in queues)
        return tuple(
            VersionPoint(version=version, tally=sums.tally())
            for version, sums in sorted(self._versions.items())
            if sums.episodes >= SETTLED_SHARE * of_a_step
        )

    def evaluations(self) -> tuple[EvaluationPoint, ...]:
        """Evaluation rounds, oldest weights first; last, those of which nothing is sampled."""
        return self._rounds.points()

    def untrained(self, source: Source) -> tuple[UntrainedDomain, ...]:
        """Conversations of this source, by domain."""
        return tuple(
            UntrainedDomain(
                domain=domain,
                conversations=each.conversations,
                ended=each.ended,
                training=each.training,
                tally=each.sums.tally(),
            )
            for (of, domain), each in sorted(self._untrained.items())
            if of == source
        )

    def queue(
        self, queue: Queue, *, groups: int, bound: int, limit: int, staleness: int
    ) -> QueueState:
        """The window of one queue as the log shows it: a scheduled group is taken."""
        entries = sorted(
            (self._entries[group_id] for group_id in self._shown(queue.domain)),
            key=lambda entry: entry.queue_index or 0,
        )
        # Every entry that is shown has an index.
        untaken = (each.queue_index or 0 for each in entries if each.position() in _UNTAKEN)
        head = min(untaken, default=None)
        return QueueState(
            domain=queue.domain,
            slots=queue.slots,
            window=window_of(queue),
            groups_per_step=groups,
            staleness_bound=bound,
            staleness_limit=limit,
            staleness=staleness,
            head=head,
            in_flight=sum(
                self._entries[each].queue_index is not None
                for each in self._open.get(queue.domain, ())
            ),
            waiting=self._waiting[queue.domain],
            positions=window_positions(entries, head=head, window=window_of(queue)),
        )

    def _shown(self, domain: str) -> list[str]:
        shown = {*self._open.get(domain, ()), *self._behind.get(domain, ())}
        kept = shown & self._entries.keys()
        return [g for g in kept if self._entries[g].queue_index is not None]

    def _is_kept(self, group_id: str) -> bool:
        return group_id in self._entries or group_id not in self._forgotten

    def _entry(self, group_id: str) -> GroupEntry:
        entry = self._entries.get(group_id)
        if entry is None:
            entry = self._entries[group_id] = GroupEntry(group_id=group_id)
            self._hide(self._shown_groups.add(group_id, at_ms=self._at_ms))
            self._by_age.append(group_id)
            self._forget()
        else:
            self._shown_groups.note_time(group_id, at_ms=self._at_ms)
        return entry

    def _hide(self, group_id: str | None) -> None:
        """Drop the offsets of a group that is shown no more."""
        entry = self._entries.get(group_id or "")
        if entry is not None:
            entry.completion_offsets.clear()
            entry.shown_offsets.clear()

    def _forget(self) -> None:
        """Forget the oldest groups that are over, looking at a few at a time.

        Topics are read in any order, so of a group that is over some records may still come. A
        group that was broken off never gets all of them: it is passed over once, then forgotten.
        """
        for _ in range(FORGET_LOOKS_MAX):
            if len(self._by_age) <= self._groups_kept_max:
                return
            group_id = self._by_age.popleft()
            entry = self._entries[group_id]
            is_broken_off = entry.is_admitted and entry.reason in _BROKEN_OFF
            if entry.is_complete() or (is_broken_off and entry.is_passed_over):
                del self._entries[group_id]
                self._forgotten.add(group_id)
            else:
                entry.is_passed_over = is_broken_off
                self._by_age.append(group_id)

    def _apply_requested(self, record: RequestedGroup) -> None:
        entry = self._entry(record.group_id)
        if not entry.is_requested:
            entry.is_requested = True
            entry.describe(record)
            if record.purpose == "train" and not (entry.is_admitted or entry.reason):
                entry.is_waiting = True
                self._waiting[record.domain] += 1

    def _apply_admitted(self, record: AdmittedGroup) -> None:
        entry = self._entry(record.group_id)
        if entry.is_admitted:
            return
        self._end_waiting(entry)
        entry.is_admitted, entry.is_greedy = True, record.temperature == 0
        entry.queue_index, entry.version = record.queue_index, record.version_at_admission
        entry.describe(record)
        self.admitted += 1
        if not entry.reason:
            self._open.setdefault(entry.domain, set()).add(entry.group_id)
        if entry.is_in_round:
            self._rounds.start(entry)
        elif entry.is_untrained:
            self._hide(self._shown_groups.note_untrained(entry.group_id))
            self._untrained_of(entry).conversations += 1
            self._untrained_of(entry).training += entry.queue_index is not None
        self._count_score(entry)

    def _apply_completion(self, record: FinishedCompletion, *, partition: int, offset: int) -> None:
        entry = self._entry(record.group_id)
        if record.group_id in self._shown_groups:
            entry.completion_offsets.append((partition, offset))
        versions = [span.version for span in record.spans]
        if not versions:
            return
        self._widen_versions(entry, min(versions), max(versions))

    def _widen_versions(self, entry: GroupEntry, low: int, high: int) -> None:
        entry.version_min = low if entry.version_min is None else min(low, entry.version_min)
        entry.version_max = high if entry.version_max is None else max(high, entry.version_max)
        if entry.is_in_round:
            self._rounds.note_version(entry, low)
            self._rounds.note_version(entry, high)

    def _apply_episode(self, record: FinishedEpisode) -> None:
        entry = self._entry(record.group_id)
        if record.index not in entry.finished:
            entry.finished.add(record.index)
            if record.source != "agent":
                return
            self.episodes_finished += 1
            self._forks.add(record)
            is_truncated = record.truncated_by is not None
            self.episode_ends["truncated" if is_truncated else record.status] += 1
            entry.truncated += is_truncated

    def _apply_audited(self, record: AuditedGroup) -> None:
        """Take the audit's numbers in place of the completions, which may be trimmed."""
        entry = self._entry(record.group_id)
        entry.completions = record.completions
        if record.version_min is not None and record.version_max is not None:
            self._widen_versions(entry, record.version_min, record.version_max)

    def _apply_scored(self, record: ScoredGroup) -> None:
        entry = self._entry(record.group_id)
        if entry.is_scored:
            return
        entry.is_scored = True
        entry.scored = record.episodes
        self._count_score(entry)

    def _count_score(self, entry: GroupEntry) -> None:
        # The version at admission and the score come on different topics, in either order.
        if not entry.is_admitted or entry.scored is None:
            return
        own = Sums()
        target = self._count_end(entry)
        for score in entry.scored:
            own.add(score)
            target.add(score)
        entry.success = own.tally().success if own.episodes else None
        entry.scored = None

    def _count_end(self, entry: GroupEntry) -> Sums:
        """Count a group that is scored; returns the sums that its episodes belong to."""
        if entry.is_untrained:
            self._untrained_of(entry).ended += 1
            return self._untrained_of(entry).sums
        if entry.is_in_round:
            return self._rounds.end(entry)
        return self._versions.setdefault(entry.version, Sums())

    def _apply_retired(self, record: RetiredGroup) -> None:
        entry = self._entry(record.group_id)
        if entry.reason:
            return
        self._end_waiting(entry)  # One whose request is a dead letter is never admitted.
        entry.reason = record.reason
        self.retired[record.reason] += 1
        self._open.setdefault(record.domain, set()).discard(record.group_id)
        if record.queue_index is not None:
            behind = self._behind.setdefault(record.domain, deque(maxlen=RETIRED_SHOWN_MAX))
            entry.queue_index = record.queue_index
            behind.append(record.group_id)

    def _end_waiting(self, entry: GroupEntry) -> None:
        self._waiting[entry.domain] -= entry.is_waiting
        entry.is_waiting = False

    def _untrained_of(self, entry: GroupEntry) -> _Untrained:
        return self._untrained.setdefault((entry.source, entry.domain), _Untrained())
