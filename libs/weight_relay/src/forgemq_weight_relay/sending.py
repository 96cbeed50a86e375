"""Sends a copy to the first process of a route that takes it; that one passes it on to the next.

A process that is gone, refuses or is slow is left out, and the next of the route gets everything
from the first byte. So a sender's bytes do not grow with the route's length, only with its faults.
"""

import socket
import threading
import time

import msgspec
from msgspec import Struct

from forgemq_weight_relay.records import (
    Greeting,
    Hop,
    RelayAnswer,
    RelayError,
    read_message,
    write_message,
)
from forgemq_weight_relay.staged_copy import StagedCopy

STALL_S = 5.0
"""How long a neighbour may take no byte, or give none: as long as a lane may be silent before it
lapses."""

SENT_AT_ONCE = 4 << 20
"""Between two looks at the deadline; 20 ms at 200 MB/s."""


class Relayed(Struct, frozen=True, kw_only=True):
    """What became of sending along a route.

    Attributes:
        lane: That took the copy and passes it on; None if none did.
        sent_bytes: Of files, to this lane and to those that were left out on the way.
        left_out: Lane -> why it was left out, of the lanes before `lane`.
    """

    lane: int | None
    sent_bytes: int
    left_out: dict[int, str]


class _Sending:
    """Sends one copy along one route."""

    def __init__(
        self, copy: StagedCopy, greeting: Greeting, *, end_s: float, stop: threading.Event
    ) -> None:
        self._copy = copy
        self._greeting = greeting
        self._end_s = end_s
        self._stop = stop
        self.sent_bytes = 0

    def along(self, route: tuple[Hop, ...]) -> Relayed:
        left_out: dict[int, str] = {}
        for number, hop in enumerate(route):
            try:
                self._send(hop, route[number + 1 :])
            except (OSError, RelayError, ValueError) as error:
                left_out[hop.lane] = f"{hop.address}: {str(error) or type(error).__name__}"
                if self._copy.broken:
                    break  # Nobody can get from here what is not here.
            else:
                return Relayed(lane=hop.lane, sent_bytes=self.sent_bytes, left_out=left_out)
        return Relayed(lane=None, sent_bytes=self.sent_bytes, left_out=left_out)

    def _send(self, hop: Hop, rest: tuple[Hop, ...]) -> None:
        host, _, port = hop.address.rpartition(":")
        left_s = self._left_s()
        with socket.create_connection((host, int(port)), timeout=min(STALL_S, left_s)) as link:
            link.settimeout(STALL_S)
            greeting = msgspec.structs.replace(self._greeting, route=rest, seconds_left=left_s)
            write_message(link, greeting)
            if _verdict(link) == "have":
                return
            self._send_files(link)
            if _verdict(link) != "have":
                raise RelayError("it did not confirm the bytes")

    def _send_files(self, link: socket.socket) -> None:
        before_bytes = 0
        for each in self._copy.files:
            if not each.size_bytes:
                continue
            # A copy that arrives makes a file with its first byte.
            self._copy.wait_beyond(before_bytes, timeout_s=STALL_S)
            with self._copy.paths[each.name].open("rb") as file:
                position = 0
                while position < each.size_bytes:
                    self._left_s()
                    there = self._copy.wait_beyond(before_bytes + position, timeout_s=STALL_S)
                    end = min(there - before_bytes, each.size_bytes, position + SENT_AT_ONCE)
                    sent = link.sendfile(file, position, end - position)
                    if sent < end - position:
                        raise RelayError(f"{each.name} ends after {position + sent} bytes")
                    position = end
                    self.sent_bytes += sent
            before_bytes += each.size_bytes

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise RelayError(f"the deadline passed after {self.sent_bytes} sent bytes")
        if self._stop.is_set():
            raise RelayError("the sender stops")
        return left_s


def send_along(
    copy: StagedCopy,
    greeting: Greeting,
    *,
    stop: threading.Event,
) -> Relayed:
    """Send a copy to the first process of the greeting's route that takes it. Blocks.

    Args:
        copy: Whole, or still arriving.
        greeting: Its route and its seconds are those of this call.
        stop: Ends the sending between two parts.

    Returns:
        Which lane took it. No error is raised: a lane that got nothing has its durable copy.
    """
    sending = _Sending(copy, greeting, end_s=time.monotonic() + greeting.seconds_left, stop=stop)
    return sending.along(greeting.route)


def _verdict(link: socket.socket) -> str:
    answer = read_message(link, RelayAnswer)
    if answer.verdict == "refuse":
        raise RelayError(f"refused: {answer.reason}")
    return answer.verdict
