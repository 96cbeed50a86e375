"""Settings of the console, read from `FORGEMQ_CONSOLE_*`."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_settings.tls import CertificateFile, PrivateKeyFile


class ConsoleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the page is served, and how much of a group at once."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free port.")] = 8080
    listener_fd: Annotated[
        int,
        Meta(
            ge=-1,
            description="Number of an inherited file: a TCP socket that a supervisor bound and "
            "keeps, in place of host and port; -1: none.",
        ),
    ] = -1
    key: Annotated[
        str,
        Meta(
            min_length=16,
            description="For reading the page: password of any user, or bearer token. '': "
            "only those of the file; without both the page is open, on loopback alone.",
        ),
    ] = ""
    key_file: Annotated[
        str,
        Meta(
            description="File with a key on each line, all valid; read again when it changes. "
            "'': none."
        ),
    ] = ""
    tls_certificate_file: CertificateFile = ""
    tls_key_file: PrivateKeyFile = ""
    episodes_shown_max: Annotated[
        int, Meta(ge=1, description="Episodes of one group sent to the page at once.")
    ] = 64
