"""An engine in simulated time: reads contexts in chunks, samples for all requests at once, caches.

What it does not simulate: a step of the real engine mixes reading and sampling, and its cache is a
tree of tokens; here a context is cached as a whole, for its episode and for its group.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from msgspec import Struct

from forgemq_inference.core.engine_load import EngineCounters

_CHUNK_TOKENS = 8192
_RUNNING_MAX = 64
_FETCH_BEGIN_S = 0.02
_FETCHED_TOKENS_MIN = 256
"""SGLang asks its storage for no less."""
_BLOCK_S = 0.2
"""Shorter steps are sampled as one block between two looks at the queue, so that a simulation takes
seconds: a turn waits for at most a block or a step."""


class EngineSpeed(Struct, frozen=True, kw_only=True):
    """Assumed: the order of an 8B model on one large GPU.

    Attributes:
        context_s: What each token of the contexts adds to a decoding step.
        capacity_tokens: Of the K/V cache.
    """

    prefill_tokens_per_s: float = 12_000.0
    step_s: float = 0.012
    step_added_s: float = 0.000_25
    context_s: float = 2e-8
    capacity_tokens: int = 400_000

    def times(self, factor: float) -> "EngineSpeed":
        """An engine that is so many times as fast, with the same cache."""
        return EngineSpeed(
            prefill_tokens_per_s=self.prefill_tokens_per_s * factor,
            step_s=self.step_s / factor,
            step_added_s=self.step_added_s / factor,
            context_s=self.context_s / factor,
            capacity_tokens=self.capacity_tokens,
        )


@dataclass(kw_only=True, eq=False)
class Work:
    """A turn on an engine: its context, and how much of it and of the output is to be done.

    Attributes:
        ready_s: Before, it waits for what is fetched from the pool.
    """

    episode: Hashable
    group: Hashable
    prompt_tokens: int
    context_tokens: int
    output_tokens: int
    asked_s: float
    ready_s: float = 0.0
    unread_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    when_ended: Callable[[], None] = lambda: None


class SharedPool:
    """What all engines have computed, under the version of the weights that did; never full.

    Args:
        tokens_per_s: Rate at which one turn fetches.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._kept: dict[tuple[Hashable, int], int] = {}

    def keep(self, key: Hashable, version: int, tokens: int) -> None:
        """Keep a context."""
        self._kept[key, version] = tokens

    def found(self, work: Work, version: int) -> int:
        """Leading tokens of a turn's context."""
        return max(self._kept.get((key, version), 0) for key in (work.episode, work.group))

    def fetch_s(self, tokens: int) -> float:
        """Time until a turn has so many tokens."""
        return _FETCH_BEGIN_S + tokens / self._tokens_per_s


@dataclass
class _Cached:
    tokens: int
    used_s: float


@dataclass(eq=False)
class SimulatedEngine:
    """One lane's engine; `step` does what it does next.

    Attributes:
        version: Of its weights; another one empties the cache.
        stalled_until_s: It begins no step before.
        starts: How often it was started; another start has nothing of the earlier ones.
        down_since_s: When it died; None while it is up.
    """

    speed: EngineSpeed
    pool: SharedPool | None = None
    version: int = 0
    stalled_until_s: float = 0.0
    starts: int = 1
    down_since_s: float | None = None
    is_busy: bool = False
    waiting: list[Work] = field(default_factory=list)
    running: list[Work] = field(default_factory=list)
    _cache: dict[Hashable, _Cached] = field(default_factory=dict)
    _cache_tokens: int = 0
    _read_tokens: int = 0
    _read_us: int = 0
    _moments: list[float] = field(default_factory=lambda: [0.0] * 6)

    def load(self, version: int) -> None:
        """Take over other weights; what runs is read again."""
        self.version = version
        self._cache.clear()
        self._cache_tokens = 0
        for work in self.running:
            work.unread_tokens = work.context_tokens + work.sampled_tokens
        self.waiting = self.running + self.waiting
        self.running = []

    def die(self, *, now_s: float) -> list[Work]:
        """Lose everything; returns the turns that were here, but for those that end with a step."""
        lost = self.running + self.waiting
        self.down_since_s, self.is_busy = now_s, False
        self.running, self.waiting = [], []
        self._cache.clear()
        self._cache_tokens = self._read_tokens = self._read_us = 0
        self._moments = [0.0] * 6
        return lost

    def start(self) -> None:
        """Be up again, with the weights that the others have."""
        self.down_since_s = None
        self.starts += 1

    def take(self, work: Work) -> None:
        """Put a turn at the end of the queue."""
        own = self._cache.get(work.episode)
        prompt = self._cache.get(work.group)
        cached = max(own.tokens if own else 0, prompt.tokens if prompt else 0)
        work.cached_tokens = min(cached, work.context_tokens - 1)
        if self.pool is not None:
            self._fetch(work, self.pool)
        work.unread_tokens = work.context_tokens - work.cached_tokens
        self.waiting.append(work)

    def has_work(self, now_s: float) -> bool:
        """Whether a step would do something; a turn that waits for the pool is no work."""
        return bool(self.running) or self._first_ready(now_s) is not None

    def step(self, now_s: float) -> tuple[float, list[Work]]:
        """Do one step; returns when it ends, and the turns that end with it."""
        begin_s = max(now_s, self.stalled_until_s)
        if self._next(begin_s) is not None:
            return begin_s + self._read(begin_s), []
        took_s = self._sample()
        ended = [work for work in self.running if work.sampled_tokens >= work.output_tokens]
        self.running = [work for work in self.running if work not in ended]
        for work in ended:
            self._keep(work, now_s=begin_s + took_s)
        return begin_s + took_s, ended

    def counters(self) -> EngineCounters:
        """As the real engine's /v1/loads."""
        return EngineCounters(
            num_waiting_uncached_tokens=sum(work.unread_tokens for work in self.waiting),
            num_used_tokens=sum(work.context_tokens + work.sampled_tokens for work in self.running),
            max_total_num_tokens=self.speed.capacity_tokens,
            total_prefill_uncached_tokens=self._read_tokens,
            total_prefill_busy_us=self._read_us,
            decode_moments=list(self._moments) if self._moments[0] else None,
        )

    def _fetch(self, work: Work, pool: SharedPool) -> None:
        found = min(pool.found(work, self.version), work.context_tokens - 1)
        tokens = found - work.cached_tokens
        if tokens >= _FETCHED_TOKENS_MIN:
            work.cached_tokens = found
            work.ready_s = work.asked_s + pool.fetch_s(tokens)

    def _first_ready(self, now_s: float) -> Work | None:
        return next((work for work in self.waiting if work.ready_s <= now_s), None)

    def _next(self, now_s: float) -> Work | None:
        """The next turn in the queue if it may be read; one alone always fits."""
        work = self._first_ready(now_s)
        if work is None or len(self.running) >= _RUNNING_MAX:
            return None
        used = sum(work.context_tokens + work.output_tokens for work in self.running)
        fits = used + work.context_tokens + work.output_tokens <= self.speed.capacity_tokens
        return work if fits or not self.running else None

    def _read(self, now_s: float) -> float:
        budget = _CHUNK_TOKENS
        while budget and (work := self._next(now_s)) is not None:
            part = min(budget, work.unread_tokens)
            work.unread_tokens -= part
            budget -= part
            if not work.unread_tokens:
                self.waiting.remove(work)
                self.running.append(work)
        tokens = _CHUNK_TOKENS - budget
        took_s = tokens / self.speed.prefill_tokens_per_s + self.speed.step_s
        self._read_tokens += tokens
        self._read_us += round(took_s * 1e6)
        return took_s

    def _sample(self) -> float:
        count = len(self.running)
        left = min(work.output_tokens - work.sampled_tokens for work in self.running)
        contexts = sum(work.context_tokens + work.sampled_tokens for work in self.running)
        speed = self.speed
        step_s = speed.step_s + speed.step_added_s * count + speed.context_s * contexts
        tokens = max(1, min(left, int(_BLOCK_S / step_s)))
        for work in self.running:
            work.sampled_tokens += tokens
        us = step_s * 1e6
        sums = (1.0, count, us, count * count, count * us, count)
        self._moments = [old + tokens * new for old, new in zip(self._moments, sums, strict=True)]
        return tokens * step_s

    def _keep(self, work: Work, *, now_s: float) -> None:
        """Cache a turn that has ended, and drop what was not used for longest."""
        for key, tokens in (
            (work.group, work.prompt_tokens),
            (work.episode, work.context_tokens + work.output_tokens),
        ):
            known = self._cache.pop(key, None)
            self._cache_tokens += tokens - (known.tokens if known else 0)
            self._cache[key] = _Cached(tokens, now_s)  # The last one is the newest.
            if self.pool is not None:
                self.pool.keep(key, self.version, tokens)
        while self._cache_tokens > self.speed.capacity_tokens and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            self._cache_tokens -= self._cache.pop(oldest).tokens
