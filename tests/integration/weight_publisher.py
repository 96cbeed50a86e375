"""A trainer's fast path in a separate process: rank 0 of one lane's process group.

    python -m tests.integration.weight_publisher FOLDER MODE [RANKS] [BACKEND]

RANKS: processes of the lane's engines, 1 by default. BACKEND: `gloo`, by default, or `nccl`, which
sends from the first GPU. Prints the offer as one JSON line, waits for a
line on stdin, and then, by MODE:
    send    broadcasts the folder's weights and prints the result of FastPaths.send; repeats this
            for each further line, which names the next folder; after a `|` a line may name the
            folder of a draft head, whose tensors follow on the same group
    absent  keeps its port open and never joins
    die     joins the group with the engine and ends before the first byte
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec

from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.process_group import BackendName
from forgemq_trainer.transfer_deadline import TransferDeadline

DEADLINE_S = 20.0


def main(first: str, mode: str, ranks: str = "1", backend: BackendName = "gloo") -> None:
    deadline = TransferDeadline(DEADLINE_S, 2e8)
    paths = FastPaths(host="127.0.0.1", backend=backend, deadline=deadline, device="cuda:0")
    for line in _lines(first):
        offers = paths.offer({0: 1}, prefix=f"test-{os.getpid()}", ranks={0: int(ranks)})
        _say(msgspec.json.encode(offers).decode())
        sys.stdin.readline()
        if mode == "absent":
            sys.stdin.readline()
            return
        if mode == "die":
            _join(paths)
            return
        files = [Path(folder) / "model.safetensors" for folder in line.split("|")]
        failures = paths.send(offers, *files)
        _say(json.dumps(failures))


def _join(paths: FastPaths) -> None:
    """Form the group with the engine, as `send` does before its first byte."""
    group = paths._links[0].group
    while not group.has_visitor():
        time.sleep(0.02)
    group.form(left=timedelta(seconds=DEADLINE_S))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _lines(first: str) -> Iterator[str]:
    yield first
    while line := sys.stdin.readline().strip():
        yield line


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the backend is one of two words
