"""Becomes a command without any capability, as one of a plain user: `unprivileged.py COMMAND ...`.

Tests may run as root, for whom the kernel's rules between processes of one user do not hold.
"""

import ctypes
import os
import sys

_PR_CAPBSET_DROP = 24
"""Number of the operation in Linux' prctl.h."""
_CAPABILITIES_MAX = 64

if __name__ == "__main__":
    prctl = ctypes.CDLL(None).prctl
    for capability in range(_CAPABILITIES_MAX):
        prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # Refused to a plain user, who has none.
    os.execv(sys.argv[1], sys.argv[1:])
