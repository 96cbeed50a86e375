"""Which gateway owns a run, and what a gateway that takes over must know of groups long over."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import Offset, TimeMs

OwnerEpoch: TypeAlias = Annotated[
    int, Meta(ge=1, description="Counts the gateways of a run; the highest one owns it.")
]


class OwnedRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway owns the run; it writes this when it takes over and beside its commits.

    A gateway that reads a higher owner than itself ends.
    """

    run: str
    owner: OwnerEpoch
    owned_ms: TimeMs
    url: Annotated[str, Meta(description="Where the owner answers, for people.")] = ""
    asked_keys: Annotated[
        bytes,
        Meta(description="Idempotency keys of all requested groups (`asked_keys.AskedKeys`)."),
    ] = b""
    asked_before: Annotated[
        tuple[Offset, ...],
        Meta(
            description="For each partition of requested-groups: the keys of all records below "
            "this offset are among `asked_keys`."
        ),
    ] = ()
