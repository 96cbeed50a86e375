"""What counts exactly once: one completion for each request id, and groups that are over.

Gateway, reward and merger decide with these functions, so they never disagree about which of
several attempts trained or was delivered.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict

from forgemq_contracts.completions import FinishedCompletion

RETIRED_IDS_MAX = 32_768
"""Retired groups by which a service recognises late records, of the run (scheduler) or of one
partition (reward, merger).

That is 256 KiB of digests in a snapshot, and half a day of single-turn groups of 16 at a million
completions a day. A late record needs far fewer: it is at most a request deadline late. Repeated
requests for groups are recognised by their keys, which are never forgotten (`asked_keys.py`).
"""

_DIGEST_BYTES = 8  # two of 32,768 ids collide with probability 2**-35


def is_candidate(completion: FinishedCompletion) -> bool:
    """Whether this record can be the completion of its request: error and abort never are."""
    return completion.finish_reason not in ("error", "abort")


def end_of(completion: FinishedCompletion) -> str:
    """What ended the output, for people and graders: `finish_reason`, or `repetition`."""
    return "repetition" if completion.repeated_tokens else completion.finish_reason


class CompletionLedger:
    """Which record of finished-completions is the completion of its request id.

    A request can finish several times: after a retry, after a redispatch, or because a lane that
    was given up finishes all the same. The candidate with the lowest offset in the group's
    partition counts. One ledger reads one partition in offset order, from or before the first
    record that a reader still needs.

    Example: attempt 0 finishes with `error` at offset 7, attempt 1 with `stop` at 9, attempt 0
    once more with `stop` at 12. `observe` returns False, True, False.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, int] = {}

    def observe(self, completion: FinishedCompletion, *, offset: int) -> bool:
        """Note one record; True if it is the completion of its request id."""
        if not is_candidate(completion):
            return False
        return self._offsets.setdefault(completion.request_id, offset) == offset

    def forget(self, request_id: str) -> None:
        """Drop a request id of a retired group; idempotent."""
        self._offsets.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._offsets)


class RetiredIds:
    """The newest ids that are over, as 8-byte digests, at most `ids_max` of them.

    Two ids share a digest with probability 2**-64; at `ids_max` ids a new id is mistaken for an
    old one with probability below 1e-14. The oldest id is forgotten first.
    """

    def __init__(self, *, ids_max: int = RETIRED_IDS_MAX) -> None:
        self._ids_max = ids_max
        # An OrderedDict, because a dict finds its oldest key more slowly with each one removed.
        self._digests: OrderedDict[int, None] = OrderedDict()

    def add(self, identifier: str) -> None:
        """Remember an id; adding it again does not make it younger."""
        self._digests.setdefault(_digest(identifier), None)
        if len(self._digests) > self._ids_max:
            self._digests.popitem(last=False)

    def __contains__(self, identifier: str) -> bool:
        return _digest(identifier) in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def to_bytes(self) -> bytes:
        """Digests from oldest to newest, 8 little-endian bytes each."""
        values = array("Q", self._digests)
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    def restore(self, data: bytes) -> None:
        """Replace all ids with those of `to_bytes`."""
        values = array("Q")
        values.frombytes(data)
        if sys.byteorder == "big":
            values.byteswap()
        self._digests = OrderedDict.fromkeys(values)


def _digest(identifier: str) -> int:
    digest = hashlib.blake2b(identifier.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little")
