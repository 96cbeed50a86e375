"""Which groups were ever requested, exactly and for the life of a run, in bounded memory.

Gateway and scheduler recognise a repeated request by its idempotency key. A key that ends in
`/<number>` is a number of the source before it: `shop/17` is number 17 of `shop`. Numbers that were
asked for are kept as ranges, so a source that counts up costs one range however long the run is.
Any other key is kept as its digest. Both kinds have a limit, at which the gateway refuses new keys
of that kind by name; no key is ever forgotten.
"""

import hashlib
import re
import sys
from array import array
from bisect import bisect_right
from typing import NamedTuple

import msgspec
from msgspec import Struct

RANGES_MAX = 16_384
"""Ranges of numbers of all sources: at most 0.4 MB of a snapshot. Agents need one for each domain,
and one for each domain and mode of a round of evaluation."""

KEYS_MAX = 49_152
"""Keys that are no number of a source: 0.4 MB of a snapshot. With as many ranges as may be, a
snapshot still fits into a record."""

KEYS_FULL_CODE = "keys_full"
"""Of the gateway's 400 for a new key when one of the limits is reached."""

_NUMBERED = re.compile(r"(.*)/(0|[1-9][0-9]{0,14})", re.DOTALL)
_DIGEST_BYTES = 8  # two of 49,152 keys share a digest with probability 1e-10


class _KeptAs(NamedTuple):
    """How a key is kept: as a number of the source with this digest, or as a digest (number -1)."""

    digest: int
    number: int


class _State(Struct, frozen=True, array_like=True):
    """All ranges, by digest of their source, and the digests of all other keys, ascending."""

    ranges: tuple[tuple[int, tuple[int, ...]], ...]
    keys: bytes


class AskedKeys:
    """Idempotency keys of all groups that were requested.

    Attributes:
        added_count: Keys that were added since this object exists.

    Example: `d/0` and `d/1` are added: one range. `d/3`: two ranges. `d/2`: one range again.
    """

    def __init__(self) -> None:
        # By source: first, one after the last, first, one after the last, ... ascending.
        self._ranges: dict[int, list[int]] = {}
        self._range_count = 0
        self._keys: set[int] = set()
        self.added_count = 0

    def add(self, key: str, *, domain: str) -> bool:
        """Note a key; False if it is known."""
        is_new = self._add(_kept_as(key, domain=domain))
        self.added_count += is_new
        return is_new

    def _add(self, kept: _KeptAs) -> bool:
        if kept.number < 0:
            is_new = kept.digest not in self._keys
            self._keys.add(kept.digest)
            return is_new
        bounds = self._ranges.setdefault(kept.digest, [])
        before = len(bounds)
        is_new = _add_number(bounds, kept.number)
        self._range_count += (len(bounds) - before) // 2
        return is_new

    def has(self, key: str, *, domain: str) -> bool:
        """Whether a group with this key was requested."""
        kept = _kept_as(key, domain=domain)
        if kept.number < 0:
            return kept.digest in self._keys
        return bisect_right(self._ranges.get(kept.digest, ()), kept.number) % 2 == 1

    def limit_reached(self, key: str, *, domain: str) -> str:
        """Why a new key cannot be kept, naming the limit; "" if it can."""
        kept = _kept_as(key, domain=domain)
        if kept.number < 0:
            if len(self._keys) < KEYS_MAX:
                return ""
            return (
                f"a run remembers at most {KEYS_MAX} keys that do not end in '/<number>'; number "
                "the groups of one source, as in 'shop/0', 'shop/1', which has no limit"
            )
        bounds = self._ranges.get(kept.digest, ())
        extends_a_range = kept.number in bounds or kept.number + 1 in bounds
        if self._range_count < RANGES_MAX or extends_a_range or self.has(key, domain=domain):
            return ""
        return (
            f"a run remembers at most {RANGES_MAX} ranges of numbers; ask for the numbers of a "
            "source one after the other"
        )

    def first_unasked(self, source: str, *, domain: str, start: int = 0) -> int:
        """The lowest number from `start` on of the source that was not asked for."""
        bounds = self._ranges.get(_digest("number", domain, source), [])
        position = bisect_right(bounds, start)
        return bounds[position] if position % 2 else start

    def to_bytes(self) -> bytes:
        """All keys; equal keys give equal bytes."""
        keys = array("Q", sorted(self._keys))
        if sys.byteorder == "big":
            keys.byteswap()
        ranges = tuple((digest, tuple(self._ranges[digest])) for digest in sorted(self._ranges))
        return msgspec.msgpack.encode(_State(ranges=ranges, keys=keys.tobytes()))

    def restore(self, data: bytes) -> None:
        """Replace all keys with those of `to_bytes`; b"" has none."""
        state = msgspec.msgpack.decode(data, type=_State) if data else _State((), b"")
        keys = array("Q")
        keys.frombytes(state.keys)
        if sys.byteorder == "big":
            keys.byteswap()
        self._keys = set(keys)
        self._ranges = {digest: list(bounds) for digest, bounds in state.ranges}
        self._range_count = sum(len(bounds) // 2 for bounds in self._ranges.values())

    def _check(self) -> None:
        """Assert the invariants."""
        for bounds in self._ranges.values():
            assert bounds == sorted(set(bounds)), "ranges ascend and never touch"
            assert len(bounds) % 2 == 0
        assert self._range_count == sum(len(bounds) // 2 for bounds in self._ranges.values())


def number_of(key: str, *, source: str) -> int | None:
    """The number that this key is of the source; None if it is no number of it."""
    found = _NUMBERED.fullmatch(key)
    return int(found[2]) if found is not None and found[1] == source else None


def _kept_as(key: str, *, domain: str) -> _KeptAs:
    found = _NUMBERED.fullmatch(key)
    if found is None:
        return _KeptAs(_digest("key", domain, key), -1)
    return _KeptAs(_digest("number", domain, found[1]), int(found[2]))


def _add_number(bounds: list[int], number: int) -> bool:
    """Add a number to the ranges; False if one of them has it."""
    position = bisect_right(bounds, number)
    if position % 2:
        return False
    # A bound that occurs twice is the seam of two ranges that touch.
    bounds[position:position] = (number, number + 1)
    if position + 2 < len(bounds) and bounds[position + 2] == number + 1:
        del bounds[position + 1 : position + 3]
    if position and bounds[position - 1] == number:
        del bounds[position - 1 : position + 1]
    return True


def _digest(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little")
