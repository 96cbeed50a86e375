"""Broadcasts new weights into running engines: one torch process group for each lane.

In a lane's group the trainer is rank 0 and only broadcasts; every process of the lane's engine is
one further rank, and the lane's inference process tells these processes to join and to receive. A
lane that dies affects only its own group. One group for all lanes is in `shared_path.py`.

One deadline covers a whole transfer and follows the weights' size. A lane may be given up earlier,
because it left or has the weights; then nobody waits for it. Its transfer cannot be interrupted
inside torch's calls, so each transfer runs in its own thread, which ends by itself at the deadline.
A lane that was given up loads the durable copy.

All lanes send from one mapping of the file, so their number adds no memory (`mapped_weights.py`).
"""

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forgemq_contracts.weights import Rendezvous
from forgemq_trainer.mapped_weights import MappedWeights
from forgemq_trainer.process_group import (
    GIVEN_UP,
    BackendName,
    GroupPlace,
    Progress,
    Transfer,
    WeightGroup,
    join_all,
)
from forgemq_trainer.transfer_deadline import TransferDeadline

CLOSE_WAIT_S = 5.0
"""How long `close` waits for threads: at least one bucket's broadcast, below the service's grace
for stopping of 15 s."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One lane's process group, under this epoch."""

    epoch: int
    group: WeightGroup


class FastPaths:
    """The process groups of all lanes. Call `offer`, then `send` with the offers; never two sends.

    Example: lane 0 appears under epoch 3: `offer` lists it with is_new, `send` forms the group.
    Next version: `offer` lists the same group. The lane misses a deadline: its group is dropped,
    and the next offer has a new group.
    """

    def __init__(
        self,
        *,
        host: str,
        backend: BackendName,
        deadline: TransferDeadline,
        device: str = "cuda",
    ) -> None:
        """Make no group yet.

        Args:
            host: Address at which engines reach this process.
            backend: How groups communicate; one for all lanes.
            deadline: For one transfer, including the engine's joining.
            device: GPU that NCCL sends from; Gloo sends from host memory.
        """
        self._place = group_place(host=host, backend=backend, deadline=deadline, device=device)
        self._links: dict[int, _Link] = {}
        self._threads: list[threading.Thread] = []
        self._made = 0
        self.copied_bytes_peak = 0
        """At most so many bytes of copies did the newest `send` hold at once, for all lanes."""

    def offer(
        self, lanes: Mapping[int, int], *, prefix: str, ranks: Mapping[int, int] | None = None
    ) -> tuple[Rendezvous, ...]:
        """Prepare a rendezvous for every live lane; drops the groups of all other lanes.

        Args:
            lanes: Lane -> epoch of the live lanes.
            prefix: Of new groups' names; distinct for each life of the trainer.
            ranks: Lane -> processes of its engine; a lane that is missing has 1.
        """
        world_sizes = {lane: 1 + (ranks or {}).get(lane, 1) for lane in lanes}
        # A group has fixed members: a restarted engine (new epoch), or one with another number of
        # processes, needs a new group.
        for lane, link in list(self._links.items()):
            present = (lanes.get(lane), world_sizes.get(lane))
            if link.group.is_given_up or present != (link.epoch, link.group.world_size):
                self.drop(lane)
        return tuple(
            self._offer(lane, lanes[lane], prefix=prefix, world_size=world_sizes[lane])
            for lane in sorted(lanes)
        )

    def send(self, offers: tuple[Rendezvous, ...], *files: Path) -> dict[int, str]:
        """Broadcast the tensors of safetensors files, one after another, to every offered lane.

        Blocks. The policy's file is the first; a draft head's follows under the same deadline.

        Returns:
            Lane -> the reason it failed, "" if all was sent. A failed lane's group is dropped.
        """
        weights = [MappedWeights(file, device=self._place.device) for file in files]
        size_bytes, started_s = sum(file.stat().st_size for file in files), time.monotonic()
        deadline_s = self._place.deadline.of(size_bytes)
        transfers: dict[int, Transfer] = {}
        failures: dict[int, str] = {}
        for offer in offers:
            link = self._links.get(offer.lane)
            # Dropped since it was offered, or replaced by a group of a newer epoch.
            if link is None or link.group.name != offer.group_name:
                failures[offer.lane] = GIVEN_UP
                continue
            progress = Progress(size_bytes, deadline_s, started_s)
            send = functools.partial(_send, link.group, weights, progress)
            transfers[offer.lane] = Transfer(link.group, send, progress)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads += [transfer.thread for transfer in transfers.values()]
        for lane, transfer in transfers.items():
            failures[lane] = transfer.failure()
        self.copied_bytes_peak = sum(each.copied_bytes_peak for each in weights)
        # A broadcast that broke off leaves a group's processes at different points, of no use.
        for lane, failure in failures.items():
            if failure:
                self.drop(lane)
        return failures

    def give_up(self, lane: int) -> None:
        """Stop waiting for a lane: it has the weights, or it is gone."""
        link = self._links.get(lane)
        if link is not None:
            link.group.give_up()

    def keep_only(self, lanes: Mapping[int, int]) -> None:
        """Give up every lane that is not among these, or has another epoch (lane -> epoch)."""
        for lane, link in list(self._links.items()):
            if lanes.get(lane) != link.epoch:
                link.group.give_up()

    def drop(self, lane: int) -> None:
        """Forget a lane's group; idempotent."""
        link = self._links.pop(lane, None)
        if link is not None:
            link.group.give_up()

    def close(self) -> None:
        """Drop all groups and wait, a few seconds at most, for transfers to end.

        A thread that returns from torch while the interpreter exits would abort the process.
        Transfers to living engines end after the current bucket, hence within the wait; one to a
        dead engine blocks in torch until after the exit.
        """
        for lane in list(self._links):
            self.drop(lane)
        join_all(self._threads, timeout_s=CLOSE_WAIT_S)

    def _offer(self, lane: int, epoch: int, *, prefix: str, world_size: int) -> Rendezvous:
        link = self._links.get(lane)
        if link is None:
            # Counted, so that a lane's second group under one epoch has a name of its own: the
            # engine may still hold the first.
            self._made += 1
            name = f"{prefix}-{lane}-{epoch}-{self._made}"
            link = _Link(epoch, WeightGroup(name, world_size=world_size, place=self._place))
            self._links[lane] = link
        return Rendezvous(
            lane=lane,
            epoch=epoch,
            host=self._place.host,
            port=link.group.port,
            group_name=link.group.name,
            backend=self._place.backend,
            is_new=not link.group.is_formed,
            world_size=world_size,
        )


def _send(group: WeightGroup, weights: Sequence[MappedWeights], progress: Progress) -> None:
    if not group.is_formed:
        group.wait_for_visitor(progress)
        group.form(left=progress.left())
    group.broadcast(weights, progress)


def group_place(
    *, host: str, backend: BackendName, deadline: TransferDeadline, device: str
) -> GroupPlace:
    """Where groups are made; Gloo sends from host memory, whatever the device is."""
    sent_from = torch.device(device if backend == "nccl" else "cpu")
    return GroupPlace(host=host, backend=backend, device=sent_from, deadline=deadline)
