"""Lanes and a trainer that publishes to them, for the load test of new weights.

Each lane's weight loading is the inference process's, without its requests; all run in one process.
"""

import asyncio
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forgemq_contracts.weights import PublishedWeights, RelayedLane, Rendezvous
from forgemq_inference.core.weights import BASE, Join, WeightsState, served_by
from forgemq_inference.durable import copies_in
from forgemq_inference.engine import Engine
from forgemq_inference.pause_clock import PauseClock
from forgemq_inference.read_back import ParameterReadBack
from forgemq_inference.relay import RelayedWeights
from forgemq_inference.weight_loader import Loading, WeightLoader
from forgemq_telemetry import Telemetry
from forgemq_trainer.core.shared_members import GroupMember
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.relay_path import RelayPath
from forgemq_trainer.samples import sampled_parameters
from forgemq_trainer.shared_path import SharedPath
from forgemq_trainer.storage.weights import SavedVersion, WeightsFolder, read_weights_folder
from forgemq_trainer.transfer_deadline import TransferDeadline
from forgemq_weight_relay import Hop, WeightsKey

TIMEOUT_S = 300.0
_RUN = "weight-update"
_DEADLINE = TransferDeadline(120.0, 2e8)
_FORM_DEADLINE_S = 60.0


class Lane:
    """One lane's weights, without its requests."""

    def __init__(self, number: int, engine: Engine, folder: Path) -> None:
        self.number = number
        self.engine = engine
        self.events = io.StringIO()
        telemetry = Telemetry(service="inference", stream=self.events)
        self.relayed = RelayedWeights(
            folder / f"relay-{number}",
            run=_RUN,
            host="127.0.0.1",
            lane=number,
            telemetry=telemetry,
        )
        self._state = WeightsState(
            lane=number, epoch=1, served=served_by(BASE.name, base_sha256=None)
        )
        copies = copies_in(folder / "cache", lane=number)
        self._loader = WeightLoader(
            engine,
            self._state,
            copies=copies,
            relayed=self.relayed,
            read_back=ParameterReadBack(engine, copies.policies, lane=number, telemetry=telemetry),
            pauses=PauseClock(),
            durable_timeout_s=TIMEOUT_S,
            telemetry=telemetry,
        )

    async def load(self, published: PublishedWeights) -> Loading:
        """Bring the engine to a publication.

        Raises:
            RuntimeError: it did not come on the fast path.
        """
        self._state.observe(published)
        load = self._state.next_load()
        assert load is not None
        loading = await self._loader.load(load)
        if loading is None or loading.path != "fast":
            raise RuntimeError(f"lane {self.number} missed the fast path: {self.events.getvalue()}")
        return loading

    async def join(self, rendezvous: Rendezvous, *, deadline_s: float) -> None:
        """Let the engine join a group of several lanes, and leave all others."""
        await self._loader.join(Join(rendezvous, deadline_s))

    def is_in(self, group_name: str) -> bool:
        """Whether the engine is in this group of several lanes."""
        return self._state.shared_group == group_name


@dataclass(frozen=True, kw_only=True)
class Update:
    """One version on its way to all lanes, in seconds and bytes."""

    served_s: float
    transfer_s: float
    pause_s: float
    sent_bytes: int


class Trainer:
    """Publishes two folders of weights in turns."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [read_weights_folder(folder) for folder in folders]
        self._version = 0
        self._relay = RelayPath(deadline=_DEADLINE)
        self.broadcasts = FastPaths(host="127.0.0.1", backend="gloo", deadline=_DEADLINE)
        self.shared = SharedPath(
            host="127.0.0.1", backend="gloo", deadline=_DEADLINE, form_deadline_s=_FORM_DEADLINE_S
        )

    @property
    def size_bytes(self) -> int:
        """Of one version's files."""
        folder = self._folders[0].folder
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())

    async def relay(self, lanes: Sequence[Lane]) -> Update:
        """Relay the next version to the lanes and let them load it."""
        weights = self._next()
        to = tuple(RelayedLane(lane=lane.number, epoch=1) for lane in lanes)
        published = self._published(weights, relayed_to=to)
        saved = SavedVersion(version=self._version, weights=weights)
        route = tuple(Hop(lane.number, lane.relayed.address) for lane in lanes)
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(
                asyncio.to_thread(self._relay.send, saved, run=_RUN, lineage=1, route=route)
            )
            loads = [tasks.create_task(lane.load(published)) for lane in lanes]
            arrivals = [tasks.create_task(_arrival(lane, self._version)) for lane in lanes]
        return Update(
            served_s=time.monotonic() - started_s,
            transfer_s=max(arrival.result() for arrival in arrivals) - started_s,
            pause_s=max(load.result().paused_s for load in loads),
            sent_bytes=sending.result().sent_bytes,
        )

    async def broadcast(self, lanes: Sequence[Lane]) -> Update:
        """Broadcast the next version into the lanes' engines, one group for each."""
        return await self._broadcast(self.broadcasts, lanes)

    async def form_group(self, lanes: Sequence[Lane]) -> float:
        """Form the one group of these lanes; returns the seconds that it took.

        Raises:
            RuntimeError: an engine did not join.
        """
        members = [GroupMember(lane.number, 1, 1) for lane in lanes]
        offered = self.shared.offer_group(members, prefix=_RUN, lineage=1)
        by_number = {lane.number: lane for lane in lanes}
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            forming = tasks.create_task(
                asyncio.to_thread(
                    self.shared.form, has_joined=lambda lane, name: by_number[lane].is_in(name)
                )
            )
            for place in offered.members:
                tasks.create_task(by_number[place.lane].join(place, deadline_s=offered.deadline_s))
        if forming.result():
            raise RuntimeError(f"did not join: {forming.result()}")
        # Each has left the group of its own.
        for lane in lanes:
            self.broadcasts.drop(lane.number)
        return time.monotonic() - started_s

    async def broadcast_to_all(self, lanes: Sequence[Lane]) -> Update:
        """Broadcast the next version through the one group of all lanes."""
        return await self._broadcast(self.shared, lanes)

    async def _broadcast(self, paths: FastPaths | SharedPath, lanes: Sequence[Lane]) -> Update:
        weights = self._next()
        offers = paths.offer({lane.number: 1 for lane in lanes}, prefix=_RUN)
        published = self._published(weights, fast_paths=offers)
        file = weights.folder / "model.safetensors"
        started_s, written_bytes = time.monotonic(), _written_bytes()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(asyncio.to_thread(paths.send, offers, file))
            loads = [tasks.create_task(lane.load(published)) for lane in lanes]
        if any(sending.result().values()):
            raise RuntimeError(f"broadcasts failed: {sending.result()}")
        served_s = time.monotonic() - started_s
        return Update(
            served_s=served_s,
            transfer_s=served_s,
            pause_s=max(load.result().paused_s for load in loads),
            sent_bytes=_written_bytes() - written_bytes,
        )

    def _next(self) -> WeightsFolder:
        self._version += 1
        return self._folders[self._version % 2]

    def _published(
        self,
        weights: WeightsFolder,
        *,
        fast_paths: tuple[Rendezvous, ...] = (),
        relayed_to: tuple[RelayedLane, ...] = (),
    ) -> PublishedWeights:
        return PublishedWeights(
            lineage=1,
            version=self._version,
            sha256=weights.sha256,
            uri=weights.uri,
            size_bytes=weights.size_bytes,
            fast_paths=fast_paths,
            relayed_to=relayed_to,
            deadline_s=_DEADLINE.of(weights.size_bytes),
            sampled=sampled_parameters(
                weights.folder / "model.safetensors", key=f"{_RUN}.{self._version}"
            ),
        )


def _written_bytes() -> int:
    """What this process has written so far, to sockets and files."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["wchar"])


async def _arrival(lane: Lane, version: int) -> float:
    """When the lane had all files of a version."""
    receiver = lane.relayed.receiver
    key = WeightsKey(1, version)
    if await asyncio.to_thread(receiver.wait, key, timeout_s=TIMEOUT_S) is None:
        events = lane.events.getvalue()
        raise RuntimeError(f"version {version} did not reach lane {lane.number}: {events}")
    return time.monotonic()
