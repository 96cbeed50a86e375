"""How many requests of agents are sent on to other gateways at once.

Each holds two sockets and a piece of its body, for a client whose key only the owner can look up.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_gateway.core.errors import busy

_UNPROVEN_SHARE = 8
"""Keys that derive from no valid admin key are made up, or their admin key was replaced while they
play: one request in so many."""


class Forwards:
    """Counts what is sent on now; requests with an admin key are as little counted as elsewhere.

    Args:
        requests_max: As many requests as agents may have at the owner.
    """

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._unproven_max = max(1, requests_max // _UNPROVEN_SHARE)
        self._proven = 0
        self._unproven = 0

    @contextmanager
    def place(self, *, is_proven: bool) -> Iterator[None]:
        """Within it the request is counted.

        Args:
            is_proven: Whether its key derives from a valid admin key. The others have places of
                their own, so that who makes keys up takes none away from agents.

        Raises:
            RefusedError: 429, so many are sent on already.
        """
        if is_proven:
            _check_room(self._proven, self._requests_max)
        else:
            _check_room(self._unproven, self._unproven_max)
        self._proven += is_proven
        self._unproven += not is_proven
        try:
            yield
        finally:
            self._proven -= is_proven
            self._unproven -= not is_proven


def _check_room(count: int, count_max: int) -> None:
    if count >= count_max:
        raise busy(
            f"{count} requests are sent on to other gateways already: ask again", limit="requests"
        )
