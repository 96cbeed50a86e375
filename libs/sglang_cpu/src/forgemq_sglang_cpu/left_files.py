"""Files that SGLang's processes leave when they are killed, which is how an engine ends here."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
"""Where Linux keeps named shared memory. It holds half of a machine's memory, in a pod 64 MB."""

_MAPPED = re.compile(rf"{SHARED}/sgl\S+$", re.MULTILINE)
"""Queues between the processes of an engine, up to 25 MB, and what a scheduler says of its load."""

_PREFIX = "forgemq-engine-"


def make_temporary() -> Path:
    """Make a folder for the temporary files of one engine."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def own_temporary() -> Path | None:
    """Folder that `make_temporary` made for this process; None if none was."""
    folder = Path(tempfile.gettempdir())
    return folder if folder.name.startswith(_PREFIX) else None


def pids_of_group(group: int) -> frozenset[int]:
    """Numbers of a process group's processes that have not ended."""
    pids = set()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                pids.add(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return frozenset(pids)


def shared_files_of(group: int) -> frozenset[Path]:
    """Files of named shared memory that SGLang made for processes of a group that live."""
    found = set[str]()
    for pid in pids_of_group(group):
        with suppress(OSError):  # It has ended meanwhile.
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found.update(_MAPPED.findall(maps))
    return frozenset(map(Path, found))


def remove_left_files(shared: Iterable[Path], temporary: Path | None) -> None:
    """Remove what an engine leaves; what cannot be removed stays.

    Args:
        shared: Files of its shared memory.
        temporary: Folder of its temporary files; None if it shares that of other programs, whose
            files stay.
    """
    for file in shared:
        with suppress(OSError):
            file.unlink()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
