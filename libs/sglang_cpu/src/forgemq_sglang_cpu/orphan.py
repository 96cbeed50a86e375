"""Ends this process group when its parent is gone, so that no engine outlives a killed launcher."""

import os
import signal
import threading
import time

CHECK_EVERY_S = 1.0


def end_with_parent(parent_pid: int) -> None:
    """Watch the parent from a daemon thread; kill the own process group once it has changed.

    Args:
        parent_pid: process that started this one.

    Raises:
        RuntimeError: this process does not lead its group; the kill would hit its siblings.
    """
    if os.getpgid(0) != os.getpid():
        raise RuntimeError("the engine must lead a process group of its own")
    # PR_SET_PDEATHSIG would follow the parent's thread, which may end long before the parent.
    threading.Thread(target=_watch, args=(parent_pid,), name="end-with-parent", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(CHECK_EVERY_S)
    os.killpg(0, signal.SIGKILL)
