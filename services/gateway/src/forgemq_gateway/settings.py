"""Settings of the gateway, from `FORGEMQ_GATEWAY_*`."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_gateway.core.requests import DEFAULT_MODEL, MESSAGES_MAX
from forgemq_settings.tls import CertificateFile, PrivateKeyFile


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address, admin key and limits of one gateway."""

    admin_key: Annotated[
        str,
        Meta(
            min_length=16,
            description="For the admin API; episode keys are derived from it. '': only those of "
            "the file.",
        ),
    ] = ""
    admin_key_file: Annotated[
        str,
        Meta(
            description="File with an admin key on each line, the newest first; read again when "
            "it changes. '': none."
        ),
    ] = ""
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
    tls_certificate_file: CertificateFile = ""
    tls_key_file: PrivateKeyFile = ""
    public_url: Annotated[
        str, Meta(description="Base URL that agents are given; '' for http://host:port, or https.")
    ] = ""
    peer_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="Another port, for the run's other gateways: of those that share a socket "
            "each needs one of its own. 0: a free one; -1: none, they use `port`.",
        ),
    ] = -1
    peer_url: Annotated[
        str,
        Meta(
            description="Where the run's other gateways reach this one and no other; '' for "
            "http://host:port, or https, with `peer_port` if there is one."
        ),
    ] = ""
    body_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Longest body of a request; 0: 32 bytes for each token of the context, "
            "at least 4 MiB.",
        ),
    ] = 0
    requests_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests of agents served at once; 0: 4 for each episode that the queues "
            "admit, at least 1,024. Others wait, then 429.",
        ),
    ] = 0
    requests_waiting_max: Annotated[
        int, Meta(ge=0, description="Requests that wait for that; 0: as many as are served.")
    ] = 0
    key_requests_max: Annotated[
        int, Meta(ge=1, description="Requests of one key, served or waiting; beyond it 429.")
    ] = 64
    key_requests_per_s_max: Annotated[
        float, Meta(gt=0, description="Of one key; it may be ahead by a second's. Beyond it 429.")
    ] = 100.0
    memory_bytes_max: Annotated[
        int,
        Meta(ge=1, description="Histories of open groups; above it 429 and 503."),
    ] = 4_000_000_000
    keepalive_s: Annotated[
        float, Meta(gt=0, le=3, description="Seconds between keep-alives while a stream waits.")
    ] = 2.5
    models: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="Names that `GET /v1/models` lists; any name is taken."),
    ] = (DEFAULT_MODEL,)
    choices_max: Annotated[
        int,
        Meta(ge=1, description="Most completions that one request may ask for (n, list prompts)."),
    ] = 16
    path_messages_max: Annotated[
        int,
        Meta(
            ge=1,
            le=MESSAGES_MAX,
            description="Messages and results in one request, earlier ones that it refers to "
            "too; more: 400.",
        ),
    ] = MESSAGES_MAX
    # Of clients that were tried none begins more than one a turn. A path of the same episode is
    # looked for among those that begin in the same place, so the cost of a fork grows with them.
    episode_paths_max: Annotated[
        int,
        Meta(ge=1, description="Paths of messages of one episode; beyond it 400 for another one."),
    ] = 4096
    lane_hold_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds a request is held in all for its group, its place and a lane: "
            "then 429.",
        ),
    ] = 3.0
    drain_s: Annotated[
        float, Meta(ge=0, description="A finishing episode waits this long for open requests.")
    ] = 5.0
    restore_hold_s: Annotated[
        float, Meta(ge=0, description="Requests wait this long for a restart, then 503.")
    ] = 30.0
    mark_every_s: Annotated[
        float,
        Meta(gt=0, description="Seconds between two commits of where a restart begins."),
    ] = 10.0
    long_poll_s_max: Annotated[float, Meta(gt=0, le=300)] = 60.0


# A token is about 4 bytes of text, and 12 of a script that the client writes as \uXXXX.
_BODY_BYTES_A_TOKEN = 32

# Reads in a few milliseconds; tools and fields beside the messages need room, however short the
# context.
_BODY_BYTES_LEAST = 4 * 1024 * 1024


def body_bytes_max(settings: GatewaySettings, *, context_tokens_max: int) -> int:
    """The longest body that is read: beyond it no context could hold the messages."""
    least = max(_BODY_BYTES_LEAST, _BODY_BYTES_A_TOKEN * context_tokens_max)
    return settings.body_bytes_max or least
