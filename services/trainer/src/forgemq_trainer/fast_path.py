"""Broadcasts new weights into running engines: one torch process group for each lane.

In a lane's group the trainer is rank 0 and only broadcasts; every process of the lane's engine is
one further rank, and the lane's inference process tells these processes to join and to receive.
Groups are made outside torch's global registry, so a lane that dies affects only its own group.

One deadline covers a whole transfer and follows the weights' size. A lane may be given up earlier,
because it left or has the weights; then nobody waits for it. Its transfer cannot be interrupted
inside torch's calls, so each transfer runs in its own thread, which ends by itself at the deadline.
A lane that was given up loads the durable copy.

All lanes send from one mapping of the file, so their number adds no memory (`mapped_weights.py`).

Gloo goes through host memory and reaches engines on CPUs and GPUs alike. NCCL goes from GPU to
GPU; it refuses two ranks on one GPU. If an engine dies before NCCL has connected, its thread
does not end: NCCL has no deadline for connecting.

The engine makes its end of the group with sglang's `init_custom_process_group`; the nested store
prefixes here are the ones it uses.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    Store,
    TCPStore,
)

from forgemq_contracts.weights import Rendezvous
from forgemq_settings.environment import SettingsError
from forgemq_trainer.mapped_weights import MappedWeights
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.transfer_deadline import TransferDeadline

JOIN_POLL_S = 0.02
"""Between two looks at the store while an engine joins: short beside a transfer of a second or
more. A store's blocking wait could not be given up."""

CLOSE_WAIT_S = 5.0
"""How long `close` waits for threads: at least one bucket's broadcast, below the service's grace
for stopping of 15 s."""

NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads when it makes a group. If it is 1, a broken group raises an
error in the waiting thread; otherwise a thread of torch ends the whole process at the deadline."""

GIVEN_UP = "the lane has the weights already, or is gone"


class TransferError(Exception):
    """A lane missed the deadline or left; it loads the durable copy instead."""


@dataclass(slots=True)
class _Link:
    """One lane's process group; `group` is None until the engine has joined."""

    epoch: int
    name: str
    world_size: int
    store: TCPStore
    group: Backend | None = None
    is_given_up: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def give_up(self) -> None:
        """Wake up the thread that waits for this lane's transfer."""
        with self.changed:
            self.is_given_up = True
            self.changed.notify_all()


@dataclass(slots=True)
class _Progress:
    """One lane's transfer in numbers: when it must end, and how far it is."""

    size_bytes: int
    deadline_s: float
    started_s: float
    sent_bytes: int = 0

    def left(self) -> timedelta:
        """The time left until the deadline.

        Raises:
            TransferError: the deadline has passed.
        """
        left_s = self._left_s()
        if left_s <= 0:
            raise TransferError(str(self))
        return timedelta(seconds=left_s)

    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._left_s() <= 0

    def _left_s(self) -> float:
        return self.started_s + self.deadline_s - time.monotonic()

    def __str__(self) -> str:
        """How far the transfer is, for people."""
        return (
            f"sent {self.sent_bytes} of {self.size_bytes} bytes in "
            f"{time.monotonic() - self.started_s:.1f} s of {self.deadline_s:.1f} s"
        )


class _Transfer:
    """One lane's transfer, in its own thread; nobody waits for it once its lane is given up."""

    def __init__(self, link: _Link, send: Callable[[], None]) -> None:
        self._link = link
        self._send = send
        self._error: BaseException | None = None
        self._is_done = False
        # A daemon thread: torch may block it until the deadline, and the process need not wait.
        self.thread = threading.Thread(target=self._run, name=f"fast-path-{link.name}", daemon=True)
        self.thread.start()

    def failure(self) -> str:
        """Wait until the transfer is over or given up; returns the reason it failed, or ""."""
        with self._link.changed:
            self._link.changed.wait_for(lambda: self._is_done or self._link.is_given_up)
            if not self._is_done:
                return GIVEN_UP
        if self._error is not None and not isinstance(self._error, TransferError):
            raise self._error
        return "" if self._error is None else str(self._error)

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - `failure` raises it again
            self._error = error
        with self._link.changed:
            self._is_done = True
            self._link.changed.notify_all()


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
        backend: Literal["gloo", "nccl"],
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
        self._host = host
        self._backend = backend
        self._deadline = deadline
        self._device = torch.device(device if backend == "nccl" else "cpu")
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
            is_same = (lanes.get(lane), world_sizes.get(lane)) == (link.epoch, link.world_size)
            if link.is_given_up or not is_same:
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
        weights = [MappedWeights(file, device=self._device) for file in files]
        size_bytes, started_s = sum(file.stat().st_size for file in files), time.monotonic()
        deadline_s = self._deadline.of(size_bytes)
        transfers: dict[int, _Transfer] = {}
        failures: dict[int, str] = {}
        for offer in offers:
            link = self._links.get(offer.lane)
            # Dropped since it was offered, or replaced by a group of a newer epoch.
            if link is None or link.name != offer.group_name:
                failures[offer.lane] = GIVEN_UP
                continue
            progress = _Progress(size_bytes, deadline_s, started_s)
            send = functools.partial(self._send, link, weights, progress)
            transfers[offer.lane] = _Transfer(link, send)
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
            link.give_up()

    def keep_only(self, lanes: Mapping[int, int]) -> None:
        """Give up every lane that is not among these, or has another epoch (lane -> epoch)."""
        for lane, link in list(self._links.items()):
            if lanes.get(lane) != link.epoch:
                link.give_up()

    def drop(self, lane: int) -> None:
        """Forget a lane's group; idempotent."""
        link = self._links.pop(lane, None)
        if link is not None:
            link.give_up()

    def close(self) -> None:
        """Drop all groups and wait, a few seconds at most, for transfers to end.

        A thread that returns from torch while the interpreter exits would abort the process.
        Transfers to living engines end after the current bucket, hence within the wait; one to a
        dead engine blocks in torch until after the exit.
        """
        for lane in list(self._links):
            self.drop(lane)
        end_s = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _offer(self, lane: int, epoch: int, *, prefix: str, world_size: int) -> Rendezvous:
        link = self._links.get(lane)
        if link is None:
            # Counted, so that a lane's second group under one epoch has a name of its own: the
            # engine may still hold the first.
            self._made += 1
            # With wait_for_workers this would block until the engine joins.
            store = TCPStore(
                self._host,
                0,
                world_size=world_size,
                is_master=True,
                timeout=timedelta(seconds=self._deadline.floor_s),
                wait_for_workers=False,
            )
            link = _Link(epoch, f"{prefix}-{lane}-{epoch}-{self._made}", world_size, store)
            self._links[lane] = link
        return Rendezvous(
            lane=lane,
            epoch=epoch,
            host=self._host,
            port=link.store.port,
            group_name=link.name,
            backend=self._backend,
            is_new=link.group is None,
            world_size=world_size,
        )

    def _send(self, link: _Link, weights: Sequence[MappedWeights], progress: _Progress) -> None:
        try:
            if link.group is None:
                self._wait_for_engine(link, progress)
                link.group = self._form_group(link, left=progress.left())
            for each in weights:
                self._broadcast(link, link.group, each, progress)
        except RuntimeError as error:
            raise TransferError(f"{type(error).__name__}: {error}; {progress}") from error

    def _wait_for_engine(self, link: _Link, progress: _Progress) -> None:
        """Wait until the engine has written its address to the store.

        Forming the group would wait too, but could not be given up.
        """
        while link.store.num_keys() == 0:
            _check_wanted(link)
            if progress.is_late():
                raise TransferError(f"the engine did not join within {progress.deadline_s:.1f} s")
            time.sleep(JOIN_POLL_S)

    def _form_group(self, link: _Link, *, left: timedelta) -> Backend:
        """Connect to the engine's processes; blocks until all have joined."""
        store: Store = link.store
        for prefix in (link.name, f"{link.name}/", f"{self._device.type}/"):
            store = PrefixStore(prefix, store)
        if self._backend == "gloo":
            # The stub does not know these names; torch.distributed uses them itself.
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = left
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            return ProcessGroupGloo(store, 0, link.world_size, options)
        os.environ[NCCL_BLOCKING_WAIT] = "1"  # noqa: TID251 - torch has no argument for it
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = left
        return ProcessGroupNCCL(store, 0, link.world_size, nccl_options)

    def _broadcast(
        self, link: _Link, group: Backend, weights: MappedWeights, progress: _Progress
    ) -> None:
        """Send the weights bucket by bucket, in the order the engine expects them."""

        def check() -> None:
            _check_wanted(link)
            progress.left()

        options = BroadcastOptions()
        options.rootRank = 0
        for index, size_bytes in enumerate(weights.bucket_bytes):
            # One broadcast for many tensors: a small tensor's would cost a round trip each.
            with weights.lent(index, check=check) as flat:
                check()
                options.timeout = left = progress.left()
                work = group.broadcast([flat], options)  # type: ignore[attr-defined]  # not in the stub
                if not work.wait(left):
                    raise TransferError(str(progress))
            progress.sent_bytes += size_bytes


def _check_wanted(link: _Link) -> None:
    if link.is_given_up:
        raise TransferError(GIVEN_UP)


def fast_paths_of(settings: TrainerSettings, *, device: str) -> FastPaths | None:
    """The fast paths into engines that the settings name; None if they name none.

    Raises:
        SettingsError: NCCL would have no GPU to send from.
    """
    if settings.fast_path == "off" or settings.fast_path == "relay":
        return None
    if settings.fast_path == "nccl" and device == "cpu":
        raise SettingsError(
            "FORGEMQ_TRAINER_FAST_PATH=nccl sends from a GPU to GPUs: set "
            "FORGEMQ_TRAINER_DEVICE=cuda, or gloo, which reaches every engine"
        )
    return FastPaths(
        host=settings.host,
        backend=settings.fast_path,
        deadline=TransferDeadline.of_settings(settings),
        device=device,
    )
