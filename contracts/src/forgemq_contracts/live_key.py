"""Keys of live traffic: requests that no agent claimed an episode for."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import DomainName


class LiveKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An API key whose callers claim no episode: each of their conversations becomes one.

    The episodes are in groups of one, take no slot and never train.
    """

    name: Annotated[
        str, Meta(pattern=r"^[a-z0-9_]{1,40}$", description="Of the key, on records and reports.")
    ]
    domain: Annotated[DomainName, Meta(description="Of one of the queues.")]
    key_sha256: Annotated[
        str,
        Meta(pattern=r"^[0-9a-f]{64}$", description="Of the key, which is on no record itself."),
    ]
    idle_s: Annotated[
        float, Meta(gt=0, description="An episode ends if no request goes on with it this long.")
    ] = 300.0
    episodes_max: Annotated[
        int, Meta(ge=1, le=4096, description="Open at once; a new conversation beyond it: 429.")
    ] = 256
