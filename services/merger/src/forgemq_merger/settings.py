"""Settings of the merger process; what it decides is the run's configuration."""

from typing import Annotated

from msgspec import Meta, Struct


class MergerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_MERGER_*`."""

    tick_s: Annotated[
        float, Meta(gt=0, le=30, description="How often time enters the core, in seconds.")
    ] = 5.0
