"""What of a context the engines of the lanes are expected to have in their K/V caches.

An inference process files K/V under the name of the weights that it belongs to, and an engine drops
all of it with an update, so that nothing of older weights is ever found. Of a completion an engine
has every token but the last one, which it sampled and need not have read: whether it did depends on
what it did next. What episodes happen to say alike, word for word, is not expected.
"""

from collections.abc import Mapping
from typing import TypeAlias

from forgemq_contracts.lanes import WeightsId
from forgemq_gateway.core.completion_tokens import common_tokens
from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion

LaneCache: TypeAlias = tuple[int, int, WeightsId | None]
"""The cache of a lane, under one epoch and one version of the weights: others find nothing in it.
"""

Emptied: TypeAlias = Mapping[int, int]
"""By lane: when its engine last had nothing, in milliseconds of the clock that says when its
completions were taken."""

_GONE = -1
"""For the epoch of what an engine lost; a pool may have it."""

# Before all others.
_NO_WEIGHTS: WeightsId = (-1, -1)


def cached_tokens(
    completion: KnownCompletion | None, *, shared: int, emptied: Emptied
) -> dict[LaneCache, int]:
    """Leading tokens of a child that each lane has computed, at most `shared`; one walk for all."""
    cached: dict[LaneCache, int] = {}
    limit = shared
    while completion is not None and limit > 0:
        has = min(limit, completion.total_tokens - 1)
        cached.setdefault(_cache_of(completion, emptied), has)
        limit = min(limit, completion.shared_tokens)
        completion = completion.parent
    return cached


def cached_on(
    where: LaneCache, completion: KnownCompletion | None, *, shared: int, emptied: Emptied
) -> int:
    """As `cached_tokens`, of one lane; nearly always the parent itself was there."""
    limit = shared
    while completion is not None and limit > 0:
        if _cache_of(completion, emptied) == where:
            return min(limit, completion.total_tokens - 1)
        limit = min(limit, completion.shared_tokens)
        completion = completion.parent
    return 0


class FirstPrompts:
    """The newest first completion on each lane, of a group's episodes and of the whole run.

    Episodes of one group begin with the same task, so that a first turn finds its prompt where a
    sibling has been. Those of other groups often begin with the same instructions. One completion
    is kept for a lane, because its cache has nothing of older weights.

    Args:
        of_run: Those of all groups.
    """

    def __init__(self, of_run: "FirstPrompts | None" = None) -> None:
        self._of_run = of_run
        self._newest: dict[int, KnownCompletion] = {}

    def note(self, completion: KnownCompletion) -> None:
        """Note a completion without a parent; one that began before an update may end after it."""
        known = self._newest.get(completion.lane)
        if known is None or _age(known) <= _age(completion):
            self._newest[completion.lane] = completion
        if self._of_run is not None:
            self._of_run.note(completion)

    def cached_tokens(self, context: bytes, *, emptied: Emptied) -> dict[LaneCache, int]:
        """Leading tokens of a whole context that each lane has computed."""
        known = (self._newest if self._of_run is None else self._of_run._newest).values()
        caches = [_cache_of(each, emptied) for each in known]
        return {each: self.cached_on(each, context, emptied=emptied) for each in caches}

    def cached_on(self, where: LaneCache, context: bytes, *, emptied: Emptied) -> int:
        """As `cached_tokens`, of one lane."""
        completion = self._newest.get(where[0])
        if completion is not None and _cache_of(completion, emptied) == where:
            return _common(context, completion)  # Its task is the same, and no other group's is.
        if self._of_run is None:
            return 0
        return self._of_run.cached_on(where, context, emptied=emptied)


def _cache_of(completion: KnownCompletion, emptied: Emptied) -> LaneCache:
    # What an engine queues while it is updated keeps the older name, whichever weights sample it.
    is_gone = completion.taken_ms < emptied.get(completion.lane, 0)
    return (completion.lane, _GONE if is_gone else completion.epoch, completion.weights)


def _age(completion: KnownCompletion) -> tuple[int, WeightsId]:
    return (completion.epoch, completion.weights or _NO_WEIGHTS)


def _common(context: bytes, completion: KnownCompletion) -> int:
    known = completion.context
    if len(context) > len(known):  # Its reply follows, and a fork may begin with that.
        known += completion.output[:-TOKEN_BYTES]
    return common_tokens(context, known)
