"""Runs a function on trainer ranks, each in a process of its own with one thread, over loopback."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from forgemq_settings.ports import free_port
from forgemq_trainer.ranks.ranks import RankLaunch, Ranks

DEADLINE_S = 600.0
"""How long a rank waits for another: longer than any load test's step."""

Result = TypeVar("Result")


def on_ranks(work: Callable[..., Result], *arguments: object, world: int) -> list[Result]:
    """Run `work(ranks, *arguments)` on every rank; returns the results, by rank.

    Args:
        work: A function of a module, so that another process can import it.
        arguments: Can be pickled, like the result.
        world: Number of ranks.

    Raises:
        EOFError: a rank failed; its traceback is in the output.
    """
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes, ends = [], []
    for rank in range(world):
        here, there = context.Pipe()
        launch = RankLaunch(rank=rank, local_rank=rank, world_size=world, local_world_size=world)
        process = context.Process(target=_run, args=(launch, port, there, work, arguments))
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    results: list[Result] = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return results


def _run(
    launch: RankLaunch,
    port: int,
    connection: Connection,
    work: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = Ranks(launch=launch, device="cpu", deadline_s=DEADLINE_S)
    connection.send(work(ranks, *arguments))
    ranks.close()
