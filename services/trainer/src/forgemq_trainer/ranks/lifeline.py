"""A rank ends with the torchrun that started it, however that dies.

torchrun gives every rank a session of its own, so no signal to its group reaches them, and a
torchrun that is killed cannot end them. The kernel does: a rank left behind would hold the run's
folder against the next life of the trainer. Linux only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from forgemq_shell.service import EXIT_FAILED

TORCHRUN_PID = "FORGEMQ_TORCHRUN_PID"
"""Names the process that a rank ends with; where it is not set, that is the parent."""

_PR_SET_PDEATHSIG = 1


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """From here on the kernel kills this process when torchrun dies; exits where it is dead.

    A kill loses nothing: the next life continues after the newest checkpoint.
    """
    torchrun_pid = int(environ.get(TORCHRUN_PID, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != torchrun_pid:  # it died before the line above
        sys.exit(EXIT_FAILED)
