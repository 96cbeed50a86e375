"""Decodes records; one that does not decode becomes a dead letter, written by one gateway alone."""

import asyncio
from collections import deque

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_bus.log import Record
from forgemq_contracts import topics
from forgemq_gateway.context import GatewayContext

_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between two attempts to write a dead letter, the last one from then on. Each attempt tries for
the seconds that the log allows a write, so more would only fill the service's lines."""

_OTHERS_MAX = 256
"""Bad records whose letters another gateway is to write. It writes each before it reads on, so that
when it dies only the newest can be without."""

RUN_PARTITION = 0
"""Its owner does what is done once for a run: dead letters of topics without group partitions, and
the commits of what a start needs."""


class BadRecords:
    """Decodes the records of the feed.

    Args:
        ready: Cleared while a bad record waits for its dead letter.
    """

    def __init__(self, *, context: GatewayContext, ready: asyncio.Event) -> None:
        self._gateways = context.gateways
        self._outbox = context.outbox
        self._telemetry = context.telemetry
        self._ready = ready
        self.is_burying = False
        """Whether a dead letter waits for the log, so that the gateway cannot be ready."""
        # Of the run, read while another gateway owned partition 0: it may have died before its
        # letter was written.
        self._others: deque[tuple[Record, str]] = deque(maxlen=_OTHERS_MAX)

    async def decoded(self, record: Record) -> msgspec.Struct | None:
        """Decode a record; None for a bad one, which becomes a dead letter.

        The scheduler then retires the group, and that ends its open turns like any retirement.
        """
        try:
            return decoded_record(record)
        except msgspec.ValidationError as error:
            reason = f"does not decode: {error}"
            if self._is_others(record):
                self._others.append((record, reason))
            else:
                await self._bury(record, reason=reason)
            return None

    async def take_over(self) -> None:
        """Write the letters that a previous owner of partition 0 has not written."""
        self._outbox.forget_letters()
        while self._others:
            record, reason = self._others.popleft()
            await self._bury(record, reason=reason)

    def _is_others(self, record: Record) -> bool:
        """Whether the owner of partition 0 writes the letter, and that is not this gateway."""
        topic = topics.BY_NAME[record.topic]
        is_of_run = topic.dead_letters_by == "gateway" and topic.partitioned_by != "group"
        return is_of_run and RUN_PARTITION not in self._gateways.own()

    async def _bury(self, record: Record, *, reason: str) -> None:
        """Write a bad record's dead letter, unless another service does.

        Tries until the log takes it, and the gateway is not ready meanwhile: no later record is
        applied before, because a restart might begin behind the bad one. A new start would only
        meet the same record.
        """
        pauses_s = iter(_PAUSES_S)
        was_ready = self._ready.is_set()
        while not await self._try_to_bury(record, reason=reason):
            self.is_burying = True
            self._ready.clear()
            await asyncio.sleep(next(pauses_s, _PAUSES_S[-1]))
        self.is_burying = False
        if was_ready:
            self._ready.set()
        self._telemetry.count("gateway.bad_records")

    async def _try_to_bury(self, record: Record, *, reason: str) -> bool:
        """Write the letter, if this service writes it; False if the log did not take it."""
        try:
            await self._outbox.write_dead_letter(record, reason=reason)
        except FINAL_ERRORS:
            raise
        except LogError as error:
            self._telemetry.event(
                "dead_letter_failed",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=f"{type(error).__name__}: {error}",
            )
            return False
        return True
