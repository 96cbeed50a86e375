"""The trainer's ranks: processes that train one step together, and how they talk.

Rank 0 does all that touches the log and the disk; the others follow its commands. Process
groups: a control group (gloo, on CPUs) for commands and small records, whose waits may be as long
as the run has nothing to train, and the groups of a step: one for small records, and those of the
computation (gloo, or NCCL on GPUs). In a step a rank that dies, or does not come within the
deadline, ends the others too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forgemq_settings.environment import SettingsError

IDLE_MAX = timedelta(days=30)
"""How long followers wait for a command. A dead rank 0 closes its connections and ends the wait."""


class RankLostError(Exception):
    """Another rank died, or did not come within the deadline; this one cannot go on alone."""


class WorldSizeError(SettingsError):
    """The configuration asks for another number of ranks than were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How torchrun started this process; alone where it did not.

    Attributes:
        rank: from 0 over all machines.
        local_rank: from 0 on this machine; picks the GPU.
        world_size: number of ranks.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def launch_of(environ: Mapping[str, str]) -> Launch:
    """What the environment says: torchrun's RANK, LOCAL_RANK and WORLD_SIZE."""
    return Launch(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
    )


def check_world_size(launch: Launch, *, configured: int) -> None:
    """Refuse to train with other ranks than the run's configuration counts on.

    Raises:
        WorldSizeError: naming both numbers.
    """
    if launch.world_size != configured:
        raise WorldSizeError(
            f"trainer.world_size is {configured} in the run's configuration, but "
            f"WORLD_SIZE={launch.world_size} ranks were started; start it with "
            f"python -m torch.distributed.run --nproc-per-node {configured} -m forgemq_trainer"
        )


def device_of(device: str, *, launch: Launch) -> str:
    """The device of this rank: `cuda` becomes the GPU of its local rank.

    Raises:
        SettingsError: several ranks were given one and the same GPU.
    """
    if launch.world_size == 1 or device == "cpu":
        return device
    if device != "cuda":
        raise SettingsError(
            f"FORGEMQ_TRAINER_DEVICE={device} gives {launch.world_size} ranks one GPU; "
            "set cuda, and each rank takes the GPU of its local rank"
        )
    return f"cuda:{launch.local_rank}"


def check_device(device: str, *, gpus: int) -> None:
    """Refuse a GPU that is not there.

    Args:
        device: of this rank.
        gpus: that this process sees.

    Raises:
        SettingsError: naming it.
    """
    wanted = torch.device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= gpus:
        raise SettingsError(
            f"this rank's device is {device}, but torch sees {gpus} GPUs: a driver for CUDA "
            f"{torch.version.cuda} and a GPU for each rank of this machine are needed, "
            "or FORGEMQ_TRAINER_DEVICE=cpu"
        )


class Ranks:
    """This process among the ranks. Implements `core.exchange.Peers`.

    Every rank calls the same methods in the same order, `announce` and `received` apart: rank 0
    announces, the others receive.
    """

    def __init__(self, *, launch: Launch, device: str, deadline_s: float) -> None:
        """Join the others; blocks until all are there.

        Args:
            launch: this process among them.
            device: that this rank computes on.
            deadline_s: how long a rank waits for another within a step.
        """
        self._launch = launch
        self._deadline_s = deadline_s
        self.device = torch.device(device)
        with self.together():
            self._join(device, deadline=timedelta(seconds=deadline_s))

    def _join(self, device: str, *, deadline: timedelta) -> None:
        launch = self._launch
        is_gpu = device != "cpu"
        if is_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=deadline,
        )
        self._control = _group(backend="gloo", timeout=IDLE_MAX)
        self._records = _group(backend="gloo", timeout=deadline)
        self.mesh = DeviceMesh("cuda" if is_gpu else "cpu", list(range(launch.world_size)))
        # Keys and values have a group of their own: FSDP issues its gathers from other streams.
        self._exchange = _group(timeout=deadline)

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._launch.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._launch.world_size

    @contextmanager
    def together(self) -> Iterator[None]:
        """What needs the other ranks goes in here.

        Raises:
            RankLostError: one of them is not there any more.
        """
        try:
            yield
        except RuntimeError as error:
            # Gloo's errors have no class of their own, but name its source files.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            said = str(error).partition("] ")[2] or str(error)
            raise RankLostError(
                f"rank {self.rank} lost another of {self.world_size} ranks, which died or did not "
                f"come within {self._deadline_s:g} s: {said.partition('. ')[0]}"
            ) from error

    def announce(self, command: bytes) -> None:
        """Rank 0: give every other rank a command. Other ranks: nothing, they are at it.

        Raises:
            RankLostError: one of them is gone.
        """
        if self.rank > 0:
            return
        with self.together():
            dist.broadcast(torch.tensor([len(command)]), src=0, group=self._control)
            data = torch.frombuffer(bytearray(command), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._control)

    def received(self) -> bytes:
        """The next command of rank 0; blocks, for days if need be.

        Raises:
            RankLostError: rank 0 is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with self.together():
            dist.broadcast(size, src=0, group=self._control)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._control)
        return data.numpy().tobytes()

    def collected(self, own: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on rank 0; empty on the others."""
        everyones: list[object] = [None] * self.world_size
        dist.gather_object(own, everyones if self.rank == 0 else None, 0, group=self._records)
        return [item for item in everyones if isinstance(item, bytes)] if self.rank == 0 else []

    def gathered(self, own: Tensor) -> list[Tensor]:
        """`own` of every rank, by rank; all have one shape."""
        own = own.contiguous()
        everyones = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyones, own, group=self._exchange)
        return everyones

    def scattered_sum(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over the ranks of their `parts[this rank]`; all have one shape."""
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, [part.contiguous() for part in parts], group=self._exchange)
        return summed

    def total(self, own: Tensor) -> Tensor:
        """The sum of `own` over the ranks."""
        summed = own.detach().clone()
        dist.all_reduce(summed, group=self._exchange)
        return summed

    def close(self) -> None:
        """Leave; the other ranks must be done too."""
        dist.destroy_process_group()


def _group(*, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group
