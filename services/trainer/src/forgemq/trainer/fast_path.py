"""New weights into running engines: one torch process group for each lane, two ranks in it.

The trainer is rank 0 and only broadcasts; the lane's inference process tells its engine to join
and to receive. Groups are made without torch's global registry: a lane that dies costs its group
and nothing else. Every phase has a deadline; whoever misses it loads the durable copy.

The engine derives its end of the group in sglang's `init_custom_process_group`; the nested store
prefixes here are those it uses.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    Store,
    TCPStore,
)

from forgemq.contracts.weight_buckets import TensorSpec, buckets, header_bytes, tensor_specs
from forgemq.contracts.weights import Rendezvous

JOIN_POLL_S = 0.02
RANKS = 2


class TransferError(Exception):
    """A lane missed a deadline or left; it has the durable copy."""


@dataclass(slots=True)
class _Link:
    """One lane's process group; `group` is None until the engine has joined."""

    epoch: int
    name: str
    store: TCPStore
    group: Backend | None = None
    is_given_up: threading.Event = field(default_factory=threading.Event)


class FastPaths:
    """The process groups of all lanes. `offer`, then `send` what was offered, one at a time.

    Example: lane 0 appears under epoch 3: `offer` lists it with is_new, `send` forms the group.
    Next version: `offer` lists the same group. The lane misses a deadline: its group is dropped,
    and the next offer has a new one.
    """

    def __init__(self, *, host: str, backend: Literal["gloo", "nccl"], deadline_s: float) -> None:
        self._host = host
        self._backend = backend
        self._deadline_s = deadline_s
        self._links: dict[int, _Link] = {}
        self._made = 0

    def offer(self, lanes: Mapping[int, int], *, prefix: str) -> tuple[Rendezvous, ...]:
        """A rendezvous for every live lane; groups of other lanes are dropped.

        Args:
            lanes: lane -> epoch.
            prefix: of new groups' names; distinct for each life of the trainer.
        """
        for lane, link in list(self._links.items()):
            if lanes.get(lane) != link.epoch:
                self.drop(lane)
        return tuple(self._offer(lane, lanes[lane], prefix=prefix) for lane in sorted(lanes))

    def send(self, offers: tuple[Rendezvous, ...], file: Path) -> dict[int, str]:
        """Broadcast the tensors of a safetensors file to every offered lane; blocks.

        Returns:
            lane -> what went wrong, "" where all of it was sent. A failed lane's group is dropped.
        """
        if not offers:
            return {}
        with ThreadPoolExecutor(max_workers=len(offers), thread_name_prefix="fast-path") as pool:
            sent = {offer.lane: pool.submit(self._send, offer, file) for offer in offers}
        failures = {}
        for lane, result in sent.items():
            error = result.exception()
            if error is not None and not isinstance(error, TransferError):
                raise error
            failures[lane] = "" if error is None else str(error)
            if error is not None:
                self.drop(lane)
        return failures

    def give_up(self, lane: int) -> None:
        """Stop waiting for a lane that will not join: it has the weights, or it is gone."""
        if lane in self._links:
            self._links[lane].is_given_up.set()

    def drop(self, lane: int) -> None:
        """Forget a lane's group; idempotent."""
        link = self._links.pop(lane, None)
        if link is not None:
            link.is_given_up.set()

    def close(self) -> None:
        """Drop all groups."""
        for lane in list(self._links):
            self.drop(lane)

    def _offer(self, lane: int, epoch: int, *, prefix: str) -> Rendezvous:
        link = self._links.get(lane)
        if link is None:
            self._made += 1
            # wait_for_workers would block here until the engine comes.
            store = TCPStore(
                self._host,
                0,
                world_size=RANKS,
                is_master=True,
                timeout=timedelta(seconds=self._deadline_s),
                wait_for_workers=False,
            )
            link = _Link(epoch, f"{prefix}-{lane}-{epoch}-{self._made}", store)
            self._links[lane] = link
        return Rendezvous(
            lane=lane,
            epoch=epoch,
            host=self._host,
            port=link.store.port,
            group_name=link.name,
            backend=self._backend,
            is_new=link.group is None,
        )

    def _send(self, offer: Rendezvous, file: Path) -> None:
        link = self._links[offer.lane]
        try:
            if link.group is None:
                self._wait_for_engine(link)
                link.group = self._formed(link)
            self._broadcast(link.group, file)
        except RuntimeError as error:
            raise TransferError(f"{type(error).__name__}: {error}") from error

    def _wait_for_engine(self, link: _Link) -> None:
        """Until the engine has left its address in the store."""
        end_s = time.monotonic() + self._deadline_s
        while link.store.num_keys() == 0:
            if link.is_given_up.wait(JOIN_POLL_S):
                raise TransferError("the lane has the weights already, or is gone")
            if time.monotonic() > end_s:
                raise TransferError(f"the engine did not join within {self._deadline_s} s")

    def _formed(self, link: _Link) -> Backend:
        deadline = timedelta(seconds=self._deadline_s)
        device = "cpu" if self._backend == "gloo" else "cuda"
        store: Store = link.store
        for prefix in (link.name, f"{link.name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        if self._backend == "gloo":
            # The stub does not know these names; torch.distributed uses them itself.
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = deadline
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            return ProcessGroupGloo(store, 0, RANKS, options)
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = deadline
        return ProcessGroupNCCL(store, 0, RANKS, nccl_options)

    def _broadcast(self, group: Backend, file: Path) -> None:
        deadline = timedelta(seconds=self._deadline_s)
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = deadline
        device = "cpu" if self._backend == "gloo" else "cuda"
        with safe_open(file, framework="pt", device=device) as tensors:
            for bucket in buckets(specs_of(file)):
                flat = torch.cat(
                    [tensors.get_tensor(spec.name).reshape(-1).view(torch.uint8) for spec in bucket]
                )
                work = group.broadcast([flat], options)  # type: ignore[attr-defined]  # not in the stub
                if not work.wait(deadline):
                    raise TransferError(f"a bucket took longer than {self._deadline_s} s")


def specs_of(file: Path) -> tuple[TensorSpec, ...]:
    """The tensors of a safetensors file, sorted by name."""
    with file.open("rb") as opened:
        start = opened.read(8)
        return tensor_specs(start + opened.read(header_bytes(start) - len(start)))
