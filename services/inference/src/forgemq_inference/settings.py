"""Settings of one inference process, from `FORGEMQ_INFERENCE_*`."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import Lane


class InferenceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane and the engine beside it."""

    lane: Lane
    engine_url: Annotated[
        str, Meta(pattern=r"^https?://", description="Address of the SGLang server.")
    ]
    prefill_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://.+)?$",
            description="Address of the SGLang server that reads contexts for the other one, as "
            "that one reaches it; '': the engine reads them itself.",
        ),
    ] = ""
    concurrent_max: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests in the engine at once; it has a smaller limit.",
        ),
    ] = 512
    queued_max: Annotated[
        int, Meta(ge=1, description="Requests read ahead; above it reading pauses.")
    ] = 2048
    remembered_bytes_max: Annotated[
        int, Meta(ge=0, description="Token ids kept of finished completions, for delta requests.")
    ] = 512 * 2**20
    heartbeat_s: Annotated[
        float, Meta(gt=0, le=2.5, description="At most half of the 5 s after which a lane lapses.")
    ] = 1.0
    health_timeout_s: Annotated[
        float, Meta(gt=0, description="One health check; the engine answers even while paused.")
    ] = 5.0
    health_failures_max: Annotated[
        int, Meta(ge=1, description="Failed health checks in a row, then the engine is lost.")
    ] = 3
    engine_start_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Wait this long for an engine; loading takes minutes."),
    ] = 900.0
    durable_timeout_s: Annotated[
        float, Meta(gt=0, description="One load of the durable copy by the engine.")
    ] = 600.0
    load_attempts_max: Annotated[
        int,
        Meta(ge=1, description="Failed durable loads in a row, then the process ends."),
    ] = 5
    drain_s: Annotated[
        float,
        Meta(ge=0, description="After a signal, running requests get this long to end."),
    ] = 5.0
    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address of this process for relayed weights, from the trainer or from "
            "another lane's process.",
        ),
    ] = "127.0.0.1"
    cache: Annotated[
        str,
        Meta(
            description="Folder for downloaded and relayed weights, which the engine reads; in "
            "memory if it is a tmpfs. Lanes of one machine may share it; it holds at most two "
            "versions of each kind for each lane. '': a temporary one."
        ),
    ] = ""
