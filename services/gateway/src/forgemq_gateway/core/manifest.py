"""Which completions of an episode count, and the engine time on its critical path."""

from bisect import bisect_right
from collections.abc import Iterable, Set

from forgemq_contracts.episodes import ManifestEntry
from forgemq_gateway.core.history import KnownCompletion


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


def critical_path_s(completions: Iterable[KnownCompletion]) -> float:
    """Engine time of the heaviest chain of completions that did not overlap, seconds.

    One completion follows another if the gateway had the other when this one was requested, so
    parallel ones (sub-agents) count once. Offsets decide that, and each duration is of one clock:
    the clocks of two hosts are never compared. Weighted interval scheduling, O(n log n).
    """
    ordered = sorted(completions, key=lambda completion: completion.offset)
    offsets = [completion.offset for completion in ordered]
    best = [0.0]
    for index, completion in enumerate(ordered):
        before = bisect_right(offsets, completion.after_offset, 0, index)
        best.append(max(best[-1], best[before] + completion.engine_s))
    return best[-1]
