"""Publishes durable weights: first the fact, then the fast path, at most one at a time.

`publish` returns once the record is on the log. The transfer goes on in threads; the next
`publish` waits for it, at most for its deadline, and for no lane that left or lapsed.
"""

import asyncio

from forgemq_bus.log import Emit, Headers, Writer
from forgemq_contracts import topics
from forgemq_contracts.topics import PUBLISHED_WEIGHTS
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, Rendezvous, ReportedEngine
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.storage.weights import WEIGHTS_FILE, WeightsFolder


class Publisher:
    """Lives as long as the trainer; one coroutine publishes, another reports lanes."""

    def __init__(
        self,
        *,
        writer: Writer,
        lanes: LiveLanes,
        fast_paths: FastPaths | None,
        group_prefix: str,
        deadline_s: float,
        tasks: asyncio.TaskGroup,
        telemetry: Telemetry,
    ) -> None:
        self._tasks = tasks
        self._writer = writer
        self._lanes = lanes
        self._fast_paths = fast_paths
        self._group_prefix = group_prefix
        self._deadline_s = deadline_s
        self._telemetry = telemetry
        self._transfer: asyncio.Task[None] | None = None
        self._newest = (0, 0)

    async def publish(
        self, weights: WeightsFolder, *, lineage: int, version: int, headers: Headers
    ) -> None:
        """Write PublishedWeights and start the fast path to every live lane."""
        await self.finish()
        self._newest = (lineage, version)
        offers = await self._offers(version)
        published = PublishedWeights(
            lineage=lineage,
            version=version,
            sha256=weights.sha256,
            uri=weights.uri,
            size_bytes=weights.size_bytes,
            fast_paths=offers,
            deadline_s=self._deadline_s,
        )
        await self._writer.write(
            Emit(
                topic=PUBLISHED_WEIGHTS.name,
                partition=0,
                key=str(version).encode(),
                value=topics.encode(published),
                headers=headers,
            )
        )
        self._telemetry.event("published", lineage=lineage, version=version, lanes=len(offers))
        if offers:
            self._transfer = self._tasks.create_task(self._send(offers, weights, version))

    async def finish(self) -> None:
        """Wait for the transfer under way; its deadline bounds the wait."""
        if self._transfer is not None:
            await self._transfer
            self._transfer = None

    async def close(self) -> None:
        """Give up on lanes that have not joined, and end."""
        if self._fast_paths is not None:
            await asyncio.to_thread(self._fast_paths.close)
        await self.finish()

    def observe_engine(self, report: ReportedEngine, *, at_s: float) -> None:
        """Note a lane's report; who left is not waited for."""
        self._lanes.observe(report, at_s=at_s)
        if not report.is_serving and self._fast_paths is not None:
            self._fast_paths.give_up(report.lane)

    def observe_loaded(self, loaded: LoadedWeights) -> None:
        """Note that a lane serves a version; a lane that has the newest is not waited for."""
        has_newest = (loaded.lineage, loaded.version) >= self._newest
        if has_newest and loaded.path != "fast" and self._fast_paths is not None:
            self._fast_paths.give_up(loaded.lane)

    def give_up_lapsed(self, *, at_s: float) -> None:
        """Stop waiting for lanes that report no more, or under another epoch."""
        if self._fast_paths is not None:
            self._fast_paths.keep_only(self._lanes.live(at_s=at_s))

    async def _offers(self, version: int) -> tuple[Rendezvous, ...]:
        if self._fast_paths is None or version == 0:
            return ()  # Engines start with the base model.
        lanes = self._lanes.live(at_s=asyncio.get_running_loop().time())
        return await asyncio.to_thread(
            self._fast_paths.offer, lanes, prefix=self._group_prefix, ranks=self._lanes.ranks()
        )

    async def _send(
        self, offers: tuple[Rendezvous, ...], weights: WeightsFolder, version: int
    ) -> None:
        assert self._fast_paths is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        file = weights.folder / WEIGHTS_FILE
        failures = await asyncio.to_thread(self._fast_paths.send, offers, file)
        for lane, failure in failures.items():
            if failure:
                self._telemetry.event("lane_left_out", lane=lane, version=version, reason=failure)
                self._telemetry.count("trainer.fast_path_failures")
        self._telemetry.observe("trainer.transfer_s", loop.time() - started_s)
