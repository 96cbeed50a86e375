"""A service that is up and does not work is named: real processes, with the time as an input."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from forgemq_launcher.upkeep.silence import SILENT_S, SilenceWatch
from forgemq_launcher.upkeep.supervisor import ServiceSpec
from tests.unit.launcher.test_supervisor import SLEEPS, spec, supervisor, until_written

TOUCHES = """
import os, time
print('up', flush=True)
while True:
    open(os.environ['FORGEMQ_SERVICE_ALIVE_FILE'], 'a').close()
    os.utime(os.environ['FORGEMQ_SERVICE_ALIVE_FILE'])
    time.sleep(0.02)
"""


def touching(folder: Path) -> ServiceSpec:
    made, path = spec(folder, TOUCHES), folder / "one.alive"
    environ = {**made.environ, "FORGEMQ_SERVICE_ALIVE_FILE": str(path)}
    return replace(made, environ=environ, alive_path=path)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - polls a file
            await asyncio.sleep(0.02)


def touched_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000 if path.exists() else 0


async def test_a_stopped_service_is_named_once_until_it_goes_on(tmp_path: Path) -> None:
    notes: list[str] = []
    kept, service = supervisor([]), touching(tmp_path)
    watch = SilenceWatch(kept.alive_paths, note=notes.append)
    path = tmp_path / "one.alive"
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(service, may_end=lambda: False))
        await until(path.exists)
        (pid, _) = kept.alive_paths()["one"]
        for _ in range(3):
            watch.look(at_ms=touched_ms(path))
        assert (notes, watch.silent) == ([], frozenset())

        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)
        late_ms = touched_ms(path) + int(1000 * SILENT_S) + 1000
        watch.look(at_ms=late_ms)
        assert notes == []  # The machine may have slept.
        for _ in range(3):
            watch.look(at_ms=late_ms)
        assert notes == [
            "one has not worked for 2 minutes: it hangs, or a signal stopped it; kill -CONT "
            f"{pid} continues it, kill -9 {pid} starts it again"
        ]
        assert watch.silent == {"one"}

        stopped_ms = touched_ms(path)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: touched_ms(path) > stopped_ms)
        watch.look(at_ms=touched_ms(path))
        assert notes[1:] == ["one is not silent any more"]
        assert watch.silent == frozenset()
        await kept.stop()


async def test_a_service_that_starts_again_is_not_judged_by_the_file_of_its_life_before(
    tmp_path: Path,
) -> None:
    notes: list[str] = []
    path = tmp_path / "one.alive"
    path.touch()
    os.utime(path, (0, 0))
    starting = replace(spec(tmp_path, SLEEPS), alive_path=path)
    kept = supervisor([])
    watch = SilenceWatch(kept.alive_paths, note=notes.append)
    async with asyncio.TaskGroup() as group:
        group.create_task(kept.keep(starting, may_end=lambda: False))
        await until_written(starting.log_path, "up")
        for _ in range(3):
            watch.look(at_ms=10**13)
        assert notes == []
        await kept.stop()
