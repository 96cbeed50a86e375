"""Limits of the transform loop; read from `FORGEMQ_TRANSFORM_*`."""

from typing import Annotated

from msgspec import Meta, Struct


class TransformSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for every transform service; none of them changes what is written, only when."""

    batch_linger_s: Annotated[
        float, Meta(ge=0, le=1, description="Collect this long after the first record.")
    ] = 0.05
    batch_records_max: Annotated[int, Meta(ge=1, description="Held by one task at once.")] = 2000
    batch_bytes_max: Annotated[
        int, Meta(ge=1, description="No more is read once a batch holds this much.")
    ] = 64_000_000
    read_records_max: Annotated[int, Meta(ge=1, description="One read of the log.")] = 200
    ticks_pending_max: Annotated[
        int, Meta(ge=1, description="Idle ticks kept back; above it they are journalled.")
    ] = 120
    snapshot_every_batches: Annotated[int, Meta(ge=1)] = 2000
    snapshot_every_s: Annotated[float, Meta(gt=0)] = 60.0
    bad_consecutive_max: Annotated[
        int, Meta(ge=0, description="Bad records in a row of one partition; above it: die.")
    ] = 20
    bad_fraction_max: Annotated[
        float, Meta(ge=0, le=1, description="Of a partition's last records; above it: die.")
    ] = 0.1
    bad_fraction_over_records: Annotated[
        int, Meta(ge=1, description="The share is judged once this many were read.")
    ] = 200
    refence_after_s: Annotated[
        float, Meta(gt=0, description="A fenced task that is still assigned starts again.")
    ] = 2.0
