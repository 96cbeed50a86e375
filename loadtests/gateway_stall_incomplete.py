"""Many requests that never become complete, from one process.

`python gateway_stall_incomplete.py CASE URL KEY SECONDS` makes all connections at once, sends the
beginning of a request on each, and then one byte a second. It prints how each ended, as JSON.
"""

import asyncio
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

_BYTE_EVERY_S = 1.0


class Incomplete(Struct, frozen=True, kw_only=True):
    """One case.

    Attributes:
        connections: All open at once.
        header_bytes: Filler in a header that does not end.
        body_bytes: What is sent of the body at once; without a body the headers do not end.
        window_s: The gateway's deadline for headers (20 s) or bodies (60 s), and time to spare.
    """

    connections: int
    header_bytes: int = 0
    body_bytes: int = 0
    window_s: float


class Ended(Struct, frozen=True):
    """How a request ended: the status of its answer, and how long after its first bytes.

    Status 0 is a connection that failed, or was still open when the time was over.
    """

    status: int
    after_s: float


INCOMPLETE = {
    "3,000 half-sent headers": Incomplete(connections=3000, header_bytes=20_000, window_s=30.0),
    "200 slow bodies": Incomplete(connections=200, body_bytes=1_000_000, window_s=70.0),
}


def beginning(case: Incomplete, *, path: str, key: str) -> bytes:
    """The bytes of a request that are sent at once."""
    head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    if not case.body_bytes:
        return head.encode() + b"x-filler: " + b"x" * case.header_bytes
    length = 2 * case.body_bytes
    return f"{head}content-length: {length}\r\n\r\n".encode() + b"x" * case.body_bytes


async def attack(case: Incomplete, *, url: str, key: str, seconds: float) -> list[Ended]:
    """How each request ended, when all have, or the time is over."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    sent = beginning(case, path=parts.path, key=key)
    end_s = time.monotonic() + seconds
    requests = (_request(address, sent, end_s=end_s) for _ in range(case.connections))
    return list(await asyncio.gather(*requests))


async def _request(address: tuple[str, int], sent: bytes, *, end_s: float) -> Ended:
    began_s, answer = time.monotonic(), b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(end_s - time.monotonic()):
            reader, writer = await asyncio.open_connection(*address)
            began_s = time.monotonic()
            writer.write(sent)
            dripping = asyncio.create_task(_drip(writer))
            try:
                answer = await reader.readline()
            finally:
                dripping.cancel()
                writer.close()
    status = answer.split(b" ", 2)[1] if answer.startswith(b"HTTP/1.1 ") else b"0"
    return Ended(status=int(status), after_s=time.monotonic() - began_s)


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(_BYTE_EVERY_S)
        writer.write(b"x")


def main() -> None:
    """Attack once."""
    case, url, key, seconds = sys.argv[1:]
    ended = asyncio.run(attack(INCOMPLETE[case], url=url, key=key, seconds=float(seconds)))
    sys.stdout.write(msgspec.json.encode(ended).decode())


if __name__ == "__main__":
    main()
