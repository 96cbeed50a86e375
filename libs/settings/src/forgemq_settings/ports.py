"""Free TCP ports of this machine for servers that listen later, or again after a restart.

Linux gives the ports of its ephemeral range, by default 32768 to 60999, to outgoing connections and
to listeners that ask for any port. A server that listens a minute after its port was chosen, or
that starts again, could find its port taken if it were of that range. So these ports lie below it.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST = 10_000  # Below are the ports of well-known servers.
_LAST = 21_999  # SGLang takes ports between 22000 and 29999 for its own processes.
_TRIES = 64  # Each finds a free port unless thousands are taken.
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # Processes of one seed would try the same ports.


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody has at this moment.

    Raises:
        OSError: the address is not of this machine, or no port is free.
    """
    with held_port(host) as holder:
        return int(holder.getsockname()[1])


def held_port(host: str) -> socket.socket:
    """A socket that holds a free port for a process that listens there later; close it to free it.

    It does not listen, so a process that sets SO_REUSEADDR, as every server of asyncio does, may
    listen at the port meanwhile, and nobody else is given it as a free one.

    Raises:
        OSError: the address is not of this machine, or no port is free.
    """
    holder = socket.socket()
    try:
        _bind(holder, host)
    except OSError:
        holder.close()
        raise
    # Set once it is bound: before, it could be given a port that another socket holds.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _bind(holder: socket.socket, host: str) -> None:
    last = min(_LAST, _ephemeral_first() - 1)
    if last - _FIRST >= _TRIES:
        for number in _random.sample(range(_FIRST, last + 1), _TRIES):
            with suppress(OSError):
                return holder.bind((host, number))
    return holder.bind((host, 0))


def _ephemeral_first() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's default.
