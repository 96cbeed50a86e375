"""What an engine receives on one fast path: sessions of buckets, and how far it is."""

import time
from collections.abc import Iterator

from msgspec import Struct

from forgemq_contracts.weight_buckets import TensorSpec, buckets
from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.engine import BucketPlace, EngineRefusedError, Selector


class Receipt:
    """One fast path in numbers; a single deadline holds for all of its calls."""

    def __init__(self, published: PublishedWeights, *, started_s: float) -> None:
        self._published = published
        self._started_s = started_s
        self.received_bytes = 0

    def left_s(self) -> float:
        """The seconds left until the deadline.

        Raises:
            EngineRefusedError: The deadline has passed.
        """
        left_s = self._started_s + self._published.deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineRefusedError(f"too slow: {self}")
        return left_s

    def __str__(self) -> str:
        """How far the fast path is, for people."""
        return (
            f"{self.received_bytes} of {self._published.size_bytes} bytes in "
            f"{time.monotonic() - self._started_s:.1f} s of {self._published.deadline_s:.1f} s"
        )


class ReceivedSession(Struct, frozen=True, kw_only=True):
    """The tensors of one session of an update; the last session brings the weights' name."""

    selector: Selector
    tensors: tuple[TensorSpec, ...]
    final_name: str | None

    def buckets(self) -> Iterator[tuple[tuple[TensorSpec, ...], BucketPlace]]:
        """Each bucket and its place; the policy's last one flushes the K/V of both."""
        plan = buckets(self.tensors)
        for index, bucket in enumerate(plan):
            is_last = index == len(plan) - 1
            yield (
                bucket,
                BucketPlace(
                    selector=self.selector,
                    flushes=is_last and self.selector == "target",
                    final_name=self.final_name if is_last else None,
                ),
            )
