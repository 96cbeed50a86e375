"""How far an engine is with its start, from the lines of its log."""

from collections.abc import Sequence

BEFORE_ALL = "importing libraries"
_PHASES = (
    ("server_args=", "starting its processes"),
    ("Init parallel begin", "setting up"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating memory"),
    ("Memory pool end", "opening its port"),
    ("The server is fired up", "ready"),
)
"""What SGLang 0.5.23 logs when it enters each phase, in order."""


def phase(lines: Sequence[str]) -> str:
    """The furthest phase that these lines show; other lines, such as warnings, do not matter."""
    reached = BEFORE_ALL
    for marker, name in _PHASES:
        if any(marker in line for line in lines):
            reached = name
    return reached
