"""How fast an engine is at the moment and how much it has to do, from its own counters.

SGLang counts since its start: tokens read and the time that took, and of every decoding step its
requests and its time. The differences over the last minute say how fast it is now; what a request
adds to a step follows from the engine's life (added_share.py).
"""

from collections import deque
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.weights import EngineLoad
from forgemq_inference.core.added_share import AddedShare, DecodeSums

# As many as there are heartbeats in a minute: long enough to have seen both kinds of step, short
# enough to follow contexts that grow.
_KEPT = 60

_MICROSECONDS = 1e6

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Sum: TypeAlias = Annotated[float, Meta(ge=0)]


class EngineCounters(Struct, frozen=True):
    """What SGLang 0.5.23's /v1/loads says of one scheduler, as far as it is used.

    Attributes:
        decode_moments: Sums over decoding steps: their number, requests b, microseconds t, b * b,
            b * t, tokens; None before the first step.
    """

    num_waiting_uncached_tokens: _Count = 0
    num_used_tokens: _Count = 0
    max_total_num_tokens: _Count = 0
    total_prefill_uncached_tokens: _Count = 0
    total_prefill_busy_us: _Count = 0
    decode_moments: Annotated[list[_Sum], Meta(min_length=5)] | None = None


def summed(counters: Sequence[EngineCounters]) -> EngineCounters:
    """One engine's counters, of those of its schedulers."""
    moments = [each.decode_moments for each in counters if each.decode_moments]
    return EngineCounters(
        num_waiting_uncached_tokens=sum(each.num_waiting_uncached_tokens for each in counters),
        num_used_tokens=sum(each.num_used_tokens for each in counters),
        max_total_num_tokens=sum(each.max_total_num_tokens for each in counters),
        total_prefill_uncached_tokens=sum(each.total_prefill_uncached_tokens for each in counters),
        total_prefill_busy_us=sum(each.total_prefill_busy_us for each in counters),
        decode_moments=[sum(column) for column in zip(*moments, strict=False)] or None,
    )


class EngineMeter:
    """Turns the counters of one engine, read about once a second, into its load.

    Example: 4,000 tokens were read in 0.5 s of work between the oldest and the newest counters:
    8,000 tokens a second.
    """

    def __init__(self) -> None:
        self._seen: deque[EngineCounters] = deque(maxlen=_KEPT)
        self._share = AddedShare()

    def observe(self, now: EngineCounters) -> EngineLoad:
        """The load after these counters; 0 for a rate that nothing says anything about yet."""
        if self._seen and _is_another_start(self._seen[-1], now):
            self._seen.clear()
            self._share = AddedShare()
        since = self._seen[0] if self._seen else EngineCounters()
        newest = self._seen[-1] if self._seen else EngineCounters()
        self._seen.append(now)
        self._share.note(_decode_sums(now).since(_decode_sums(newest)))
        step_s, step_added_s = _step_s(since, now, added_share=self._share.value)
        return EngineLoad(
            prefill_tokens_per_s=_prefill_rate(since, now),
            step_s=step_s,
            step_added_s=step_added_s,
            waiting_tokens=now.num_waiting_uncached_tokens,
            used_tokens=now.num_used_tokens,
            capacity_tokens=now.max_total_num_tokens,
        )


def _is_another_start(before: EngineCounters, now: EngineCounters) -> bool:
    steps = before.decode_moments[0] if before.decode_moments else 0.0
    steps_now = now.decode_moments[0] if now.decode_moments else 0.0
    return now.total_prefill_busy_us < before.total_prefill_busy_us or steps_now < steps


def _prefill_rate(since: EngineCounters, now: EngineCounters) -> float:
    """Tokens read a second; since the engine's start if none were read lately."""
    busy_us = now.total_prefill_busy_us - since.total_prefill_busy_us
    tokens = now.total_prefill_uncached_tokens - since.total_prefill_uncached_tokens
    if busy_us <= 0 or tokens <= 0:
        busy_us, tokens = now.total_prefill_busy_us, now.total_prefill_uncached_tokens
    return tokens * _MICROSECONDS / busy_us if busy_us > 0 else 0.0


def _step_s(
    since: EngineCounters, now: EngineCounters, *, added_share: float
) -> tuple[float, float]:
    """Seconds of a decoding step without requests, and what each of them adds.

    The mean step is that of late, or since the engine's start if there was none.
    """
    sums = _decode_sums(now)
    if not sums.steps:
        return 0.0, 0.0
    if sums.steps > _decode_sums(since).steps:
        sums = sums.since(_decode_sums(since))
    if sums.requests < sums.steps or sums.time_us < 0:
        return 0.0, 0.0  # An engine's error: a step has a request.
    others = sums.requests / sums.steps - 1
    of_one_s = sums.time_us / sums.steps / (1 + added_share * others) / _MICROSECONDS
    return of_one_s * (1 - added_share), of_one_s * added_share


def _decode_sums(counters: EngineCounters) -> DecodeSums:
    return DecodeSums(*(counters.decode_moments or ())[:5])


def alone_s(engine_s: float, *, batch: float, load: EngineLoad | None) -> float:
    """What a request's time in the engine would have been without the others beside it, seconds.

    A decoding step of b requests takes step_s + b * step_added_s, which the engine's own counters
    measure; other work on the machine slows both, and leaves their ratio as it is. So the time is
    that of a step of one request over that of a step of the mean batch; the reading of its context,
    which waits for the same steps, is scaled alike. Never more than `engine_s`; the same if the
    engine was not measured.

    Args:
        engine_s: Measured, without pauses and queueing.
        batch: Mean number of requests in the engine meanwhile, this one included.
        load: Of the engine at the end.
    """
    if load is None or not load.step_s + load.step_added_s:
        return engine_s
    of_one = load.step_s + load.step_added_s
    return engine_s * of_one / (load.step_s + max(1.0, batch) * load.step_added_s)
