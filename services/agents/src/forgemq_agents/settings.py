"""Settings of the agents process; the run's configuration says what to play."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

GatewayUrl: TypeAlias = Annotated[str, Meta(pattern=r"^https?://")]
AdminKey: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        description="Of the gateway, without a file; of several lines the first is the key.",
    ),
]
AdminKeyPath: TypeAlias = Annotated[
    str,
    Meta(description="File whose first line is the key; read again when it changes. '': none."),
]


class AgentsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parsed from `FORGEMQ_AGENTS_*`."""

    configuration: Annotated[
        str, Meta(min_length=1, description="File with the resolved run configuration, JSON.")
    ]
    gateway_url: GatewayUrl
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyPath = ""
    poll_s: Annotated[float, Meta(gt=0, description="How often the run's progress is read.")] = 2.0
    retry_deadline_s: Annotated[
        float, Meta(gt=0, description="A gateway outage this long ends the process.")
    ] = 300.0
    samples: Annotated[
        int,
        Meta(
            ge=0,
            description="Above 0: play so many episodes of each held-out task, and nothing else.",
        ),
    ] = 0


class ImportSettings(Struct, frozen=True, kw_only=True):
    """Parsed from those of `FORGEMQ_AGENTS_*` that an import needs."""

    gateway_url: GatewayUrl
    admin_key: AdminKey = ""
    admin_key_file: AdminKeyPath = ""
    retry_deadline_s: Annotated[
        float, Meta(gt=0, description="A gateway outage this long ends the import.")
    ] = 300.0
