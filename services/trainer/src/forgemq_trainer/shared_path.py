"""Broadcasts new weights into running engines: one torch process group for all lanes.

The trainer is rank 0, and every process of every lane's engine is one further rank; a lane's ranks
follow one another. Each bucket is read once and broadcast once, whatever the number of lanes. What
the trainer sends for that is the backend's affair: Gloo's broadcast is a binomial tree, whose root
sends a copy for each of its log2(world size) levels, rounded up; NCCL's root sends one.

A group has fixed members, so it is formed again when lanes come or go, or after one failed. That
happens between two versions (`group_forming.py`). A member that dies during a transfer breaks it
for all: rank 0 notices at the bucket's deadline and drops the group, which frees the others.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from forgemq_contracts.weights import OfferedBroadcast, Rendezvous
from forgemq_trainer.core.shared_members import GroupMember
from forgemq_trainer.fast_path import CLOSE_WAIT_S, group_place
from forgemq_trainer.mapped_weights import MappedWeights
from forgemq_trainer.process_group import (
    GIVEN_UP,
    JOIN_POLL_S,
    BackendName,
    Progress,
    Transfer,
    WeightGroup,
    join_all,
)
from forgemq_trainer.transfer_deadline import TransferDeadline

FORM_DEADLINE_S = 15.0
"""Engines stand still while they wait for the others to join. An engine joins between two decoding
steps; 15 s cover a long prefill and a busy machine."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A group and who is in it."""

    group: WeightGroup
    members: tuple[GroupMember, ...]

    def ranks_of(self, member: GroupMember) -> range:
        """The ranks of a lane's engine."""
        first = 1 + sum(each.ranks for each in self.members if each.lane < member.lane)
        return range(first, first + member.ranks)


class SharedPath:
    """The process group of all lanes.

    `offer_group` and `form` make a group; then `offer` and `send` for each version, as of
    `FastPaths`. Only one of `form` and `send` runs at a time, in a thread of its own; both may
    change which group there is between two lines of all others.

    Example: lanes 0 and 1 have an engine of one and one of two processes: world size 4, ranks 1,
    and 2 to 3. Lane 1 dies in the middle of a version: `send` says so for both, and the group is
    gone. Lane 0 alone is offered a group before the next version.
    """

    def __init__(
        self,
        *,
        host: str,
        backend: BackendName,
        deadline: TransferDeadline,
        device: str = "cuda",
        form_deadline_s: float = FORM_DEADLINE_S,
    ) -> None:
        """Make no group yet; the arguments are those of `FastPaths`, and the time for forming."""
        self._form_deadline_s = form_deadline_s
        self._place = group_place(host=host, backend=backend, deadline=deadline, device=device)
        self._formed: _Shared | None = None
        self._forming: _Shared | None = None
        self._left: set[GroupMember] = set()
        self._given_up: set[int] = set()
        self._is_sending = False
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._made = 0
        self.copied_bytes_peak = 0
        """At most so many bytes of copies did the newest `send` hold at once."""

    @property
    def group_name(self) -> str:
        """Of the group that is formed; "" if none is."""
        shared = self._formed
        return "" if shared is None else shared.group.name

    @property
    def members(self) -> tuple[GroupMember, ...]:
        """Of the group that is formed."""
        shared = self._formed
        return () if shared is None else shared.members

    def offer_group(
        self, members: Collection[GroupMember], *, prefix: str, lineage: int
    ) -> OfferedBroadcast:
        """Open a group for these lanes; the one that is formed stays until `form` returns."""
        self._made += 1
        self._left.clear()
        ordered = tuple(sorted(members))
        world_size = 1 + sum(member.ranks for member in ordered)
        group = WeightGroup(f"{prefix}-all-{self._made}", world_size=world_size, place=self._place)
        self._forming = _Shared(group, ordered)
        return OfferedBroadcast(
            lineage=lineage,
            group_name=group.name,
            members=tuple(self._rendezvous(self._forming, each) for each in ordered),
            deadline_s=self._form_deadline_s,
        )

    def form(self, *, has_joined: Callable[[int, str], bool]) -> tuple[GroupMember, ...]:
        """Form the group that was offered. Blocks.

        Args:
            has_joined: Whether a lane's process says that its engine is in a group of this name.

        Returns:
            Whom it lacks; () if it is formed. An incomplete group is dropped, which frees the
            engines that wait in it.
        """
        assert self._forming is not None
        shared = self._forming
        try:
            absent = self._form(shared, has_joined=has_joined)
        finally:
            self._forming = None
        if not absent:
            self._formed = shared
        return absent

    def _form(
        self, shared: _Shared, *, has_joined: Callable[[int, str], bool]
    ) -> tuple[GroupMember, ...]:
        end_s = time.monotonic() + self._form_deadline_s
        if self._place.backend == "gloo":
            absent = self._wait_for(lambda each: _has_written(shared, each), shared, end_s=end_s)
            if absent:
                return absent
        try:
            shared.group.form(left=timedelta(seconds=max(1.0, end_s - time.monotonic())))
        except RuntimeError:
            return shared.members  # Each had come, and some did not connect: nobody knows who.
        return self._wait_for(
            lambda each: has_joined(each.lane, shared.group.name), shared, end_s=end_s
        )

    def offer(
        self, lanes: Mapping[int, int], *, prefix: str, ranks: Mapping[int, int] | None = None
    ) -> tuple[Rendezvous, ...]:
        """The places of all members, if each is among these lanes (lane -> epoch); else ()."""
        del prefix, ranks
        shared = self._formed
        if shared is None or any(lanes.get(each.lane) != each.epoch for each in shared.members):
            return ()
        return tuple(self._rendezvous(shared, member) for member in shared.members)

    def send(self, offers: tuple[Rendezvous, ...], *files: Path) -> dict[int, str]:
        """Broadcast the tensors of safetensors files, one after another, to all members. Blocks.

        Returns:
            Lane -> the reason it failed, "" if all was sent: the same for all lanes. A group that
            failed is dropped.
        """
        shared = self._formed
        if shared is None or shared.group.name != offers[0].group_name:
            return {offer.lane: GIVEN_UP for offer in offers}
        weights = [MappedWeights(file, device=self._place.device) for file in files]
        size_bytes = sum(file.stat().st_size for file in files)
        progress = Progress(size_bytes, self._place.deadline.of(size_bytes), time.monotonic())
        self._given_up.clear()
        self._is_sending = True
        transfer = Transfer(
            shared.group, functools.partial(shared.group.broadcast, weights, progress), progress
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(transfer.thread)
        failure = transfer.failure()
        self._is_sending = False
        self.copied_bytes_peak = sum(each.copied_bytes_peak for each in weights)
        if failure:
            self.drop()
        return {offer.lane: failure for offer in offers}

    def give_up(self, lane: int) -> None:
        """Note that a lane has the weights, or is gone; without any lane a transfer is over."""
        shared = self._formed
        if not self._is_sending or shared is None:
            return
        self._given_up.add(lane)
        if self._given_up >= {each.lane for each in shared.members}:
            shared.group.give_up()

    def keep_only(self, lanes: Mapping[int, int]) -> None:
        """Give up every lane that is not among these, or has another epoch (lane -> epoch).

        A group that is being formed with such a lane is not formed.
        """
        for member in self.members:
            if lanes.get(member.lane) != member.epoch:
                self.give_up(member.lane)
        forming = self._forming
        if forming is not None:
            members = forming.members
            self._left |= {each for each in members if lanes.get(each.lane) != each.epoch}

    def drop(self) -> None:
        """Forget the group; idempotent."""
        shared, self._formed = self._formed, None
        if shared is not None:
            shared.group.give_up()

    def close(self) -> None:
        """Drop the group and wait, a few seconds at most, for a transfer to end."""
        self._is_closed = True
        self.drop()
        join_all(self._threads, timeout_s=CLOSE_WAIT_S)

    def _wait_for(
        self, is_there: Callable[[GroupMember], bool], shared: _Shared, *, end_s: float
    ) -> tuple[GroupMember, ...]:
        """Whom the group lacks when all are there, one has left, or time is up."""
        while True:
            absent = tuple(each for each in shared.members if not is_there(each))
            left = tuple(each for each in absent if each in self._left)
            if not absent or left or self._is_closed or time.monotonic() > end_s:
                return left or absent
            time.sleep(JOIN_POLL_S)

    def _rendezvous(self, shared: _Shared, member: GroupMember) -> Rendezvous:
        return Rendezvous(
            lane=member.lane,
            epoch=member.epoch,
            host=self._place.host,
            port=shared.group.port,
            group_name=shared.group.name,
            backend=self._place.backend,
            is_new=not shared.group.is_formed,
            world_size=shared.group.world_size,
            rank_first=shared.ranks_of(member).start,
        )


def _has_written(shared: _Shared, member: GroupMember) -> bool:
    return shared.group.joined_ranks().issuperset(shared.ranks_of(member))
