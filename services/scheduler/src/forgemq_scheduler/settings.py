"""Settings of the scheduler process; what it decides is the run's configuration."""

from typing import Annotated

from msgspec import Meta, Struct


class SchedulerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_SCHEDULER_*`."""

    tick_s: Annotated[
        float,
        Meta(gt=0, le=5, description="How often time enters the core: deadlines, silent lanes."),
    ] = 1.0
