"""What does the start of an engine on a CPU cost, and how much memory does the engine take?

The engine serves the demo's model. `over_new_processes` compares with SGLang's own way in the same
run: there each of its processes is a new Python that imports SGLang again. CPU time is that of all
its processes until the engine answers; memory counts pages that they share once, and only a part of
those that they share with others, so nothing else should use the same libraries meanwhile. Both are
the least of some starts, as others use the machine.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from measurement import Measurement, arguments
from msgspec import Struct

from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.server import EngineServer

MODEL = Path(__file__).parents[1] / "deploy" / "demo" / "model"
REPEATS = 2
# Python imports a module of this name at each start.
_NEW_PROCESSES = """
from forgemq_sglang_cpu import forked

forked.launch = lambda original, *args, **arguments: original(*args, **arguments)
"""


class Started(Struct, frozen=True, kw_only=True):
    """What an engine had taken when it answered."""

    wall_s: float
    cpu_s: float
    memory_bytes: int


def start(folder: Path, inherited: Mapping[str, str]) -> Started:
    """Start an engine and stop it."""
    server = EngineServer(str(MODEL), folder, port=free_port(), inherited=inherited)
    begun_s = time.monotonic()
    with server:
        wall_s = time.monotonic() - begun_s
        processes = list(processes_of(server))
        return Started(
            wall_s=wall_s,
            cpu_s=sum(sum(each.cpu_times()[:2]) for each in processes),
            memory_bytes=sum(each.memory_full_info().pss for each in processes),
        )


def processes_of(server: EngineServer) -> Iterator[psutil.Process]:
    """The processes of an engine that runs."""
    main = psutil.Process(server.pid)
    return iter((main, *main.children(recursive=True)))


def least(folder: Path, inherited: Mapping[str, str]) -> Started:
    """The least of each figure."""
    starts = [start(folder, inherited) for _ in range(REPEATS)]
    return Started(
        wall_s=min(each.wall_s for each in starts),
        cpu_s=min(each.cpu_s for each in starts),
        memory_bytes=min(each.memory_bytes for each in starts),
    )


def main() -> int:
    """Start engines both ways."""
    chosen = arguments(__doc__ or "")
    measurement = Measurement(
        name="engine_start",
        question="What does the start of an engine on a CPU cost?",
        conditions={
            "starts of each kind": str(REPEATS),
            "load average": f"{os.getloadavg()[0]:.1f}",
        },
    )
    if not chosen.case or "demo" in chosen.case:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(_NEW_PROCESSES)
            path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
            copies = least(Path(folder), os.environ)
            new = least(Path(folder), {**os.environ, "PYTHONPATH": path})
        measurement.row("demo", "wall_s", copies.wall_s, "s")
        measurement.row("demo", "cpu_s", copies.cpu_s, "s")
        measurement.row("demo", "memory_gb", copies.memory_bytes / 1e9, "GB")
        measurement.row("demo", "wall_over_new_processes", copies.wall_s / new.wall_s, "x")
        measurement.row("demo", "cpu_over_new_processes", copies.cpu_s / new.cpu_s, "x")
        shared = copies.memory_bytes / new.memory_bytes
        measurement.row("demo", "memory_over_new_processes", shared, "x")
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
