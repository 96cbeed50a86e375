"""In which order the tasks of a file are played."""

import hashlib
from collections.abc import Sequence


def order_of_pass(count: int, *, seed: int, domain: str, number: int) -> Sequence[int]:
    """The lines of a file with `count` tasks in the order of pass `number` over it, from 0.

    Every pass has each line once, in an order of its own. It depends on the arguments alone, not on
    the Python that runs it.
    """
    key = hashlib.blake2b(f"{seed}/{domain}/{number}".encode(), person=b"order-of-tasks").digest()
    return sorted(range(count), key=lambda line: _place(line, key))


def _place(line: int, key: bytes) -> bytes:
    return hashlib.blake2b(line.to_bytes(8, "big"), key=key, digest_size=16).digest()
