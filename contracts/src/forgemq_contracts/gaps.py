"""How far two computations of the same log-probabilities are apart: engine and trainer."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

GAP_EDGES_NATS: tuple[float, ...] = tuple(2.0 ** (half / 2 - 20) for half in range(2 * 24 + 1))
"""Upper edges of all bins but the last: from 1e-6 nats, below what float32 resolves, to 16 nats,
far beyond any rounding. Two bins an octave tell a quantile to within a factor of 1.42."""

BINS = len(GAP_EDGES_NATS) + 1
"""The last bin has no upper edge."""

GapBins: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=0)], ...],
    Meta(
        max_length=BINS,
        description="How many gaps lie in each bin of GAP_EDGES_NATS, up to the last one that has "
        "any; bin 0 is up to 2^-20 nats, bin i up to 2^(i/2 - 20). Empty: not counted.",
    ),
]


class LogprobGap(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """|log-probability of the trainer - of the engine| over tokens that both gave one version."""

    entries: Annotated[int, Meta(ge=1, description="Tokens compared.")]
    mean: Annotated[float, Meta(ge=0, description="Nats.")]
    max: Annotated[float, Meta(ge=0, description="Nats.")]
    bins: GapBins = ()

    def quantile(self, share: float) -> float:
        """A gap that at least this share of the tokens does not exceed, nats.

        It is the upper edge of a bin, so up to 1.42 times the exact one and never below it; `max`
        if that is less, or if the bins were not counted.
        """
        if not self.bins:
            return self.max
        wanted, counted = share * self.entries, 0
        for edge, count in zip(GAP_EDGES_NATS, self.bins, strict=False):
            counted += count
            if counted >= wanted:
                return min(edge, self.max)
        return self.max


def merged_gap(gaps: Iterable[LogprobGap]) -> LogprobGap | None:
    """All these gaps as one; None if there is none."""
    parts = list(gaps)
    if not parts:
        return None
    entries = sum(part.entries for part in parts)
    is_counted = all(part.bins for part in parts)
    columns = zip_longest(*(part.bins for part in parts), fillvalue=0)
    return LogprobGap(
        entries=entries,
        mean=sum(part.mean * part.entries for part in parts) / entries,
        max=max(part.max for part in parts),
        bins=tuple(sum(column) for column in columns) if is_counted else (),
    )


class Audit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the audit of G5 allows |trainer - engine| to be, over the run's compared tokens."""

    logprob_gap_mean_max: (
        Annotated[float, Meta(gt=0, description="Mean, nats; null: by model.dtype.")] | None
    ) = None
    logprob_gap_p999_max: (
        Annotated[float, Meta(gt=0, description="99.9 % quantile, nats; null: by model.dtype.")]
        | None
    ) = None
