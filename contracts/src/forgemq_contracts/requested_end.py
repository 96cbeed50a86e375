"""A request to end a run before it is played."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import TimeMs
from forgemq_contracts.run import RunId


class RequestedEnd(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody asked a run that is up to end before it is played."""

    run: RunId
    started_ms: Annotated[
        TimeMs,
        Meta(description="Of the start that is to end, as its StartedRun says; a later one stays."),
    ]
    requested_ms: TimeMs
    detail: Annotated[str, Meta(description="Why, in the asker's words.")] = ""
