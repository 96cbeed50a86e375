"""Keeps what a process knows from the programs that it starts, and from others of the same user."""

import ctypes
import sys

_PR_SET_DUMPABLE = 4
"""Number of the operation in Linux' prctl.h."""


def hide_process() -> None:
    """Let no process of the same user read this one's environment or memory, or trace it.

    Without this, /proc shows a broker's password to every program that the user's code starts. It
    does not bind root, and programs that this process starts may be read themselves. A debugger
    needs root then, and no core is dumped. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses to hide the process")
