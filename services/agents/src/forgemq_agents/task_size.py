"""How long a task may be, for one of a function and for one of a file."""

from forgemq_contracts.admin import BODY_BYTES_MAX

TASK_BYTES_MAX = BODY_BYTES_MAX - 65_536
"""A task travels in the request for its group, whose other fields are below 1 kB."""


def size_fault(written: bytes) -> str:
    """What is wrong with the size of a task that is written as JSON; "" if nothing is."""
    if len(written) <= TASK_BYTES_MAX:
        return ""
    return f"has {len(written)} bytes, a task has at most {TASK_BYTES_MAX}"
