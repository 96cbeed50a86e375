"""A group of the kernel's controllers for a node's pods, so that none of theirs is left behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "forgemq-test-node"
_GONE_WITHIN_S = 20.0
"""Processes that were killed leave their groups within a second."""


def hierarchies() -> list[Path]:
    """Where the kernel shows its controllers: one folder with cgroup v2, one for each with v1."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return sorted({Path(line[1]) for line in lines if line[2] in {"cgroup", "cgroup2"}})


@contextmanager
def node_group(name: str = NAME) -> Iterator[str]:
    """A group of this name is there in every hierarchy during the block, and in none after it.

    One that a killed test left is removed first.
    """
    _remove(name)
    try:
        for root in hierarchies():
            (root / name).mkdir()
        yield name
    finally:
        _remove(name)


def _remove(name: str) -> None:
    deadline_s = time.monotonic() + _GONE_WITHIN_S
    for top in (root / name for root in hierarchies()):
        inner = sorted(path for path in top.rglob("*") if path.is_dir())
        for path in [*reversed(inner), *([top] if top.is_dir() else [])]:
            _remove_one(path, deadline_s)


def _remove_one(path: Path, deadline_s: float) -> None:
    while True:
        try:
            return path.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
