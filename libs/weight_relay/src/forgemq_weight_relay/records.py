"""What two neighbours of a relay say to each other, and how it travels.

One TCP connection carries one version: the sender's `Greeting`, the receiver's `RelayAnswer`, then
the bytes of all files one after another, then a second `RelayAnswer` that confirms their checksums.
Each message is its length in four bytes, big-endian, and msgpack.
"""

import re
import socket
import struct
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from forgemq_contracts.fields import Lane, Lineage, Sha256, Version

MESSAGE_BYTES_MAX = 1 << 20
"""Of a greeting or an answer: ten thousand lanes and a folder's files fit."""

_LENGTH = struct.Struct(">I")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
"""A folder and a file in it: no name leads out of the folder that a receiver writes to."""


class RelayError(Exception):
    """A neighbour is gone, too slow, refuses, or sent other bytes than it announced."""


class WeightsKey(NamedTuple):
    """Which weights; compares by lineage, then by version."""

    lineage: int
    version: int


class RelayedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, named `<folder>/<file>`."""

    name: str
    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Sha256


class Hop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lane of the route and where its process listens, `host:port`."""

    lane: Lane
    address: str


class Greeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What comes, and to whom the receiver passes it on."""

    run: str
    lineage: Lineage
    version: Version
    files: Annotated[tuple[RelayedFile, ...], Meta(max_length=4096)]
    route: tuple[Hop, ...] = ()
    seconds_left: Annotated[float, Meta(gt=0, description="Until nobody waits for it.")]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def wrong_name(self) -> str:
        """The first file whose name is not `<folder>/<file>`, or another one's; "" without one.

        Of two with one name the later one's bytes would lie under the earlier one's checksum.
        """
        names: set[str] = set()
        for file in self.files:
            if not _NAME.fullmatch(file.name) or file.name in names:
                return file.name
            names.add(file.name)
        return ""


class RelayAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`send`: the bytes may come. `have`: all are here and checked. `refuse`: none is wanted."""

    verdict: Literal["send", "have", "refuse"]
    reason: str = ""


Message = TypeVar("Message", Greeting, RelayAnswer)


def write_message(link: socket.socket, message: Greeting | RelayAnswer) -> None:
    """Send one message.

    Raises:
        OSError: the neighbour is gone, or takes no bytes within the socket's timeout.
    """
    data = msgspec.msgpack.encode(message)
    link.sendall(_LENGTH.pack(len(data)) + data)


def read_message(link: socket.socket, kind: type[Message]) -> Message:
    """Receive one message.

    Raises:
        OSError: the neighbour is gone, or silent for longer than the socket's timeout.
        RelayError: it is not a message of this kind.
    """
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise RelayError(f"a message of {length} bytes, at most {MESSAGE_BYTES_MAX}")
    try:
        return msgspec.msgpack.decode(_exactly(link, length), type=kind)
    except msgspec.MsgspecError as error:
        raise RelayError(f"not a {kind.__name__}: {error}") from error


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            raise RelayError("the neighbour closed the connection")
        data += part
    return bytes(data)
