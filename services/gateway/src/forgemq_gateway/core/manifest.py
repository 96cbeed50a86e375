"""Which completions of an episode count, and the engine time on its critical path."""

from bisect import bisect_right
from collections.abc import Iterable, Set

from forgemq_contracts.episodes import ManifestEntry
from forgemq_gateway.core.known_completion import KnownCompletion


def counted(
    completions: Iterable[KnownCompletion], *, delivered: Set[str]
) -> list[KnownCompletion]:
    """Completions that were delivered or that a later request built on, by sequence."""
    return sorted(
        (c for c in completions if c.echoed or c.request_id in delivered),
        key=lambda completion: completion.sequence,
    )


def manifest(completions: Iterable[KnownCompletion]) -> tuple[ManifestEntry, ...]:
    """One entry for each completion, in the given order."""
    return tuple(
        ManifestEntry(
            completion_id=completion.request_id,
            offset=completion.offset,
            sequence=completion.sequence,
            output_tokens=completion.output_tokens,
            parent_id=None if completion.parent is None else completion.parent.request_id,
        )
        for completion in completions
    )


def critical_path_s(completions: Iterable[KnownCompletion], *, alone: bool = False) -> float:
    """Engine time of the heaviest chain of completions that did not overlap, seconds.

    With `alone`, each completion's time is what it would have been alone in its engine.

    One completion follows another if the gateway had the other when this one was requested, so
    parallel ones (sub-agents) count once. Offsets decide that, and each duration is of one clock:
    the clocks of two hosts are never compared. Weighted interval scheduling, O(n log n).
    """
    ordered = sorted(completions, key=lambda completion: completion.offset)
    offsets = [completion.offset for completion in ordered]
    best = [0.0]
    for index, completion in enumerate(ordered):
        before = bisect_right(offsets, completion.after_offset, 0, index)
        best.append(max(best[-1], best[before] + _engine_s(completion, alone=alone)))
    return best[-1]


def _engine_s(completion: KnownCompletion, *, alone: bool) -> float:
    if not alone or completion.alone_s is None:
        return completion.engine_s
    return completion.alone_s
