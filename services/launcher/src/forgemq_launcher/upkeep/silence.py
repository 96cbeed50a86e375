"""Which service processes are up and do not work: they hang, or a signal stopped them.

Each touches a file every 5 s while it works (`forgemq_shell.loop_watch`), also in a step that takes
long. A process that has not touched it since its start is still starting, and is not judged.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from forgemq_launcher.upkeep.supervisor import Note
from forgemq_shell.clock import now_ms

SILENT_S = 120.0
"""A machine that is short of memory may hold up a process that works for the better part of it."""
LOOK_EVERY_S = 15.0
"""Three touches of a process that works."""


class SilenceWatch:
    """Says which services are silent, once for each silence; nothing is ended.

    Args:
        running: Of each service that is up its process and its file, by name.
        note: Shows a line to the people at the terminal.
    """

    def __init__(
        self, running: Callable[[], Mapping[str, tuple[int, Path]]], *, note: Note
    ) -> None:
        self._running = running
        self._note = note
        self._old: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()
        """Names of those that are silent."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(at_ms=now_ms())

    def look(self, *, at_ms: int) -> None:
        """Note whose file has become old, or is not any more."""
        running = self._running()
        old = frozenset(name for name, (_, path) in running.items() if _is_old(path, at_ms=at_ms))
        # At one look all files are old if the machine slept, or its clock was set.
        silent = old & self._old
        for name in sorted(silent - self.silent):
            pid, _ = running[name]
            self._note(
                f"{name} has not worked for {SILENT_S / 60:.0f} minutes: it hangs, or a signal "
                f"stopped it; kill -CONT {pid} continues it, kill -9 {pid} starts it again"
            )
        for name in sorted(self.silent - silent):
            self._note(f"{name} is not silent any more")
        self._old, self.silent = old, silent


def _is_old(path: Path, *, at_ms: int) -> bool:
    try:
        touched_s = path.stat().st_mtime
    except OSError:
        return False
    return at_ms / 1000 - touched_s > SILENT_S
