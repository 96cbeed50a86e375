"""Of the time of a decoding step of one request, the share that each further request adds.

A step of b requests takes s (1 + x (b - 1)) seconds. What slows the whole engine from outside,
other work on the machine or contexts that grow, changes s from one second to the next. A line over
seconds would take such a change for the cost of a batch that happens to be larger then. So x is
found from the batches within each second, whose s is nearly the same, and added up over the
engine's life.

Of the steps between two heartbeats with means b and t, let B be the sum of squared differences from
b and R the sum of the products with those from t, over t. Then R = x (B - (b - 1) R) for any s.
"""

import math

from msgspec import Struct

_FORGOTTEN = 1 / 1800
"""Of all that was seen, by each heartbeat with batches of several sizes: half in twenty minutes of
such ones, since contexts grow during a run. Minutes are needed if s changes within seconds."""

_ERROR_MAX = 0.05
"""Standard error of what x makes of the step of the present batch, over that step."""

_HEARTBEATS_MIN = 10
"""Fewer of them say less than the first sums."""


class DecodeSums(Struct, frozen=True):
    """Sums over decoding steps: their number, requests b, microseconds t, b * b, b * t."""

    steps: float = 0.0
    requests: float = 0.0
    time_us: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def since(self, before: "DecodeSums") -> "DecodeSums":
        """Those of the steps after `before`."""
        return DecodeSums(
            self.steps - before.steps,
            self.requests - before.requests,
            self.time_us - before.time_us,
            self.squares - before.squares,
            self.products - before.products,
        )


class AddedShare:
    """x of one engine, from 0 (a batch costs nothing) to 1 (a step is as long as its batch).

    The first sums may be of the engine's life until then, through all that slowed it: they give a
    value to begin with, and are left out after that. While the error is large, the last value with
    a small one is kept; if there was none, the newest is taken.

    Example: steps of 12 ms with one request and of 18 ms with four. Each further request adds 2 ms:
    x = 2 / 12.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._is_begun = False
        self._products = 0.0  # sum of R
        self._spread = 0.0  # sum of B - (b - 1) R
        self._errors = 0.0  # sum of (R - x (B - (b - 1) R)) squared
        self._heartbeats = 0
        self._is_certain = False

    def note(self, sums: DecodeSums) -> None:
        """Take the sums of the steps since the last heartbeat."""
        if sums.steps < 1 or sums.time_us <= 0:
            return
        others = sums.requests / sums.steps - 1
        mean_us = sums.time_us / sums.steps
        spread = sums.squares - sums.requests**2 / sums.steps
        product = (sums.products - sums.requests * mean_us) / mean_us
        if spread <= 1e-9 * sums.squares:
            return  # Batches of one size.
        unslowed = spread - others * product
        if not self._is_begun:
            self._is_begun = True
            self.value = _share(product, unslowed)
            return
        kept = 1 - _FORGOTTEN
        self._products = self._products * kept + product
        self._spread = self._spread * kept + unslowed
        value = _share(self._products, self._spread)
        self._errors = self._errors * kept**2 + (product - value * unslowed) ** 2
        self._heartbeats += 1
        if self._heartbeats < _HEARTBEATS_MIN:
            return
        is_certain = self._error(value, others) <= _ERROR_MAX
        if is_certain or not self._is_certain:
            self.value = value
        self._is_certain = self._is_certain or is_certain

    def _error(self, value: float, others: float) -> float:
        if self._spread <= 0:
            return math.inf
        return math.sqrt(self._errors) / self._spread * others / (1 + value * others)


def _share(product: float, spread: float) -> float:
    if spread <= 0:
        return 1.0 if product > 0 else 0.0
    return min(1.0, max(0.0, product / spread))
