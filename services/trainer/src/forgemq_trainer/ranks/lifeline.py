"""Makes a rank end with the torchrun that started it, however torchrun dies.

torchrun starts every rank in a session of its own, so a signal to torchrun's process group does not
reach the ranks, and a killed torchrun cannot end them. Left behind, they would hold the run's
folder, and the trainer could not start again. So the kernel ends them (PR_SET_PDEATHSIG). Linux
only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from forgemq_shell.service import EXIT_FAILED

TORCHRUN_PID = "FORGEMQ_TORCHRUN_PID"
"""Environment variable with torchrun's process id; if it is not set, the parent is torchrun."""

_PR_SET_PDEATHSIG = 1
"""Number of the operation in Linux' prctl.h."""


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Have the kernel kill this process when torchrun dies; exit if it has died already.

    A kill loses nothing: the trainer then starts again and continues after the newest checkpoint.
    """
    torchrun_pid = int(environ.get(TORCHRUN_PID, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != torchrun_pid:  # It died before prctl took effect.
        sys.exit(EXIT_FAILED)
