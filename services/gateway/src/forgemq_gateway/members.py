"""Keeps this gateway one of the run's: it says that it is there, and takes over what it should own.

Of several gateways each owns a part of the group partitions. One that comes takes its share from
the others; when one goes, the others take over what it had. A gateway that is killed is missed
after `LAPSE_S`, or as soon as nobody listens at its address.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from forgemq_bus.errors import FINAL_ERRORS, FencedError, LogError, LogUnavailableError
from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_contracts.ownership import ReportedGateway
from forgemq_gateway import ownership
from forgemq_gateway.applying import OWNERS_CHANGED
from forgemq_gateway.bad_records import RUN_PARTITION, BadRecords
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.gateways import LAPSE_S
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed import Feed
from forgemq_gateway.ownership import Owners
from forgemq_gateway.restore import Restore
from forgemq_settings.environment import SettingsError


class ReplacedError(SettingsError):
    """Another gateway has started at this one's address.

    A refusal, and so exit status 2: a supervisor that started this one again would only take the
    address back from the other.
    """


REPORT_EVERY_S = 1.0
"""A third of `LAPSE_S`."""

_READ_BACK_S = 10.0
"""A transaction is read within a second of its commit, unless the log is away."""

_APART_S = 0.5
"""Two changes of one gateway: gateways that see different ones as gone change owners no faster."""

_RETRY_S = 0.2
"""After another gateway changed the owners at the same moment: this to twice this, drawn."""

_REPORTS = Place(topics.REPORTED_GATEWAYS.name, 0)

IsGone = Callable[[str], Awaitable[bool]]
"""Whether nobody listens at a URL."""


class Members:
    """This gateway's part in the run.

    Args:
        is_gone: Asked once about every gateway that was heard shortly before this one started.
        ready: Set when this gateway serves what it should own.
    """

    def __init__(
        self,
        log: Log,
        *,
        feed: Feed,
        restore: Restore,
        bad_records: BadRecords,
        dispatcher: Dispatcher,
        is_gone: IsGone,
        context: GatewayContext,
        ready: asyncio.Event,
    ) -> None:
        self._feed = feed
        self._restore = restore
        self._bad_records = bad_records
        self._dispatcher = dispatcher
        self._is_gone = is_gone
        self._ready = ready
        self._run = context.configuration.run
        self._gateways = context.gateways
        self._registry = context.registry
        self._read_back = context.read_back
        self._outbox = context.outbox
        self._fenced = context.fenced
        self._clock = context.clock
        self._changed = context.changed
        self._telemetry = context.telemetry
        self._started_ms = context.clock.wall_ms()
        self._took_over_s = -math.inf
        self._followed: frozenset[int] = frozenset()
        self._has_fenced: frozenset[str] = frozenset()
        self._owners = Owners(log, run=self._run, gateways=self._gateways, clock=context.clock)
        self.serves_run = asyncio.Event()
        """Set while this gateway serves partition 0."""

    @property
    def owners(self) -> Owners:
        """Changes the owners' record."""
        return self._owners

    async def join(self) -> None:
        """Say that this gateway is there, and find out who else is; the feed follows already."""
        await self.report()
        await self._read_back.until_now([_REPORTS, ownership.PLACE])
        for peer in self._gateways.peers():
            if await self._is_gone(peer.url):
                self._gateways.note_gone(peer.gateway)

    async def keep_reporting(self) -> None:
        """Say every second that this gateway is there, until cancelled."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                await self.report()
            except FINAL_ERRORS:
                raise
            except LogError as error:
                self._event("report_failed", error)

    async def keep_owning(self) -> None:
        """Take over what this gateway should own, and serve what it owns, until cancelled.

        Raises:
            ReplacedError: a newer gateway has this one's address.
        """
        while True:
            self._check_address()
            try:
                is_settled = await self._settle()
            except FencedError as error:
                self._event("take_over_fenced", error)
                await asyncio.sleep(_RETRY_S * (1 + self._gateways.draw()))
                continue
            except FINAL_ERRORS:
                raise
            except LogError as error:
                self._event("take_over_failed", error)
                await asyncio.sleep(REPORT_EVERY_S)
                continue
            if is_settled:
                await self._next_change()

    async def leave(self) -> None:
        """Give all partitions to the others, if there are any; returns when they have them."""
        self._gateways.is_leaving = True
        if not self._gateways.peers():
            return
        await self.report()
        await self._changed.until(
            lambda: None if self._gateways.own() else True,
            group_id=OWNERS_CHANGED,
            timeout_s=LAPSE_S,
        )

    async def report(self) -> None:
        """Write that this gateway is there.

        Raises:
            LogError: the log did not take it.
        """
        await self._outbox.write(
            ReportedGateway(
                run=self._run,
                gateway=self._gateways.gateway,
                url=self._gateways.url,
                started_ms=self._started_ms,
                reported_ms=self._clock.wall_ms(),
                owner=self._gateways.owner,
                is_leaving=self._gateways.is_leaving,
            )
        )

    def _check_address(self) -> None:
        if self._gateways.successor() is not None:
            raise ReplacedError(
                f"another gateway has started at {self._gateways.url}: each gateway of a run "
                "needs a FORGEMQ_GATEWAY_PEER_URL of its own, by which the others reach it"
            )

    async def _settle(self) -> bool:
        """Make one step towards serving what this gateway should own; returns whether it does."""
        self._drop_lost()
        self._gateways.forget_lapsed()
        wanted = self._gateways.wanted()
        if wanted:
            await self._take_over(wanted)
        unserved = self._gateways.own() - self._gateways.serving
        if unserved:
            await self._serve(unserved)
        elif not wanted:
            if not self._bad_records.is_burying:
                self._ready.set()
            await self._clear_fenced()
        return not wanted and not unserved

    async def _take_over(self, wanted: frozenset[int]) -> None:
        """Own these partitions too; soon after another change, only wait until one may follow."""
        now_s = asyncio.get_running_loop().time()
        pause_s = self._took_over_s + _APART_S - now_s
        if pause_s > 0:
            await asyncio.sleep(pause_s)
            return
        self._took_over_s = now_s
        self._has_fenced = frozenset()  # Who is taken from now is to be fenced again.
        # Others take a gateway that was silent for gone, and would take everything back.
        await self.report()
        record = await self._owners.take_over(wanted)
        self._telemetry.event("took_over", partitions=sorted(wanted), owner=record.owner)
        await self._has_read(record.owner)

    async def _has_read(self, owner: int) -> None:
        """Wait until the feed has read this change: a transaction is visible some time after it.

        What becomes durable here from then on, other gateways promise to nobody: they see it too.
        """
        read = await self._changed.until(
            lambda: True if self._gateways.owner >= owner else None,
            group_id=OWNERS_CHANGED,
            timeout_s=_READ_BACK_S,
        )
        if read is None:
            raise LogUnavailableError(f"change {owner} of owners is not read back")

    def _drop_lost(self) -> None:
        lost = self._followed - self._gateways.own()
        if lost:  # The feed opens a new reader for other partitions.
            self._feed.drop(lost)
            self._followed -= lost
        if RUN_PARTITION not in self._gateways.serving:
            self.serves_run.clear()

    async def _serve(self, numbers: frozenset[int]) -> None:
        """Restore these partitions, and serve them unless they were lost meanwhile.

        First their earlier owners are fenced: what is read then is all that they promised.
        """
        started_s = self._clock.now_s()
        unfenced, gained = self._gateways.unfenced(), self._gateways.gained(numbers)
        try:
            for gateway in sorted(unfenced):
                await self._fenced.fence(gateway)
            positions = await self._restore.partitions(numbers)
            if RUN_PARTITION in numbers:
                await self._bad_records.take_over()
        except BaseException:  # Also on a cancellation: half of it is of no use.
            self._undo(numbers)
            raise
        if self._gateways.gained(numbers) != gained:  # Lost meanwhile, also if gained again.
            self._undo(numbers)
            return
        self._registry.renew_leases(self._clock.now_s())
        self._dispatcher.attempts.restore(self._registry.take_restored_turns())
        self._feed.add(positions)
        self._followed |= numbers
        if RUN_PARTITION in numbers:
            self.serves_run.set()
        self._gateways.serving |= numbers
        self._has_fenced = unfenced
        self._changed.notify(OWNERS_CHANGED)
        restore_s = self._clock.now_s() - started_s
        self._telemetry.observe("gateway.restore_s", restore_s)
        self._telemetry.event("restored", seconds=round(restore_s, 3), **self._counts())

    async def _clear_fenced(self) -> None:
        """Note whom this gateway has fenced, so that no later owner does it again."""
        if self._has_fenced:
            await self._owners.clear(self._has_fenced)
            self._has_fenced = frozenset()

    def _undo(self, numbers: frozenset[int]) -> None:
        """Forget what was restored of these partitions: it is read again, here or elsewhere."""
        self._dispatcher.move(numbers)
        self._registry.take_restored_turns()

    def _counts(self) -> dict[str, int]:
        return {
            "partitions": len(self._followed),
            "groups": len(self._registry.groups),
            "completions": sum(
                len(episode.history.completions) for _, episode in self._registry.episodes()
            ),
            "owner": self._gateways.owner,
        }

    async def _next_change(self) -> None:
        """Wait until owners change or a gateway is heard: each is heard every second."""
        before = self._gateways.owner
        await self._changed.until(
            lambda: True if self._has_news(before) else None,
            group_id=OWNERS_CHANGED,
            timeout_s=REPORT_EVERY_S,
        )

    def _has_news(self, owner: int) -> bool:
        mine = self._gateways
        return mine.owner != owner or bool(mine.wanted()) or mine.successor() is not None

    def _event(self, name: str, error: Exception) -> None:
        self._telemetry.event(name, error=f"{type(error).__name__}: {error}")
