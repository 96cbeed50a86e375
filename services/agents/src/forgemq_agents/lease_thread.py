"""Renews the leases of all episodes of a process from a thread of its own.

The agents of a process share one event loop. Code of a user that blocks it (`time.sleep`, a long
computation) makes the turns of all wait; the leases go on, so no episode is lost by it. Only C code
that holds the interpreter's lock for as long as a lease stops this thread too.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import aiohttp

from forgemq_agents.admin_key import AdminKeyFile
from forgemq_agents.errors import EpisodeOverError, GatewayError
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_contracts.admin import Claim

HEARTBEATS_PER_LEASE = 3
"""Two heartbeats may be lost before the lease lapses."""

Told = Callable[[str], None]


class LeaseThread:
    """The thread, its event loop and its connection to the gateway.

    Lifecycle: `async with LeaseThread(...) as leases`, then `leases.renew(claim, ...)` for each
    episode; the block's end stops all renewals. Callbacks run on the loop that entered the block.
    """

    def __init__(self, *, url: str, admin_key: str | AdminKeyFile, retry: Retry) -> None:
        self._url = url
        self._admin_key = admin_key
        self._retry = retry
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    async def __aenter__(self) -> Self:
        """Start the thread."""
        self._owner = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def renew(self, claim: Claim, *, on_over: Told, on_unheard: Told) -> "Future[None]":
        """Send heartbeats until the future is cancelled, or the gateway says that it is over.

        Args:
            claim: Names the episode and the length of its lease.
            on_over: Called once with the gateway's words if the episode is over.
            on_unheard: Called with the reason for each heartbeat that the gateway did not take.
        """
        renewing = self._renew(claim, on_over=on_over, on_unheard=on_unheard)
        return asyncio.run_coroutine_threadsafe(renewing, self._loop)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with aiohttp.ClientSession() as http:
            requests = JsonRequests(http, retry=self._retry)
            self._gateway = GatewayClient(requests, url=self._url, admin_key=self._admin_key)
            self._ready.set()
            await self._stop.wait()
            renewals = asyncio.all_tasks() - {asyncio.current_task()}
            for renewal in renewals:
                renewal.cancel()
            await asyncio.gather(*renewals, return_exceptions=True)

    async def _renew(self, claim: Claim, *, on_over: Told, on_unheard: Told) -> None:
        while True:
            await asyncio.sleep(claim.lease_s / HEARTBEATS_PER_LEASE)
            try:
                await self._gateway.renew_lease(claim.episode_id)
            except EpisodeOverError as error:
                self._owner.call_soon_threadsafe(on_over, str(error))
                return
            except GatewayError as error:
                self._owner.call_soon_threadsafe(on_unheard, str(error))
