"""Ends a process group when its parent is gone, so that no engine outlives a killed launcher."""

import os
import signal
import threading
import time

from forgemq_sglang_cpu.left_files import own_temporary, remove_left_files, shared_files_of

CHECK_EVERY_S = 1.0
"""How long an orphan may hold its port and memory; a check costs microseconds."""


def end_with_parent(parent_pid: int) -> None:
    """Start a daemon thread that kills this process group once the parent has changed.

    Args:
        parent_pid: Of the process that started this one.

    Raises:
        RuntimeError: this process does not lead its group; the kill would hit its siblings.
    """
    if os.getpgid(0) != os.getpid():
        raise RuntimeError("the engine must lead its process group")
    # Not PR_SET_PDEATHSIG: it follows the parent's thread, which may end long before the parent.
    threading.Thread(target=_watch, args=(parent_pid,), name="end-with-parent", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(CHECK_EVERY_S)
    try:
        # Nobody is left who would do so afterwards.
        remove_left_files(shared_files_of(os.getpgid(0)), own_temporary())
    finally:
        os.killpg(0, signal.SIGKILL)
