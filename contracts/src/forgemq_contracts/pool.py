"""The K/V pool that a run's engines share: what one has computed, another need not."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """SGLang's hierarchical cache with a storage that all engines of the run reach.

    K/V is filed under the run and the version of the weights that computed it, and found under no
    other.
    """

    storage: Annotated[
        Literal["file", "mooncake", "hf3fs"],
        Meta(description="SGLang's storage backend; engines on a CPU have `file` only."),
    ]
    folder: Annotated[
        str,
        Meta(
            description="Of storage `file`, seen by all engines; '': one in the folder of the run."
        ),
    ] = ""
    folder_gb_max: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="Of storage `file`: above it, what was not used for longest is "
                "deleted. None: no limit.",
            ),
        ]
        | None
    ) = None
    extra_config: Annotated[
        str,
        Meta(
            description="Of the other storages: SGLang's "
            "`--hicache-storage-backend-extra-config`, a JSON object, or `@` and the path of a "
            "file that each engine can read."
        ),
    ] = ""
    page_tokens: Annotated[
        int, Meta(ge=1, le=1024, description="Tokens that are stored and found together.")
    ] = 16
    host_gb: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Host memory for each GPU of an engine between its own cache and the "
                "pool, or of an engine on a CPU; None: at most twice its own cache.",
            ),
        ]
        | None
    ) = None
    fetch_tokens_per_s: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="Rate at which an engine fetches one context, as measured on the "
                "machines of the run, for the gateway's choice of an engine. None: it counts on "
                "nothing that another engine has computed.",
            ),
        ]
        | None
    ) = None
    prefetch: Annotated[
        Literal["best_effort", "wait_complete", "timeout"],
        Meta(
            description="How long a request waits for what the pool has of its context: not at "
            "all, until all of it is there, or for a time that grows with it."
        ),
    ] = "timeout"
