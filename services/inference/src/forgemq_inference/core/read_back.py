"""Whether an engine holds the weights that were sent, by checksums that it computes itself."""

from collections.abc import Mapping, Sequence

import msgspec

from forgemq_contracts.weight_samples import is_whole
from forgemq_contracts.weights import SampledParameter

_DIGITS = 16
"""SGLang gives the first 64 bits of a SHA-256, of an engine on a CPU."""


class RankPlace(msgspec.Struct, frozen=True):
    """Of a process in its engine."""

    tp_size: int = 1


class RankChecksums(msgspec.Struct, frozen=True):
    """What /weights_checker says of one process of an engine."""

    checksums: Mapping[str, str]
    parallelism_info: Sequence[RankPlace] = ()

    @property
    def has_parts(self) -> bool:
        """Whether other processes have other parts of most parameters."""
        return any(place.tp_size > 1 for place in self.parallelism_info)


def wrong_parameters(
    sampled: Sequence[SampledParameter], ranks: Sequence[RankChecksums]
) -> tuple[str, ...]:
    """Names of sampled parameters that some process holds otherwise than they were sent; sorted.

    What a process does not have under that name, or of which it has a part, is not compared.
    """
    return tuple(
        sorted(each.name for each in sampled if any(_differs(each, rank) for rank in ranks))
    )


def _differs(sampled: SampledParameter, rank: RankChecksums) -> bool:
    held = rank.checksums.get(sampled.name)
    if held is None or (rank.has_parts and not is_whole(sampled.name)):
        return False
    return held != sampled.sha256[:_DIGITS]
