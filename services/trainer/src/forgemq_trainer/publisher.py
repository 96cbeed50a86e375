"""Publishes weights: a record, and the fast path, at most one version at a time.

`offer` publishes a version to the lanes on the fast path as soon as its file is written, `publish`
to all once it is durable. Both return when their record is on the log. The transfer continues in
threads; the next version waits for it, at most until its deadline, and for no lane that left or
lapsed. If an engine dies during a transfer, its heartbeats stop, its lane lapses, and its transfer
is given up; the other lanes' transfers and the training step continue. The engine's half of this,
which versions a lane falls back to, is services/inference's.

A process group of all lanes is formed between two versions (`group_forming.py`). A version that is
published while it is being formed waits for that; without one it goes by the durable copy. By relay
a version begins to travel before its record is written.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from forgemq_bus.log import Headers
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import PUBLISHED_WEIGHTS
from forgemq_contracts.weights import (
    LoadedWeights,
    PublishedHead,
    PublishedWeights,
    RelayedLane,
    Rendezvous,
    ReportedEngine,
    SampledParameter,
)
from forgemq_shell.records import emit_of
from forgemq_shell.service import Context
from forgemq_trainer.baseline import wait_for_baseline
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.group_forming import GroupForming
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.relay_path import RelayPath
from forgemq_trainer.samples import sampled_parameters
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.shared_path import SharedPath
from forgemq_trainer.storage.weights import SavedVersion, WeightsFolder
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_trainer.weight_paths import Broadcasts
from forgemq_weight_relay import Hop


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePaths:
    """How new weights reach engines besides the durable copy; at most one of both is not None.

    Attributes:
        broadcasts: Into the engines.
        relay: Files to the lanes' processes.
    """

    broadcasts: Broadcasts | None = None
    relay: RelayPath | None = None


class Publisher:
    """Lives as long as the trainer; one coroutine publishes, another reports lanes."""

    def __init__(
        self,
        context: Context,
        settings: TrainerSettings,
        *,
        life: TrainerLife,
        paths: EnginePaths,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Transfer nothing yet.

        Args:
            context: Run and telemetry.
            settings: Deadlines.
            life: This trainer's lineage and writer.
            paths: To the lanes.
            tasks: Runs the transfers.
        """
        self._context = context
        self._life = life
        self._broadcasts = paths.broadcasts
        self._relay = paths.relay
        self._tasks = tasks
        self._lanes = LiveLanes()
        self._group_prefix = f"{context.configuration.run}-{life.lineage}"
        self._deadline = TransferDeadline.of_settings(settings)
        self._telemetry = context.telemetry
        self._transfer: asyncio.Task[None] | None = None
        self._forming: GroupForming | None = None
        if isinstance(paths.broadcasts, SharedPath):
            self._forming = GroupForming(
                paths.broadcasts,
                self._lanes,
                life=life,
                prefix=self._group_prefix,
                tasks=tasks,
                telemetry=context.telemetry,
            )
        self._version = 0
        self._broadcast_version = -1
        self._begun: PublishedWeights | None = None
        self._durable: PublishedWeights | None = None
        self._durable_head: PublishedHead | None = None

    async def offer(self, written: SavedVersion, *, headers: Headers) -> None:
        """Publish a version that is not durable yet to the lanes that get it on the fast path.

        Writes nothing if there is no such lane, or if no durable version says which tensors the
        version has. Waits until the version before is on all its ways.
        """
        if self._broadcasts is None and self._relay is None:
            return
        begun = await self._begin(written)
        early = self._early(begun)
        if early is not None:
            await self._write(early, headers=headers)
            self._start_broadcast(begun, written)

    async def publish(self, saved: SavedVersion, *, headers: Headers) -> None:
        """Publish a durable version, and start its fast path unless `offer` did.

        Version 1 waits until the base model is evaluated. If the run is to stop before that, it is
        not published: the next life of the trainer does it.
        """
        if saved.version == 1:
            await wait_for_baseline(self._context)
            if self._context.stop.is_set():
                return
        begun = self._begun
        if begun is None or begun.version != saved.version:
            begun = await self._begin(saved)
        weights = saved.weights
        self._durable = replace(
            begun,
            uri=weights.uri,
            kind=_kind_of(weights),
            base_sha256=weights.base_sha256 or None,
            deltas=weights.deltas,
            head=_head_of(saved),
        )
        self._durable_head = self._durable.head or self._durable_head
        await self._write(self._durable, headers=headers)
        self._start_broadcast(begun, saved)

    async def _begin(self, written: SavedVersion) -> PublishedWeights:
        """Begin to relay a version, or open its broadcast; returns what is published of it."""
        # Two transfers at once would interleave their broadcasts in one process group.
        await self._finish_transfer()
        version = written.version
        relayed_to = self._begin_relay(written)
        if self._forming is not None:
            await self._forming.finish()
        before, self._version = self._version, version
        # Offered before the record is written, as the record tells engines where to join.
        offers = await self._offers(version, before=before)
        sampled: tuple[SampledParameter, ...] = ()
        if offers or relayed_to:
            key = f"{self._group_prefix}.{version}"
            sampled = await asyncio.to_thread(sampled_parameters, written.files[0], key=key)
        self._begun = PublishedWeights(
            lineage=self._life.lineage,
            version=version,
            sha256=written.weights.sha256,
            uri=written.weights.uri,
            size_bytes=written.weights.size_bytes,
            fast_paths=offers,
            relayed_to=relayed_to,
            deadline_s=self._deadline.of(written.size_bytes),
            head=_head_of(written),
            sampled=sampled,
        )
        return self._begun

    def _begin_relay(self, written: SavedVersion) -> tuple[RelayedLane, ...]:
        """Begin to send the files of a version to all lanes; returns the lanes."""
        if self._relay is None or written.version == 0:
            return ()  # Engines start with the base model.
        lanes = self._lanes.live(at_s=asyncio.get_running_loop().time())
        addresses = self._lanes.addresses()
        route = [lane for lane in sorted(lanes) if addresses.get(lane)]
        if route:
            hops = tuple(Hop(lane, addresses[lane]) for lane in route)
            self._transfer = self._tasks.create_task(self._send_along(written, hops))
        return tuple(RelayedLane(lane=lane, epoch=lanes[lane]) for lane in route)

    def _early(self, begun: PublishedWeights) -> PublishedWeights | None:
        """The record of a version whose copy is still to come; None if no lane could use it."""
        head, layout = begun.head, self._durable
        if layout is None or layout.version == 0 or not (begun.fast_paths or begun.relayed_to):
            # The base model's file may have other dtypes than those that training writes.
            return None
        if head is not None:
            if self._durable_head is None:
                return None
            head = replace(head, uri=self._durable_head.uri)
        return replace(begun, uri=layout.uri, head=head, is_durable=False)

    async def _write(self, published: PublishedWeights, *, headers: Headers) -> None:
        output = Output(topic=PUBLISHED_WEIGHTS.name, partition=0, record=published)
        await self._life.writer.write(emit_of(output, headers=headers))
        self._telemetry.event(
            "published",
            lineage=published.lineage,
            version=published.version,
            lanes=len(published.fast_paths) + len(published.relayed_to),
            is_durable=published.is_durable,
        )

    def _start_broadcast(self, begun: PublishedWeights, saved: SavedVersion) -> None:
        """Start the broadcast of a version, once; engines join it when they read its record."""
        if begun.fast_paths and self._broadcast_version != begun.version:
            self._broadcast_version = begun.version
            self._transfer = self._tasks.create_task(self._send(begun.fast_paths, saved))

    async def close(self) -> None:
        """Give up on lanes that have not joined, and wait for the transfer to end."""
        if self._broadcasts is not None:
            await asyncio.to_thread(self._broadcasts.close)
        if self._relay is not None:
            self._relay.close()
        await self._finish_transfer()

    def observe_engine(self, report: ReportedEngine, *, at_s: float) -> None:
        """Note a lane's report; stop waiting for a lane that leaves."""
        self._lanes.observe(report, at_s=at_s)
        if not report.is_serving:
            self._give_up(report.lane, report.epoch)

    def observe_loaded(self, loaded: LoadedWeights) -> None:
        """Stop waiting for a lane that has loaded the newest weights from their durable copy."""
        # A lane that loaded them by the fast path is still in the transfer, which ends by itself.
        has_newest = (loaded.lineage, loaded.version) >= (self._life.lineage, self._version)
        if has_newest and loaded.path != "fast":
            self._give_up(loaded.lane, loaded.epoch)

    def _give_up(self, lane: int, epoch: int) -> None:
        """Stop waiting for a lane, by its own words and not by those of a process before it."""
        if self._broadcasts is not None and not self._lanes.is_replaced(lane, epoch):
            self._broadcasts.give_up(lane)

    def give_up_lapsed(self, *, at_s: float) -> None:
        """Stop waiting for lanes that stopped reporting or restarted under another epoch."""
        if self._broadcasts is not None:
            self._broadcasts.keep_only(self._lanes.live(at_s=at_s))

    def form_group(self, *, at_s: float) -> None:
        """Begin to form the group of all lanes, if it lacks one and nothing is being sent."""
        is_sending = self._transfer is not None and not self._transfer.done()
        if self._forming is not None and not is_sending:
            self._forming.look((self._life.lineage, self._version), at_s=at_s)

    async def _finish_transfer(self) -> None:
        """Wait for the transfer under way; its deadline bounds the wait."""
        if self._transfer is not None:
            await self._transfer
            self._transfer = None

    async def _offers(self, version: int, *, before: int) -> tuple[Rendezvous, ...]:
        if self._broadcasts is None or version == 0:
            return ()  # Engines start with the base model.
        at_s = asyncio.get_running_loop().time()
        lanes = live = self._lanes.live(at_s=at_s)
        if self._forming is not None:
            # One that is still behind, or has left the group, would let all the others wait for it.
            present = self._forming.in_group((self._life.lineage, before), at_s=at_s)
            lanes = {each.lane: each.epoch for each in present}
        offers = await asyncio.to_thread(
            self._broadcasts.offer, lanes, prefix=self._group_prefix, ranks=self._lanes.ranks()
        )
        if live and not offers:
            self._telemetry.event("no_group", version=version, lanes=len(live))
        return offers

    async def _send(self, offers: tuple[Rendezvous, ...], saved: SavedVersion) -> None:
        assert self._broadcasts is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        failures = await asyncio.to_thread(self._broadcasts.send, offers, *saved.files)
        self._report_left_out({lane: why for lane, why in failures.items() if why}, saved)
        took_s = loop.time() - started_s
        copied_bytes = self._broadcasts.copied_bytes_peak
        self._telemetry.observe("trainer.transfer_s", took_s)
        self._telemetry.gauge("trainer.copied_bytes", copied_bytes)
        self._telemetry.event(
            "transferred",
            version=saved.version,
            lanes=len(offers) - sum(map(bool, failures.values())),
            size_bytes=saved.size_bytes,
            copied_bytes_peak=copied_bytes,
            took_s=round(took_s, 3),
        )

    async def _send_along(self, written: SavedVersion, route: tuple[Hop, ...]) -> None:
        assert self._relay is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        relayed = await asyncio.to_thread(
            self._relay.send,
            written,
            run=self._context.configuration.run,
            lineage=self._life.lineage,
            route=route,
        )
        self._report_left_out(relayed.left_out, written)
        took_s = loop.time() - started_s
        self._telemetry.observe("trainer.transfer_s", took_s)
        self._telemetry.event(
            "relayed",
            version=written.version,
            lanes=len(route),
            size_bytes=written.size_bytes,
            sent_bytes=relayed.sent_bytes,
            took_s=round(took_s, 3),
        )

    def _report_left_out(self, reasons: Mapping[int, str], saved: SavedVersion) -> None:
        for lane, reason in reasons.items():
            self._telemetry.event("lane_left_out", lane=lane, version=saved.version, reason=reason)
            self._telemetry.count("trainer.fast_path_failures")


def _kind_of(weights: WeightsFolder) -> Literal["full", "delta", "adapter"]:
    if weights.is_adapter:
        return "adapter"
    return "delta" if weights.deltas else "full"


def _head_of(saved: SavedVersion) -> PublishedHead | None:
    head = saved.head
    if head is None:
        return None
    return PublishedHead(sha256=head.sha256, uri=head.uri, size_bytes=head.size_bytes)
