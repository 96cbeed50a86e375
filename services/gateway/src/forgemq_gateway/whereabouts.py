"""Where a group is: here, or at the gateway that owns it; a request waits while it moves."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forgemq_contracts.ownership import PartitionOwner
from forgemq_gateway.applying import OWNERS_CHANGED
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.errors import busy
from forgemq_gateway.core.gateways import LAPSE_S
from forgemq_gateway.holding import Hold
from forgemq_gateway.wire import Scope


@dataclass
class _Watch:
    """What ends when a gateway is there no more, and how many requests wait for it."""

    gone: "asyncio.Future[None]"
    requests: int = 0


class Whereabouts:
    """Asked for every request that is about one group."""

    def __init__(self, *, context: GatewayContext) -> None:
        self._gateways = context.gateways
        self._changed = context.changed
        self._hold = Hold(context.settings.lane_hold_s, clock=context.clock)
        self._watches: dict[str, _Watch] = {}

    async def owner(self, scope: Scope, group_id: str, *, least: int = 0) -> PartitionOwner | None:
        """The other gateway that owns the group; None if this one does.

        Args:
            scope: Of the request that waits.
            group_id: Of a group, also of one that nobody has requested.
            least: Change of owners that the gateway which sent the request here had read.

        Raises:
            RefusedError: 429, the group moved for longer than a request is held.
        """
        if self._gateways.serves(group_id):
            return None

        def look() -> tuple[PartitionOwner | None] | None:
            if self._gateways.serves(group_id):
                return (None,)
            if self._gateways.owner < least:
                return None
            owner = self._gateways.owner_of(self._gateways.partition_of(group_id))
            is_there = owner is not None and self._gateways.has_peer(owner.gateway)
            return (owner,) if is_there else None

        with self._hold.waiting(scope) as left_s:
            found = await self._changed.until(look, group_id=OWNERS_CHANGED, timeout_s=left_s)
        if found is None:
            raise busy(f"group {group_id} moves to another gateway: ask again")
        return found[0]

    @contextmanager
    def leaving(self, owner: PartitionOwner) -> Iterator["asyncio.Future[None]"]:
        """Within it, what ends when this gateway is there no more.

        Many requests are sent to the same gateway at once, and wait for the same.
        """
        watch = self._watches.get(owner.gateway)
        if watch is None or watch.gone.done():
            watch = _Watch(asyncio.ensure_future(self._until_gone(owner)))
            self._watches[owner.gateway] = watch
        watch.requests += 1
        try:
            yield watch.gone
        finally:
            watch.requests -= 1
            if not watch.requests:
                watch.gone.cancel()
                if self._watches.get(owner.gateway) is watch:
                    del self._watches[owner.gateway]

    async def _until_gone(self, owner: PartitionOwner) -> None:
        while self._gateways.has_peer(owner.gateway):
            await self._changed.until(
                lambda: None if self._gateways.has_peer(owner.gateway) else True,
                group_id=OWNERS_CHANGED,
                timeout_s=LAPSE_S,
            )

    def note_gone(self, owner: PartitionOwner) -> None:
        """Note that nobody listens at this gateway's address: others take its groups over."""
        self._gateways.note_gone(owner.gateway)
        self._changed.notify(OWNERS_CHANGED)
