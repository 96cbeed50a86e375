"""Settings of the auditor, read from `FORGEMQ_AUDITOR_*`."""

from typing import Annotated

from msgspec import Meta, Struct


class AuditorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often it looks; what may be deleted is decided by the records alone."""

    audit_every_s: Annotated[
        float, Meta(gt=0, description="Between two looks for retired groups to audit.")
    ] = 30.0
    watch_every_s: Annotated[
        float,
        Meta(gt=0, description="Between two looks at the run for its metrics, if any go out."),
    ] = 10.0
    trim_every_s: Annotated[
        float, Meta(gt=0, description="Between two looks for records that nobody needs any more.")
    ] = 30.0
    sweep_every_s: Annotated[
        float, Meta(gt=0, description="Between two looks for blobs that no record points at.")
    ] = 600.0
    sweep_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="A blob stays this long after it was written, and after its last record "
            "was trimmed. Must be longer than any write or read, and than the 600 s after which a "
            "writer gives an unnamed blob up, and than clocks differ.",
        ),
    ] = 3600.0
