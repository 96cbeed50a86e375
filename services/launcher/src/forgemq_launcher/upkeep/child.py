"""Runs a module as a process that ends with its launcher: `child.py <launcher pid> <module> ...`.

A launcher that is killed cannot stop anything, so the kernel does: SIGTERM reaches this process
when the launcher is gone, and the service shuts down as on Ctrl-C. Linux only, like the engine.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Bind this process to its launcher, then become the module."""
    launcher_pid, module = int(arguments[1]), arguments[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher_pid:  # it died before the line above
        sys.exit(1)
    sys.argv = [module, *arguments[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv)
