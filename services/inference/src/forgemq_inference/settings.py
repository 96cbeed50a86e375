"""Settings of one inference process, from `FORGEMQ_INFERENCE_*`."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import Lane

Positive = Annotated[float, Meta(gt=0)]


class InferenceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One lane and the engine beside it."""

    lane: Lane
    engine_url: Annotated[str, Meta(pattern=r"^https?://", description="Of the SGLang server.")]
    concurrent_max: Annotated[
        int, Meta(ge=1, description="Requests in the engine at once; it batches by itself.")
    ] = 512
    queued_max: Annotated[
        int, Meta(ge=1, description="Requests read ahead; above it reading pauses.")
    ] = 2048
    remembered_bytes_max: Annotated[
        int, Meta(ge=0, description="Token ids kept of finished completions, for delta requests.")
    ] = 512 * 2**20
    heartbeat_s: Annotated[float, Meta(gt=0, le=2.5, description="Half the lapse of 5 s.")] = 1.0
    health_timeout_s: Positive = 5.0
    health_failures_max: Annotated[
        int, Meta(ge=1, description="In a row; the engine is lost then.")
    ] = 3
    engine_start_timeout_s: Annotated[
        float, Meta(gt=0, description="Wait this long for the engine, at the start and when lost.")
    ] = 900.0
    durable_timeout_s: Annotated[
        float, Meta(gt=0, description="One load of the durable copy by the engine.")
    ] = 600.0
    load_attempts_max: Annotated[
        int, Meta(ge=1, description="Of the durable copy, in a row; then the process ends.")
    ] = 5
    drain_s: Annotated[
        float, Meta(ge=0, description="After a signal, running requests get this long.")
    ] = 5.0
    cache: Annotated[
        str, Meta(description="Folder for downloaded weights; '': a temporary one.")
    ] = ""
