"""The records of a run as its stalls are judged by: groups that are open, lanes, steps."""

from collections import Counter

from forgemq_contracts import topics
from forgemq_contracts.accounting import RetiredIds
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import (
    AdmittedGroup,
    MergedGroup,
    RequestedGroup,
    RetiredGroup,
    ScoredGroup,
)
from forgemq_contracts.lanes import LaneLiveness, WeightsId
from forgemq_contracts.messages import Message
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_run_view.watched import Waits, WatchedGroup


class WatchBook:
    """What is open in a run and when each thing last happened, in milliseconds of the log's clock.

    Lifecycle: `apply` every record, topics in any order; read the values at any time. Groups that
    are over are dropped, so it holds what is open and no more.
    """

    def __init__(self) -> None:
        self.groups: dict[str, WatchedGroup] = {}
        self.lanes = LaneLiveness()
        self.busy: dict[int, int] = {}  # Requests that a lane has, running or queued.
        self.served_ms = 0  # When some lane last said that it serves.
        self.sign_ms = 0  # When a completion or an end last came of any group,
        self.evaluated_ms = 0  # and of one that measures the policy.
        self.scheduled: dict[int, int] = {}  # When each step that is not trained was scheduled.
        self.steps_scheduled = 0
        self.trained: WeightsId = (0, 0)  # The newest lineage, and steps trained in it.
        self.published: tuple[WeightsId, int] | None = None  # And when.
        self.steps = Waits()
        self.gradings = Waits()
        self.mergings = Waits()
        self.silences = Waits()
        self.playings = Waits()
        self.newest_ms = 0
        self._written_ms: Counter[str] = Counter()  # By topic, when its newest record was written.
        self._trained_ms = 0
        self._over = RetiredIds()

    def written_ms(self, *wanted: topics.Topic) -> int:
        """When the newest record of these topics was written; 0 without one."""
        return max(self._written_ms[topic.name] for topic in wanted)

    def open_groups(self, domain: str) -> list[WatchedGroup]:
        """Groups of a queue that have a queue index and are not retired, by that index."""
        groups = [
            group
            for group in self.groups.values()
            if group.domain == domain and group.queue_index is not None
        ]
        return sorted(groups, key=lambda group: group.queue_index or 0)

    def requested_ms(self, domain: str) -> int | None:
        """Since when a training group of the domain waits to be admitted; None if none does."""
        return min(
            (
                group.requested_ms
                for group in self.groups.values()
                if group.domain == domain and group.purpose == "train" and not group.admitted_ms
            ),
            default=None,
        )

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds only show that their writer is there."""
        at_ms = message.timestamp_ms
        self._written_ms[message.topic] = max(self._written_ms[message.topic], at_ms)
        self.newest_ms = max(self.newest_ms, at_ms)
        match message.record:
            case ReportedEngine() as record:
                self.lanes.observe(record, at_ms=at_ms)
                self.busy[record.lane] = record.running + record.queued
                self.served_ms = max(self.served_ms, at_ms if record.is_serving else 0)
            case LoadedWeights() as record:
                self.lanes.observe_loaded(record, at_ms=at_ms)
            case PublishedWeights() as record:
                weights = (record.lineage, record.version)
                if self.published is None or weights > self.published[0]:
                    self.published = (weights, at_ms)
            case ScheduledStep() as record:
                self._schedule(record, at_ms)
            case TrainedStep() as record:
                self._train(record, at_ms)
            case _:
                self._apply_group(message)

    def _schedule(self, record: ScheduledStep, at_ms: int) -> None:
        self.steps_scheduled = max(self.steps_scheduled, record.step + 1)
        if record.step >= self.trained[1]:
            self.scheduled.setdefault(record.step, at_ms)
        for group in record.groups:
            if (entry := self._entry(group.group_id)) is not None:
                entry.is_scheduled = True

    def _train(self, record: TrainedStep, at_ms: int) -> None:
        self.trained = max(self.trained, (record.lineage, record.step + 1))
        for step in [each for each in self.scheduled if each <= record.step]:
            self.steps.add(at_ms - max(self.scheduled.pop(step), self._trained_ms))
        self._trained_ms = max(self._trained_ms, at_ms)

    def _entry(self, group_id: str) -> WatchedGroup | None:
        """The group; None if it is over."""
        entry = self.groups.get(group_id)
        if entry is None and group_id not in self._over:
            entry = self.groups[group_id] = WatchedGroup(group_id=group_id)
        return entry

    def _apply_group(self, message: Message) -> None:
        group_id = getattr(message.record, "group_id", None)
        entry = self._entry(group_id) if group_id is not None else None
        if entry is None:
            return
        at_ms = message.timestamp_ms
        match message.record:
            case RequestedGroup() as record:
                entry.domain, entry.purpose = record.domain, record.purpose
                entry.requested_ms = at_ms
            case AdmittedGroup() as record:
                entry.domain, entry.purpose = record.domain, record.purpose
                entry.queue_index, entry.group_size = record.queue_index, record.group_size
                entry.admitted_ms, entry.is_live = at_ms, record.source == "live"
                self.lanes.raise_floor((record.lineage_at_admission, record.version_at_admission))
            case FinishedCompletion():
                self._hear(entry, at_ms)
            case FinishedEpisode() as record:
                self._hear(entry, at_ms)
                entry.finished.add(record.index)
            case ScoredGroup():
                entry.scored_ms = at_ms
            case MergedGroup() as record:
                entry.merged_ms, entry.is_ready = at_ms, not record.not_trainable
            case RetiredGroup():
                self._retire(entry)
            case _:
                pass

    def _hear(self, entry: WatchedGroup, at_ms: int) -> None:
        entry.hear(at_ms)
        self.sign_ms = max(self.sign_ms, at_ms)
        self.evaluated_ms = max(self.evaluated_ms, at_ms if entry.purpose == "eval" else 0)

    def _retire(self, entry: WatchedGroup) -> None:
        del self.groups[entry.group_id]
        self._over.add(entry.group_id)
        if not (entry.merged_ms and entry.scored_ms and entry.sign_ms and entry.admitted_ms):
            return  # Broken off, or its records are not read yet: it says nothing of what is usual.
        self.silences.add(entry.longest_silence_ms)
        self.playings.add(entry.sign_ms - entry.admitted_ms)
        self.gradings.add(entry.scored_ms - entry.sign_ms)
        self.mergings.add(entry.merged_ms - entry.scored_ms)
