"""Lanes, generated tokens, and which service wrote when."""

from collections import deque

from forgemq_contracts import topics
from forgemq_contracts.accounting import RetiredIds, is_candidate
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.messages import Message
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_run_view.state import Activity, EngineState, RatePoint

RATE_SPAN_MS = 20_000
"""Tokens per second are a mean over this time: a shorter one shows single turns."""

SECOND_MS = 1000
SECONDS_KEPT_MAX = 600
"""With tokens. More than that mean needs, as clocks of several machines differ."""

LOADS_KEPT_MAX = 8
"""Of each lane: its heartbeat is at most a second behind."""

BUCKET_MS = 10_000
"""One point of the curve of tokens per second."""
BUCKETS_KEPT_MAX = 720
"""Two hours of points, as many as the page shows."""


class EngineBook:
    """Lanes, generated tokens and the activity of services.

    Completions of a group count one by one until the group is audited. Then they may be trimmed,
    so the number in the audit replaces their count.
    """

    def __init__(self) -> None:
        self._reported: dict[int, tuple[int, ReportedEngine]] = {}
        """Of each lane the newest report, and its offset."""
        self._loads: dict[int, deque[LoadedWeights]] = {}
        self._seconds: dict[int, int] = {}
        self._activity: dict[str, tuple[int, int]] = {}
        self._buckets: dict[int, int] = {}
        self._unaudited: dict[str, tuple[int, int]] = {}
        self._audited = RetiredIds()
        self.tokens_generated = 0
        self.completions = 0
        self.version = 0

    def apply(self, message: Message) -> None:
        """Take in one record; every record counts as activity of its topic's producer."""
        producer = topics.BY_NAME[message.topic].producer
        records, last_ms = self._activity.get(producer, (0, 0))
        self._activity[producer] = (records + 1, max(last_ms, message.timestamp_ms))
        match message.record:
            case ReportedEngine() as record:
                self._apply_report(record, offset=message.offset)
            case LoadedWeights() as record:
                self._loads.setdefault(record.lane, deque(maxlen=LOADS_KEPT_MAX)).append(record)
            case PublishedWeights() as record:
                self.version = max(self.version, record.version)
            case FinishedCompletion() as record if is_candidate(record):
                self._apply_completion(record, time_ms=message.timestamp_ms)
            case AuditedGroup() as record:
                self._apply_audit(record)
            case _:
                pass

    def tokens_per_s(self, *, now_ms: int) -> float:
        """Generated tokens per second over the last `RATE_SPAN_MS`."""
        oldest = (now_ms - RATE_SPAN_MS) // SECOND_MS
        recent = sum(tokens for second, tokens in self._seconds.items() if second >= oldest)
        return recent * 1000 / RATE_SPAN_MS

    def rates(self) -> tuple[RatePoint, ...]:
        """Tokens per second over the last two hours, oldest first; empty intervals are left out."""
        return tuple(
            RatePoint(time_ms=bucket * BUCKET_MS, tokens_per_s=tokens * 1000 / BUCKET_MS)
            for bucket, tokens in sorted(self._buckets.items())
        )

    def _apply_audit(self, record: AuditedGroup) -> None:
        if record.group_id in self._audited:
            return
        self._audited.add(record.group_id)
        completions, tokens = self._unaudited.pop(record.group_id, (0, 0))
        self.completions += record.completions - completions
        self.tokens_generated += record.output_tokens - tokens

    def _apply_completion(self, record: FinishedCompletion, *, time_ms: int) -> None:
        tokens = len(record.output) // 4
        if record.group_id not in self._audited:
            completions, before = self._unaudited.get(record.group_id, (0, 0))
            self._unaudited[record.group_id] = (completions + 1, before + tokens)
            self.completions += 1
            self.tokens_generated += tokens
        _add(self._seconds, time_ms // SECOND_MS, tokens, kept_max=SECONDS_KEPT_MAX)
        _add(self._buckets, time_ms // BUCKET_MS, tokens, kept_max=BUCKETS_KEPT_MAX)

    def engines(self) -> tuple[EngineState, ...]:
        """Every lane that has reported itself, by number."""
        return tuple(self._engine(record) for _, (_, record) in sorted(self._reported.items()))

    def activity(self) -> tuple[Activity, ...]:
        """What each service has written, by its name."""
        return tuple(
            Activity(service=service, records=records, last_ms=last_ms)
            for service, (records, last_ms) in sorted(self._activity.items())
        )

    def _apply_report(self, record: ReportedEngine, *, offset: int) -> None:
        """Keep the newest by the log: a process's clock may be set back between two reports."""
        known_offset, known = self._reported.get(record.lane, (offset, record))
        if (record.epoch, offset) >= (known.epoch, known_offset):
            self._reported[record.lane] = (offset, record)

    def _engine(self, record: ReportedEngine) -> EngineState:
        loaded = self._load_of(record)
        return EngineState(
            lane=record.lane,
            epoch=record.epoch,
            url=record.url,
            is_serving=record.is_serving,
            lineage=record.lineage,
            version=record.version,
            running=record.running,
            queued=record.queued,
            reported_ms=record.reported_ms,
            path=loaded.path if loaded else "",
            paused_s=loaded.paused_s if loaded else 0.0,
        )

    def _load_of(self, report: ReportedEngine) -> LoadedWeights | None:
        """How the weights that a lane reports arrived: another topic, read sooner or later."""
        reported = (report.epoch, report.lineage, report.version)
        for load in reversed(self._loads.get(report.lane, ())):
            if (load.epoch, load.lineage, load.version) == reported:
                return load
        return None


def _add(sums: dict[int, int], time: int, tokens: int, *, kept_max: int) -> None:
    """Add to the sum of this time; of more than `kept_max` sums the oldest goes."""
    sums[time] = sums.get(time, 0) + tokens
    if len(sums) > kept_max:
        del sums[min(sums)]
