"""Reads the records that concern one lane and passes each to the part that handles it."""

from collections.abc import Callable

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import FencedError, OutOfRangeError
from forgemq_bus.kept_records import pass_trimmed
from forgemq_bus.log import Log, Place, Reader, Record
from forgemq_contracts import topics
from forgemq_contracts.completions import CancelledCompletion, RequestedCompletion
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_contracts.weights import OfferedBroadcast, PublishedWeights, ReportedEngine
from forgemq_inference.core.weights import WeightsState
from forgemq_inference.lane_duty import LaneDuty
from forgemq_inference.reports import LaneIdentity
from forgemq_inference.requests import Requests
from forgemq_shell.dead_letters import DeadLetters
from forgemq_telemetry import Telemetry

_READ_TIMEOUT_S = 0.25
"""Longest wait of one read; a paused reader looks this often whether requests have drained."""
_RECORDS_MAX = 500
"""Records of one read; taking them is a few ms in which no answer is written."""


class Inbox:
    """Reads what concerns the lane: requests, weights, changes of lanes; one task `run`."""

    def __init__(
        self,
        identity: LaneIdentity,
        *,
        requests: Requests,
        weights: WeightsState,
        duty: LaneDuty,
        on_published: Callable[[], None],
        dead_letters: DeadLetters,
        queued_max: int,
        telemetry: Telemetry,
    ) -> None:
        """Read nothing yet; `on_published` is called when there is something to load or join."""
        self._identity = identity
        self._requests = requests
        self._weights = weights
        self._duty = duty
        self._on_published = on_published
        self._dead_letters = dead_letters
        self._queued_max = queued_max
        self._telemetry = telemetry
        self._requested = Place(topics.REQUESTED_COMPLETIONS.name, identity.lane)
        self._cancelled = Place(topics.CANCELLED_COMPLETIONS.name, identity.lane)
        self._is_paused = False

    async def run(
        self, reader: Reader, *, log: Log, turned: Callable[[], None] = lambda: None
    ) -> None:
        """Read until cancelled; while too many requests wait, requests alone are not read.

        Args:
            reader: Of the lane's topics.
            log: That of the reader.
            turned: Called before each read.

        Raises:
            FencedError: a newer process has the lane.
            OutOfRangeError: a position that never was on the log.
        """
        while True:
            turned()
            try:
                records = await reader.read(timeout_s=_READ_TIMEOUT_S, records_max=_RECORDS_MAX)
            except OutOfRangeError as error:
                await self._pass_retired(reader, log, error)
                continue
            for record in records:
                await self.take(record)
            is_full = self._requests.queued >= self._queued_max
            if is_full != self._is_paused:
                (reader.pause if is_full else reader.resume)([self._requested])
                self._is_paused = is_full

    async def _pass_retired(self, reader: Reader, log: Log, error: OutOfRangeError) -> None:
        """Go on behind requests that were trimmed unread: groups that retired asked for them."""
        await pass_trimmed(log, reader, [self._requested, self._cancelled])
        self._telemetry.event("requests_trimmed", lane=self._identity.lane, error=str(error))

    async def take(self, record: Record) -> None:
        """Pass one record on; one that does not decode becomes a dead letter of this service."""
        try:
            decoded = decoded_record(record)
        except msgspec.ValidationError as error:
            await self._dead_letters.write(record, f"does not decode: {error}")
            return
        match decoded:
            case RequestedCompletion():
                self._requests.take(decoded, record.headers)
            case CancelledCompletion():
                self._requests.cancel(decoded)
            case PublishedWeights():
                if self._weights.observe(decoded):
                    self._on_published()
            case OfferedBroadcast():
                if self._weights.observe_offer(decoded):
                    self._on_published()
            case RequestedLane():
                self._duty.take(decoded)
            case ReportedEngine():
                self._check_epoch(decoded)

    def _check_epoch(self, report: ReportedEngine) -> None:
        if report.epoch > self._identity.epoch:
            raise FencedError(
                f"lane {report.lane} belongs to a newer process: epoch {report.epoch}, "
                f"this one has {self._identity.epoch}"
            )
