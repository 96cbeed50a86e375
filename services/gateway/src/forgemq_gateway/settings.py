"""Settings of the gateway, from `FORGEMQ_GATEWAY_*`."""

from typing import Annotated

from msgspec import Meta, Struct


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address, admin key and limits of one gateway."""

    admin_key: Annotated[
        str,
        Meta(min_length=16, description="For the admin API; episode keys are derived from it."),
    ]
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 takes a free port.")] = 8080
    listener_fd: Annotated[
        int,
        Meta(
            ge=-1,
            description="Number of an inherited file: a TCP socket that a supervisor bound and "
            "keeps, in place of host and port; -1: none.",
        ),
    ] = -1
    public_url: Annotated[
        str, Meta(description="Base URL that agents are given; '' for http://host:port.")
    ] = ""
    body_bytes_max: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    memory_bytes_max: Annotated[
        int,
        Meta(ge=1, description="Histories of open groups; above it 429 and 503."),
    ] = 4_000_000_000
    keepalive_s: Annotated[
        float, Meta(gt=0, le=3, description="Seconds between keep-alives while a stream waits.")
    ] = 2.5
    lane_hold_s: Annotated[
        float, Meta(ge=0, description="Seconds a new turn waits for a lane.")
    ] = 3.0
    drain_s: Annotated[
        float, Meta(ge=0, description="A finishing episode waits so long for open requests.")
    ] = 5.0
    restore_hold_s: Annotated[
        float, Meta(ge=0, description="Requests wait so long for a restart, then 503.")
    ] = 30.0
    mark_every_s: Annotated[
        float,
        Meta(gt=0, description="Seconds between two commits of a restart's start."),
    ] = 10.0
    long_poll_s_max: Annotated[float, Meta(gt=0, le=300)] = 60.0
