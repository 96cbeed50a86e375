"""How many requests of agents are sent on to other gateways at once.

Each holds two sockets and a piece of its body, for a client whose key only the owner can look up.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_gateway.core.admission import Limits
from forgemq_gateway.core.errors import busy

_UNPROVEN_SHARE = 8
"""Keys that derive from no valid admin key are made up, or their admin key was replaced while they
play: one request in so many."""


class Forwards:
    """Counts what is sent on now; requests with an admin key are as little counted as elsewhere.

    Each owner has its own count: clients keep their connections, so that one gateway may have to
    send on what keeps all others busy.

    Args:
        limits: Of each gateway. One owner is sent as many requests as agents may have there, those
            that wait for a place included.
    """

    def __init__(self, limits: Limits) -> None:
        self._requests_max = limits.requests_max + limits.waiting_max
        self._unproven_max = max(1, limits.requests_max // _UNPROVEN_SHARE)
        self._proven: Counter[str] = Counter()
        self._unproven = 0

    @contextmanager
    def place(self, owner: str, *, is_proven: bool) -> Iterator[None]:
        """Within it the request is counted.

        Args:
            owner: The gateway that it is sent to.
            is_proven: Whether its key derives from a valid admin key. The others have places of
                their own, of all owners together, so that who makes keys up takes none away from
                agents.

        Raises:
            RefusedError: 429, so many are sent on already.
        """
        if is_proven:
            _check_room(self._proven[owner], self._requests_max)
        else:
            _check_room(self._unproven, self._unproven_max)
        self._proven[owner] += is_proven
        self._unproven += not is_proven
        try:
            yield
        finally:
            self._unproven -= not is_proven
            self._proven[owner] -= is_proven
            if not self._proven[owner]:  # A gateway that ends comes back under another id.
                del self._proven[owner]


def _check_room(count: int, count_max: int) -> None:
    if count >= count_max:
        raise busy(f"{count} requests are sent on already: ask again", limit="requests")
