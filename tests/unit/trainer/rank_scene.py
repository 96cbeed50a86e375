"""Runs a function on two ranks: two processes with gloo, joined by a store on the loopback."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import multiprocessing

from forgemq.trainer.ranks import Launch, Ranks

WORLD = 2


def on_ranks(scene: Callable[[Ranks, Path], None], folder: Path) -> None:
    """Run `scene(ranks, folder)` on every rank; raises what a rank raised.

    Args:
        scene: a function of a module, so that a new process finds it.
        folder: where the ranks leave what the test looks at.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.start_processes(
        _rank, args=(scene, folder, port), nprocs=WORLD, start_method="spawn"
    )


def _rank(rank: int, scene: Callable[[Ranks, Path], None], folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks(launch=Launch(rank=rank, local_rank=rank, world_size=WORLD), device="cpu")
    try:
        scene(ranks, folder)
    finally:
        ranks.close()
