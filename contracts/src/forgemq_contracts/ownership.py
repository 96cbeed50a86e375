"""Which gateway owns which groups of a run, and what a new owner must know of groups long over."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.fields import Offset, TimeMs

OwnerEpoch: TypeAlias = Annotated[
    int, Meta(ge=1, description="Counts the changes of a run's owners; the highest one is true.")
]

GatewayId: TypeAlias = Annotated[
    str, Meta(description="Names one process: another one at the same address has another id.")
]


class PartitionOwner(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway, and the group partitions it owns."""

    gateway: GatewayId
    url: Annotated[str, Meta(description="Where other gateways reach it.")]
    partitions: tuple[Annotated[int, Meta(ge=0)], ...]
    unfenced: Annotated[
        tuple[GatewayId, ...],
        Meta(
            description="Earlier owners of any of them, whose writers may not be fenced yet: who "
            "serves a partition fences all of these before it reads."
        ),
    ] = ()


class OwnedRun(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who owns each group partition of a run; each record names all owners.

    A gateway that takes partitions over writes it, and the owner of partition 0 when it has more
    keys to remember. The groups of a partition belong to the gateway that the newest record names.
    """

    run: str
    owner: OwnerEpoch
    owned_ms: TimeMs
    url: Annotated[str, Meta(description="Where the writer of this record answers.")] = ""
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
    owners: Annotated[
        tuple[PartitionOwner, ...],
        Meta(description="No partition is named twice; one that is not named has no owner."),
    ] = ()


class ReportedGateway(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A gateway is there; it writes this every second."""

    run: str
    gateway: GatewayId
    url: Annotated[str, Meta(description="Where other gateways reach it.")]
    started_ms: Annotated[
        TimeMs, Meta(description="Of gateways at one address, the one that started last counts.")
    ]
    reported_ms: TimeMs
    owner: Annotated[
        int, Meta(ge=0, description="Newest change of owners that it has read; 0: none.")
    ] = 0
    is_leaving: Annotated[
        bool, Meta(description="It is about to end: others take its partitions over.")
    ] = False
