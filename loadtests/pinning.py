"""Keeps what is measured on one core, and everything else on the others."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_USABLE = sorted(os.sched_getaffinity(0))

MEASURED = {_USABLE[0]}
"""The core of what is measured."""

OTHERS = set(_USABLE[1:]) or MEASURED
"""The cores of all else; the same one if there is only one."""


def measure_apart(process: int) -> None:
    """Give this process, whose parent calls, a core for itself; the parent and all else the others.

    Processes and threads that start later are where the one was that starts them.
    """
    _pin(os.getpid(), OTHERS)
    _pin(process, MEASURED)


def measure_together(process: int) -> None:
    """Undo `measure_apart`: the process, its parent and all else have all cores again."""
    _pin(os.getpid(), _USABLE)
    _pin(process, _USABLE)


def _pin(process: int, wanted: Iterable[int]) -> None:
    """Let every thread of the process, and of its children, run on these cores alone."""
    own = psutil.Process(process)
    for each in (own, *own.children(recursive=True)):
        # A thread may end between its listing and the call.
        for thread in Path(f"/proc/{each.pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), wanted)


def cpu_s(process: int) -> float:
    """CPU time that the process and its children have used so far."""
    own = psutil.Process(process)
    times = own.cpu_times()
    used = times.user + times.system + times.children_user + times.children_system
    return float(used) + sum(cpu_s(child.pid) for child in own.children())
