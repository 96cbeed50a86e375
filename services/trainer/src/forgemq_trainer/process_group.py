"""Rank 0 of torch process groups that engines join, and the broadcasts through them.

Groups are made outside torch's global registry, so that a broken one affects no other. The engine
makes its end with sglang's `init_custom_process_group`; the nested store prefixes here are the ones
it uses.

Gloo goes through host memory and reaches engines on CPUs and GPUs alike. NCCL goes from GPU to
GPU; it refuses two ranks on one GPU. If an engine dies before NCCL has connected, its thread
does not end: NCCL has no deadline for connecting.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

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

from forgemq_trainer.mapped_weights import MappedWeights
from forgemq_trainer.transfer_deadline import TransferDeadline

BackendName: TypeAlias = Literal["gloo", "nccl"]

JOIN_POLL_S = 0.02
"""Between two looks at the store while an engine joins: short beside a transfer of a second or
more. A store's blocking wait could not be given up."""

NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads when it makes a group. If it is 1, a broken group raises an
error in the waiting thread; otherwise a thread of torch ends the whole process at the deadline."""

GIVEN_UP = "the lane has the weights already, or is gone"


class TransferError(Exception):
    """An engine missed the deadline or left; it loads the durable copy instead."""


@dataclass(slots=True)
class Progress:
    """One transfer in numbers: when it must end, and how far it is."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where groups are made.

    Attributes:
        host: Address at which engines reach this process.
        backend: How groups communicate.
        device: That is sent from; with Gloo the host's memory.
        deadline: Of transfers.
    """

    host: str
    backend: BackendName
    device: torch.device
    deadline: TransferDeadline


class WeightGroup:
    """One process group with this process as rank 0; engines may join from its making on.

    Lifecycle: `form` once, then `broadcast` any number of times, each from one thread at a time.
    `give_up` wakes a thread that waits. Engines that wait in a group which is not formed are freed
    when this object is dropped.
    """

    def __init__(self, name: str, *, world_size: int, place: GroupPlace) -> None:
        """Listen at a free port."""
        self.name = name
        self.world_size = world_size
        self._place = place
        # With wait_for_workers this would block until all engines have joined.
        self._store = TCPStore(
            place.host,
            0,
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=place.deadline.floor_s),
            wait_for_workers=False,
        )
        self._group: Backend | None = None
        self.is_given_up = False
        self.changed = threading.Condition()

    @property
    def port(self) -> int:
        """At which engines join."""
        return self._store.port

    @property
    def is_formed(self) -> bool:
        """Whether `form` has returned."""
        return self._group is not None

    def give_up(self) -> None:
        """Wake up the thread that waits for a transfer."""
        with self.changed:
            self.is_given_up = True
            self.changed.notify_all()

    def check_wanted(self) -> None:
        """Raise TransferError if the group was given up."""
        if self.is_given_up:
            raise TransferError(GIVEN_UP)

    def has_visitor(self) -> bool:
        """Whether an engine has come to the store."""
        return bool(self._store.num_keys())

    def joined_ranks(self) -> frozenset[int]:
        """Ranks that have written their address, which only Gloo's do."""
        ends = (str(key).rsplit("/", 1)[-1] for key in self._store.list_keys())
        return frozenset(int(end) for end in ends if end.isdecimal())

    def wait_for_visitor(self, progress: Progress) -> None:
        """Wait until an engine has come to the store.

        Forming the group would wait too, but could not be given up.

        Raises:
            TransferError: none came in time, or the group was given up.
        """
        while not self.has_visitor():
            self.check_wanted()
            if progress.is_late():
                raise TransferError(f"the engine did not join within {progress.deadline_s:.1f} s")
            time.sleep(JOIN_POLL_S)

    def form(self, *, left: timedelta) -> None:
        """Connect to the engines' processes; with Gloo blocks until all have joined.

        Raises:
            RuntimeError: they have not within `left`.
        """
        store: Store = self._store
        for prefix in (self.name, f"{self.name}/", f"{self._place.device.type}/"):
            store = PrefixStore(prefix, store)
        if self._place.backend == "gloo":
            # The stub does not know these names; torch.distributed uses them itself.
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = left
            options._devices = [ProcessGroupGloo.create_device(hostname=self._place.host)]
            self._group = ProcessGroupGloo(store, 0, self.world_size, options)
            return
        os.environ[NCCL_BLOCKING_WAIT] = "1"  # noqa: TID251 - torch has no argument for it
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = left
        self._group = ProcessGroupNCCL(store, 0, self.world_size, nccl_options)

    def broadcast(self, files: Sequence[MappedWeights], progress: Progress) -> None:
        """Send files bucket by bucket, in the order the engines expect them.

        Raises:
            TransferError: a deadline passed, or the group was given up.
            RuntimeError: torch says that the group is broken.
        """
        for weights in files:
            for index, size_bytes in enumerate(weights.bucket_bytes):
                self._broadcast_bucket(weights, index, progress)
                progress.sent_bytes += size_bytes

    def _broadcast_bucket(self, weights: MappedWeights, index: int, progress: Progress) -> None:
        def check() -> None:
            self.check_wanted()
            progress.left()

        # A member that dies shows in no other way: Gloo waits for it until the operation's own
        # deadline, so that of one bucket is shorter than that of all.
        bucket_s = self._place.deadline.of(weights.bucket_bytes[index])
        # One broadcast for many tensors: a small tensor's would cost a round trip each.
        with weights.lent(index, check=check) as flat:
            check()
            assert self._group is not None
            options = BroadcastOptions()
            options.rootRank = 0
            options.timeout = left = min(progress.left(), timedelta(seconds=bucket_s))
            work = self._group.broadcast([flat], options)  # type: ignore[attr-defined]  # not in the stub
            if not work.wait(left):
                raise TransferError(str(progress))


class Transfer:
    """One transfer in its own thread; nobody waits for it once its group is given up."""

    def __init__(self, group: WeightGroup, send: Callable[[], None], progress: Progress) -> None:
        """Start it."""
        self._group = group
        self._send = send
        self._progress = progress
        self._reason = ""
        self._error: BaseException | None = None
        self._is_done = False
        # A daemon thread: torch may block it until the deadline, and the process need not wait.
        self.thread = threading.Thread(
            target=self._run, name=f"fast-path-{group.name}", daemon=True
        )
        self.thread.start()

    def failure(self) -> str:
        """Wait until the transfer is over or given up; returns the reason it failed, or ""."""
        with self._group.changed:
            self._group.changed.wait_for(lambda: self._is_done or self._group.is_given_up)
            if not self._is_done:
                return GIVEN_UP
        if self._error is not None:
            raise self._error
        return self._reason

    def _run(self) -> None:
        # Of an error that is expected only the words are kept: its traceback would keep the group
        # alive, and with it the connections at which the other members wait.
        try:
            self._send()
        except TransferError as error:
            self._reason = str(error)
        except RuntimeError as error:
            self._reason = f"{type(error).__name__}: {error}; {self._progress}"
        except BaseException as error:  # noqa: BLE001 - `failure` raises it again
            self._error = error
        with self._group.changed:
            self._is_done = True
            self._group.changed.notify_all()


def join_all(threads: Sequence[threading.Thread], *, timeout_s: float) -> None:
    """Wait for threads to end, for at most this time altogether."""
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
