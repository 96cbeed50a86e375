"""Ranks that run functions for tests: processes that are joined over the loopback."""

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from forgemq_settings.ports import free_port
from forgemq_trainer.ranks.ranks import RankLaunch, Ranks

WORLD = 2
START_DEADLINE_S = 90.0
"""To import torch and transformers and to join, also if two pairs start at once on busy cores."""

WORK_DEADLINE_S = 60.0
"""For one function; a rank that hangs is killed then, before the test's own timeout."""


PRELOADED = ["torch.distributed.fsdp", "transformers", "tests.unit.trainer.scene"]
"""None of them starts a thread or uses a GPU while it is imported."""


class LostRankProcessError(AssertionError):
    """A rank raised, hung or died; a traceback is in the captured stderr."""


class RankProcesses:
    """All ranks, for many functions: starting them takes longer than most functions.

    Lifecycle: `run` starts the ranks if they do not run. A function that fails ends them, so that
    the next one gets new ranks. `close` ends them.
    """

    def __init__(
        self,
        *,
        world: int,
        device: str = "cpu",
        deadline_s: float = WORK_DEADLINE_S,
        work_deadline_s: float = WORK_DEADLINE_S,
    ) -> None:
        """Start nothing yet.

        Args:
            world: Number of ranks.
            device: `cpu`, or `cuda` for one GPU a rank.
            deadline_s: How long a rank waits for another within a function.
            work_deadline_s: For one function; on a GPU the first ones compile kernels.
        """
        self._world = world
        self._device = device
        self._deadline_s = deadline_s
        self._work_deadline_s = work_deadline_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, work: Callable[..., Any], *arguments: object) -> list[Any]:
        """Run `work(ranks, *arguments)` on every rank; returns their results, by rank.

        Args:
            work: A function of a module, so that another process can import it.
            arguments: Can be pickled, like the result.

        Raises:
            LostRankProcessError: the function did not return on one of the ranks.
        """
        ends = self.ends(work, *arguments)
        self._demand(ends)
        return ends

    def ends(self, work: Callable[..., Any], *arguments: object) -> list[Any]:
        """Run as `run` does; if a rank has no result, returns its error instead of raising it."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((work, arguments)))
        return self._answers(within_s=self._work_deadline_s)

    def close(self) -> None:
        """Kill all, by process id."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        port = free_port()
        # Its server imports once what takes each rank seconds; a rank is a copy of that process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self._world):
            launch = RankLaunch(
                rank=rank,
                local_rank=rank,
                world_size=self._world,
                local_world_size=self._world,
            )
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(launch, self._device, port, self._deadline_s, there)
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        # Join only once all have started: the ranks' deadline may be too short for a start.
        self._demand(self._answers(within_s=START_DEADLINE_S))
        for connection in self._connections:
            connection.send_bytes(b"join")
        self._demand(self._answers(within_s=WORK_DEADLINE_S))

    def _demand(self, answers: list[Any]) -> None:
        for answer in answers:
            if isinstance(answer, LostRankProcessError):
                self.close()
                raise answer

    def _answers(self, *, within_s: float) -> list[Any]:
        end_s = time.monotonic() + within_s
        return [self._answer(rank, end_s=end_s) for rank in range(self._world)]

    def _answer(self, rank: int, *, end_s: float) -> Any:
        connection = self._connections[rank]
        if not connection.poll(max(0.0, end_s - time.monotonic())):
            return LostRankProcessError(f"rank {rank} took too long")
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            self._processes[rank].join()
            status = self._processes[rank].exitcode
            return LostRankProcessError(f"rank {rank} ended with status {status}")


class RankPair(RankProcesses):
    """Two ranks on the CPU, with gloo."""

    def __init__(self, *, deadline_s: float = WORK_DEADLINE_S) -> None:
        super().__init__(world=WORLD, deadline_s=deadline_s)


def _serve(
    launch: RankLaunch, device: str, port: int, deadline_s: float, connection: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    connection.send_bytes(pickle.dumps(launch.rank))
    connection.recv_bytes()
    own_device = "cpu" if device == "cpu" else f"{device}:{launch.local_rank}"
    ranks = Ranks(launch=launch, device=own_device, deadline_s=deadline_s)
    connection.send_bytes(pickle.dumps(launch.rank))
    while True:
        try:
            work, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # An error of the work ends this process, with its traceback on stderr.
        connection.send_bytes(pickle.dumps(work(ranks, *arguments)))
