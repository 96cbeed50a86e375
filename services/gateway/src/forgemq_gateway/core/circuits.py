"""Which lanes are left alone for a while because their engines fail.

An engine that fails every request at once always has nothing in flight. By load alone it would be
the cheapest lane and take every request of the run. So errors cost, and after a few in a row the
circuit of the lane opens: it takes no request until a pause is over, then one trial. A success
closes the circuit, a failed trial opens it for twice as long.

Source: the circuit breaker of M. Nygard, Release It!, 2nd edition, chapter 5.
"""

from msgspec import Struct

ERRORS_IN_A_ROW_MAX = 3
"""Fewer may be the requests' own fault: one that no engine can answer is tried as often."""

PAUSE_S = 1.0
"""First pause. An engine that restarts needs far longer; one that lost a batch needs less."""

PAUSE_S_MAX = 30.0
"""One request in half a minute is what a broken lane may still cost."""

ERROR_COST_S = 20.0
"""What each error in a row adds to a lane's cost, so that a healthy lane is preferred until it is
busy: at the rates assumed in `costs`, 32 requests in flight add 18 s to one of 4,000 tokens."""


class Circuit(Struct, kw_only=True):
    """Errors of one lane under one epoch; another epoch is another engine process.

    Attributes:
        errors: Since the last success.
        pause_s: The newest pause; 0 before the first.
        open_until_s: No request before this time; one trial after it.
        is_trying: Whether the trial is in flight.
    """

    epoch: int
    errors: int = 0
    pause_s: float = 0.0
    open_until_s: float = 0.0
    is_trying: bool = False


class Circuits:
    """The circuits of all lanes that have failed since their last success.

    Example: the engine of lane 2 fails at 0.0, 0.1 and 0.3 s: its circuit opens until 1.3 s. Then
    one request is sent there. It fails at 1.4 s: open until 3.4 s. The next trial succeeds: closed.
    """

    def __init__(self) -> None:
        self._circuits: dict[int, Circuit] = {}

    def note_error(self, lane: int, epoch: int, *, now_s: float) -> float:
        """Count an error; returns for how many seconds the lane now takes no request, 0 if it does.

        An error of an older epoch, or one of a request sent before the circuit opened, changes
        nothing: it says nothing about the process there now.
        """
        circuit = self._circuits.get(lane)
        if circuit is None or circuit.epoch < epoch:
            circuit = self._circuits[lane] = Circuit(epoch=epoch)
        if circuit.epoch > epoch or now_s < circuit.open_until_s:
            return 0.0
        circuit.errors += 1
        circuit.is_trying = False
        if circuit.errors < ERRORS_IN_A_ROW_MAX:
            return 0.0
        circuit.pause_s = min(2 * circuit.pause_s or PAUSE_S, PAUSE_S_MAX)
        circuit.open_until_s = now_s + circuit.pause_s
        return circuit.pause_s

    def note_success(self, lane: int, epoch: int) -> None:
        """Close the circuit: the lane's engine has answered a request."""
        circuit = self._circuits.get(lane)
        if circuit is not None and circuit.epoch <= epoch:
            del self._circuits[lane]

    def note_sent(self, lane: int, epoch: int) -> None:
        """A request goes there; if the circuit was open, it is the trial."""
        circuit = self._circuits.get(lane)
        if circuit is not None and circuit.epoch == epoch and circuit.open_until_s:
            circuit.is_trying = True

    def note_given_up(self, lane: int, epoch: int) -> None:
        """A request there ends without an answer or an error; another may be the trial."""
        circuit = self._circuits.get(lane)
        if circuit is not None and circuit.epoch == epoch:
            circuit.is_trying = False

    def takes_requests(self, lane: int, epoch: int, *, now_s: float) -> bool:
        """Whether a request may go to this lane now."""
        circuit = self._circuits.get(lane)
        if circuit is None or circuit.epoch != epoch or circuit.errors < ERRORS_IN_A_ROW_MAX:
            return True
        return now_s >= circuit.open_until_s and not circuit.is_trying

    def cost_s(self, lane: int, epoch: int) -> float:
        """What the lane's errors add to the cost of a request there."""
        circuit = self._circuits.get(lane)
        if circuit is None or circuit.epoch != epoch:
            return 0.0
        return circuit.errors * ERROR_COST_S
