"""Settings of the merger process."""

from typing import Annotated

from msgspec import Meta, Struct


class MergerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_MERGER_*`."""

    tick_s: Annotated[
        float, Meta(gt=0, le=30, description="How often the core learns the time, in seconds.")
    ] = 5.0
