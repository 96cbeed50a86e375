"""What a request costs on a lane, in seconds: of one unit no weights are to be tuned.

Of a request with u tokens that the lane has not in its cache, on a lane with b requests in flight
which reads R tokens a second and takes s + b ds seconds for a decoding step of b requests:

    Q / R                        the lane first reads what it was given before and has not read yet
    p                            if it reads nothing, this request begins a pass of its own: s
    u / R                        then this request's own tokens
    F                            before, if engines share a pool: to fetch what another has computed
    T (s + (b + 1) ds)           then it samples T tokens, as many as the run's completions have
    b (p + u / R + T ds)         meanwhile each of the others waits for all three
    max(0, used + u - C) / R     what must leave a full cache of C tokens is read again later

A pass over contexts takes at least what a decoding step without requests takes. A request that
waits with others to be read shares theirs. R is measured over whole passes, so that with short
contexts it has a part of that time in it too.
"""

from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.weights import EngineLoad

# Assumed until a lane has been measured: the order of an 8B model on one large GPU.
_PREFILL_TOKENS_PER_S = 8_000.0
_STEP_S = 0.02
_STEP_ADDED_S = 0.000_1

_FETCH_BEGIN_S = 0.02
"""Assumed: from the question to the pool until the first tokens come."""
_FETCHED_TOKENS_MIN = 256
"""SGLang 0.5.23 asks its storage for no less."""

_OUTPUT_TOKENS = 256.0
"""Of a turn of an agent, until completions say otherwise."""

_OUTPUT_SHARE = 0.02
"""Share of the newest completion in their mean length: it follows the last fifty or so."""


class Rates(Struct, frozen=True, kw_only=True):
    """How fast a lane is; see the module."""

    prefill_tokens_per_s: float = _PREFILL_TOKENS_PER_S
    step_s: float = _STEP_S
    step_added_s: float = _STEP_ADDED_S


class LaneWork(Struct, kw_only=True):
    """What a lane has to do, under one epoch.

    Attributes:
        rates: None if it was not measured.
        in_flight: Requests that were given to it and are not answered.
        unread_tokens: Given to it and not read yet, as far as the gateway can know.
        used_tokens: Of its cache, by requests that run.
        capacity_tokens: Of its cache; 0 if unknown.
    """

    epoch: int = 0
    rates: Rates | None = None
    in_flight: int = 0
    unread_tokens: int = 0
    used_tokens: int = 0
    capacity_tokens: int = 0


class OutputLength:
    """The mean length of the run's completions, in tokens."""

    def __init__(self) -> None:
        self.tokens = _OUTPUT_TOKENS
        self._is_measured = False

    def note(self, tokens: int) -> None:
        """Note the length of a completion."""
        share = _OUTPUT_SHARE if self._is_measured else 1.0
        self._is_measured = True
        self.tokens += share * (tokens - self.tokens)


def take_load(work: LaneWork, load: EngineLoad | None) -> None:
    """Take what a heartbeat says; what was given to the lane before is in its load.

    A heartbeat without a load says nothing of the queue. Then a lane has read all that it was given
    once it has answered all, so that what counts as unread of a lane that never says does not grow
    without end.
    """
    if load is None:
        if not work.in_flight:
            work.unread_tokens = 0
        return
    work.rates = rates_of(load) or work.rates
    work.unread_tokens = load.waiting_tokens
    work.used_tokens, work.capacity_tokens = load.used_tokens, load.capacity_tokens


def rates_of(load: EngineLoad | None) -> Rates | None:
    """The rates of a lane; None if it was not measured, at all or in one of them."""
    if load is None or not load.prefill_tokens_per_s or not load.step_s + load.step_added_s:
        return None
    return Rates(
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_s=load.step_s,
        step_added_s=load.step_added_s,
    )


def mean_rates(measured: Sequence[Rates]) -> Rates:
    """What is assumed of a lane that was not measured: the mean of those that were."""
    if not measured:
        return Rates()
    count = len(measured)
    return Rates(
        prefill_tokens_per_s=sum(each.prefill_tokens_per_s for each in measured) / count,
        step_s=sum(each.step_s for each in measured) / count,
        step_added_s=sum(each.step_added_s for each in measured) / count,
    )


def fetch_s(tokens: int, *, tokens_per_s: float) -> float:
    """Time until so many tokens of a context have come from the pool of all engines."""
    return _FETCH_BEGIN_S + tokens / tokens_per_s if tokens else 0.0


def fetched_tokens(missing: int) -> int:
    """How many tokens an engine fetches of those that it lacks and the pool has."""
    return missing if missing >= _FETCHED_TOKENS_MIN else 0


def cost_s(rates: Rates, work: LaneWork, *, uncached_tokens: int, output_tokens: float) -> float:
    """What a request costs on this lane, to itself and to those that are there, without F."""
    read_s = uncached_tokens / rates.prefill_tokens_per_s
    # Without it, lanes that are equal but for noise pass episodes to and fro, which tears apart the
    # turns that would be read in one pass.
    pass_s = 0.0 if work.unread_tokens else rates.step_s
    others = work.in_flight
    decode_s = output_tokens * (rates.step_s + (others + 1) * rates.step_added_s)
    harm_s = others * (pass_s + read_s + output_tokens * rates.step_added_s)
    evicted = work.used_tokens + uncached_tokens - work.capacity_tokens
    overflow = max(0, evicted) if work.capacity_tokens else 0
    queue_s = (work.unread_tokens + overflow) / rates.prefill_tokens_per_s
    return queue_s + pass_s + read_s + decode_s + harm_s
