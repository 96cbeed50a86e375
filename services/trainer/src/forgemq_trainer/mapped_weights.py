"""The bytes of published weights as buckets, for the transfers to all lanes together.

The file is mapped once, not read. A bucket whose tensors lie side by side in the file is lent as a
view of the mapping: its bytes are the kernel's cache of the file, which any number of lanes send
from at no cost in memory. Every bucket of a file with one dtype is such a bucket, and so is every
bucket of one tensor, as those above `BUCKET_BYTES_MAX` are.

What is left is copied: tensors that lie apart, and all buckets if the device is a GPU. Lanes that
need a bucket at the same time share its copy, and all copies together are at most
`COPIED_BYTES_MAX`, or one bucket if that is larger. A lane waits for room.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from forgemq_contracts.weight_buckets import (
    buckets,
    header_bytes,
    tensor_ranges,
    tensor_specs,
)

COPIED_BYTES_MAX = 256 * 1024 * 1024
"""Four full buckets: a lane that hangs holds one until its deadline, and others go on."""

ROOM_POLL_S = 0.05
"""Between two checks of the deadline while a lane waits for room."""

Range: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class _Copy:
    flat: Tensor
    holders: int


class MappedWeights:
    """One version's file during its transfers; lanes' threads call `lent` at the same time.

    Example: 8 lanes ask for bucket 0 of a bfloat16 model on the CPU path. All get the same view of
    the mapped file; `copied_bytes_peak` stays 0.
    """

    def __init__(
        self, file: Path, *, device: torch.device, copied_bytes_max: int = COPIED_BYTES_MAX
    ) -> None:
        """Map the file.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is no safetensors file.
        """
        # Private ("c"), because torch wants memory that it may write to; nothing is written.
        self._bytes = torch.from_numpy(np.memmap(file, np.uint8, mode="c"))
        self._device = device
        header = bytes(self._bytes[: header_bytes(bytes(self._bytes[:8].numpy()))].numpy())
        ranges = tensor_ranges(header)
        self._buckets = tuple(
            _joined([ranges[spec.name] for spec in bucket])
            for bucket in buckets(tensor_specs(header))
        )
        self.bucket_bytes = tuple(
            sum(end - start for start, end in joined) for joined in self._buckets
        )
        """Sizes of the buckets, in the order in which engines receive them."""
        self._copied_bytes_max = copied_bytes_max
        self._copies: dict[int, _Copy] = {}
        self._copied_bytes = 0
        self._changed = threading.Condition()
        self.copied_bytes_peak = 0
        """The most bytes of copies at once so far."""

    @contextmanager
    def lent(self, index: int, *, check: Callable[[], object]) -> Iterator[Tensor]:
        """One bucket as a flat tensor of bytes on the device, while the block runs.

        Args:
            index: Of the bucket.
            check: Called while this waits for room; it raises to end the wait.
        """
        ranges = self._buckets[index]
        if len(ranges) == 1 and self._device.type == "cpu":
            yield self._bytes[slice(*ranges[0])]
            return
        flat = self._share(index, check=check)
        try:
            yield flat
        finally:
            self._give_back(index)

    def _share(self, index: int, *, check: Callable[[], object]) -> Tensor:
        size = self.bucket_bytes[index]
        with self._changed:
            while index not in self._copies and not self._has_room(size):
                check()
                self._changed.wait(ROOM_POLL_S)
            if index not in self._copies:
                self._copies[index] = _Copy(self._copied(index, size), holders=0)
                self._copied_bytes += size
                self.copied_bytes_peak = max(self.copied_bytes_peak, self._copied_bytes)
            self._copies[index].holders += 1
            return self._copies[index].flat

    def _has_room(self, size: int) -> bool:
        return not self._copies or self._copied_bytes + size <= self._copied_bytes_max

    def _copied(self, index: int, size: int) -> Tensor:
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        filled = 0
        for start, end in self._buckets[index]:
            flat[filled : filled + end - start].copy_(self._bytes[start:end])
            filled += end - start
        return flat

    def _give_back(self, index: int) -> None:
        with self._changed:
            copy = self._copies[index]
            copy.holders -= 1
            if not copy.holders:
                del self._copies[index]
                self._copied_bytes -= len(copy.flat)
                self._changed.notify_all()


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """The same bytes in the fewest ranges."""
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
