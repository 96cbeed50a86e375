"""When a service that died is started again, and when the run is given up."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """At most `restarts_max` restarts within any `span_s`; the pause doubles each time."""

    restarts_max: Annotated[int, Meta(ge=0)] = 6
    span_s: Annotated[float, Meta(gt=0)] = 300.0
    delay_first_s: Annotated[
        float, Meta(ge=0, description="A single crash costs little more than the start itself.")
    ] = 0.5
    delay_max_s: Annotated[
        float,
        Meta(ge=0, description="All waits of 6 restarts, 30 s, fit into one span_s many times."),
    ] = 15.0

    def delay_s(self, exits_s: Sequence[float]) -> float | None:
        """Pause before the next start, or None to give up.

        Args:
            exits_s: Times of all its unexpected exits in order, at least one; the newest is now.
        """
        recent = [at for at in exits_s if at > exits_s[-1] - self.span_s]
        if len(recent) > self.restarts_max:
            return None
        return float(min(self.delay_max_s, self.delay_first_s * 2 ** (len(recent) - 1)))
