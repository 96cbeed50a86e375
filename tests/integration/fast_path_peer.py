"""Stands in for an engine's process on the fast path: torch only, with a group as sglang makes it.

Arguments: host; port; group name; the number of files after which to die (-1: never; -2: hang after
joining, like an engine on a machine that was cut off); the safetensors files whose bytes are
expected. Prints `equal` or `different` for each. RANK and WORLD_SIZE say which of the engine's
processes this is; by default it is the only one. TIMEOUT_S bounds each wait for other ranks.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from forgemq_contracts.weight_buckets import buckets, tensor_specs

HANGS = -2


def main(host: str, port: str, name: str, dies_after: int, files: list[str]) -> None:
    timeout = timedelta(seconds=int(os.environ.get("TIMEOUT_S", "60")))
    rank, world = int(os.environ.get("RANK", "1")), int(os.environ.get("WORLD_SIZE", "2"))
    store, rank, world = next(rendezvous(f"tcp://{host}:{port}", rank, world, timeout=timeout))
    group, _ = _new_process_group_helper(
        world,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {each: each for each in range(world)}
    if dies_after == HANGS:
        time.sleep(600)
    for number, file in enumerate(files):
        received = {}
        for bucket in buckets(tensor_specs(Path(file).read_bytes())):
            flat = torch.empty(sum(spec.size_bytes for spec in bucket), dtype=torch.uint8)
            distributed.broadcast(flat, src=0, group=group)
            start = 0
            for spec in bucket:
                part = flat[start : start + spec.size_bytes].view(getattr(torch, spec.dtype))
                received[spec.name] = part.reshape(spec.shape)
                start += spec.size_bytes
        expected = load_file(file)
        is_equal = all(torch.equal(received[tensor], expected[tensor]) for tensor in expected)
        sys.stdout.write("equal\n" if is_equal else "different\n")
        sys.stdout.flush()
        if number + 1 == dies_after:
            os._exit(9)
    # An engine outlives the transfer, so keep the sockets open until the trainer has finished.
    distributed.destroy_process_group(group)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
