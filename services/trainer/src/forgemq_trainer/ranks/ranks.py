"""The trainer's ranks: processes that train one step together, and how they communicate.

Rank 0 does all that touches the log; the others carry out its commands. There are five kinds of
process groups. The control group (gloo, on CPUs) carries commands; a wait in it may last as long as
the run has nothing to train. Two are used within a step: a group for small records, and the groups
of the computation (gloo, or NCCL on GPUs). Within a step, a rank that dies or misses the deadline
ends the others too. The last two (gloo) are used by the ranks' threads that write a checkpoint
beside a step: one to begin it, in which a wait may last as long as rank 0 writes the weights, and
one while they write, with the deadline of a step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.traffic import RankGrid
from forgemq_trainer.ranks.commands import Command, decode, encode
from forgemq_trainer.ranks.rank_group import RankGroup
from forgemq_trainer.ranks.shard_mesh import ShardMesh
from forgemq_trainer.ranks.teams import TeamGroups

IDLE_MAX = timedelta(days=30)
"""How long other ranks wait for a command of rank 0: longer than any pause of a run. They need no
shorter limit, as the death of rank 0 closes its connections and so ends the wait."""


class RankLostError(Exception):
    """Another rank died or missed the deadline; this one cannot continue alone."""


class WorldSizeError(SettingsError):
    """The configuration asks for another number of ranks than were started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """How torchrun started this process; the defaults are those of a process without torchrun.

    Attributes:
        rank: From 0 over all machines.
        local_rank: From 0 on this machine; picks the GPU.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def launch_of(environ: Mapping[str, str]) -> RankLaunch:
    """The launch from torchrun's variables: RANK, WORLD_SIZE, and the same with LOCAL_."""
    return RankLaunch(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def check_world_size(launch: RankLaunch, *, configured: int) -> None:
    """Refuse a number of ranks that the run's configuration does not name.

    Raises:
        WorldSizeError: names both numbers.
    """
    if launch.world_size != configured:
        raise WorldSizeError(
            f"trainer.world_size is {configured} in the run's configuration, but "
            f"WORLD_SIZE={launch.world_size} ranks were started; start it with "
            f"python -m torch.distributed.run --nproc-per-node {configured} -m forgemq_trainer"
        )


def device_of(device: str, *, launch: RankLaunch, gpus: int) -> str:
    """The device of this rank: `cuda` becomes the GPU of its local rank.

    Args:
        device: As the settings name it; `auto` is `cuda` if each rank of this machine gets a GPU,
            else `cpu`.
        launch: Which rank this is.
        gpus: Number of GPUs that torch sees.

    Raises:
        SettingsError: several ranks would share one GPU.
    """
    if device == "auto":
        device = "cuda" if gpus >= launch.local_world_size else "cpu"
    if launch.world_size == 1 or device == "cpu":
        return device
    if device != "cuda":
        raise SettingsError(
            f"FORGEMQ_TRAINER_DEVICE={device} gives {launch.world_size} ranks one GPU; "
            "set cuda, and each rank takes the GPU of its local rank"
        )
    return f"cuda:{launch.local_rank}"


def check_device(device: str, *, gpus: int) -> None:
    """Refuse a GPU that torch does not see.

    Args:
        device: This rank's.
        gpus: Number of GPUs that torch sees.

    Raises:
        SettingsError: names the device.
    """
    wanted = torch.device(device)
    if wanted.type == "cuda" and (wanted.index or 0) >= gpus:
        raise SettingsError(
            f"this rank's device is {device}, but torch sees {gpus} GPUs: a driver for CUDA "
            f"{torch.version.cuda} and a GPU for each rank of this machine are needed, "
            "or FORGEMQ_TRAINER_DEVICE=cpu"
        )


class Ranks:
    """This process among the ranks. Implements `core.rounds.RankTeams`.

    Every rank calls the same methods in the same order, except that rank 0 announces commands and
    the others receive them.
    """

    def __init__(self, *, launch: RankLaunch, device: str, deadline_s: float) -> None:
        """Join the other ranks; blocks until all have joined.

        Args:
            launch: This process among the ranks.
            device: That this rank computes on.
            deadline_s: How long a rank waits for another within a step.
        """
        self._launch = launch
        self.deadline_s = deadline_s
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
        self._to_save = _group(backend="gloo", timeout=IDLE_MAX)
        self._saving = _group(backend="gloo", timeout=deadline)
        # Not the default group: FSDP issues its gathers there from other streams, and NCCL may
        # deadlock if the ranks' calls on one group come in different orders.
        everyone = _group(timeout=deadline)
        self._exchange = RankGroup(launch.rank, launch.world_size, everyone)
        self._teams = TeamGroups(self._exchange, timeout=deadline)
        self._meshes: dict[int, ShardMesh] = {}

    def mesh(self, shard_ranks: int) -> ShardMesh:
        """Divide the ranks into replicas of the model; collective.

        Args:
            shard_ranks: That hold the model once; divides the number of ranks.
        """
        if shard_ranks not in self._meshes:
            self._meshes[shard_ranks] = ShardMesh(
                RankGrid(shards=shard_ranks, replicas=self.world_size // shard_ranks),
                device_type=self.device.type,
                timeout=timedelta(seconds=self.deadline_s),
                exchange=self._exchange,
            )
        return self._meshes[shard_ranks]

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._launch.rank

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine, from 0."""
        return self._launch.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._launch.world_size

    @contextmanager
    def together(self) -> Iterator[None]:
        """Turn errors of communication inside this context into RankLostError.

        Raises:
            RankLostError: another rank died or missed the deadline.
        """
        try:
            yield
        except RuntimeError as error:
            # Gloo raises plain RuntimeErrors, which differ from others only by their text: it
            # names gloo's source file, as in "[.../gloo/transport/tcp/pair.cc:534] Connection
            # closed by peer".
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            reason = str(error).partition("] ")[2] or str(error)
            raise RankLostError(
                f"rank {self.rank} lost another of {self.world_size} ranks, which died or did not "
                f"come within {self.deadline_s:g} s: {reason.partition('. ')[0]}"
            ) from error

    def announce(self, command: Command) -> None:
        """On rank 0, send a command to every other rank. On the others, do nothing.

        The others do nothing because they make the announcing call themselves while they carry out
        the command.

        Raises:
            RankLostError: one of them died.
        """
        if self.rank > 0:
            return
        with self.together():
            self._tell(encode(command), group=self._control)

    def receive(self) -> Command:
        """Wait for the next command of rank 0, for days if rank 0 has none.

        Raises:
            RankLostError: rank 0 died.
        """
        with self.together():
            return decode(self._tell(b"", group=self._control))

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Send bytes to rank 0; returns every rank's, by rank, on rank 0, and [] on the others."""
        return self._gather(own, group=self._records)

    def tell_saving(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; among the threads that write a checkpoint."""
        return self._tell(data, group=self._to_save)

    def any_saving(self, *, is_saving: bool) -> bool:
        """True if one of the ranks still writes; among the threads that write a checkpoint."""
        count = torch.tensor([int(is_saving)])
        dist.all_reduce(count, group=self._saving)
        return bool(count)

    def gather_saved(self, own: bytes) -> list[bytes]:
        """As `gather_bytes` does, among the threads that write a checkpoint."""
        return self._gather(own, group=self._saving)

    def _tell(self, data: bytes, *, group: dist.ProcessGroup) -> bytes:
        """Rank 0's bytes, on every rank; those of the others are not used."""
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=group)
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else None
        values = torch.empty(int(size), dtype=torch.uint8) if values is None else values
        dist.broadcast(values, src=0, group=group)
        return values.numpy().tobytes()

    def _gather(self, own: bytes, *, group: dist.ProcessGroup) -> list[bytes]:
        everyones: list[object] = [None] * self.world_size
        dist.gather_object(own, everyones if self.rank == 0 else None, 0, group=group)
        return [item for item in everyones if isinstance(item, bytes)] if self.rank == 0 else []

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over the ranks."""
        return self._exchange.all_reduce(own)

    def team(self, ranks: Range) -> RankGroup:
        """The ranks of a team that this rank is in."""
        return self._teams.team(ranks)

    def close(self) -> None:
        """Leave the process groups; the other ranks must have finished too."""
        dist.destroy_process_group()


def _group(*, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group
