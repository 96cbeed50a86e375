"""Runs a module as a process that ends with its launcher: `child.py <launcher pid> <module> ...`.

A launcher that is killed cannot stop its services, so the kernel does: it sends SIGTERM to this
process when the launcher is gone, and the service shuts down as after Ctrl-C. Linux only, like the
engine.
"""

import contextlib
import ctypes
import fcntl
import os
import runpy
import signal
import sys
import termios

_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def main(arguments: list[str]) -> None:
    """Bind this process to its launcher, then become the module."""
    launcher_pid, module = int(arguments[1]), arguments[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # If the launcher died before the line above, no signal will come.
    if os.getppid() != launcher_pid:
        sys.exit(1)
    if sys.flags.safe_path:
        # Started as a file, without the folder that `-m` puts there.
        sys.path.insert(0, os.getcwd())
    _leave_terminal()
    sys.argv = [module, *arguments[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _leave_terminal() -> None:
    """Give up the launcher's terminal: what asks there for a password would be stopped for good."""
    with contextlib.suppress(OSError):  # Most often there is none.
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


if __name__ == "__main__":
    main(sys.argv)
