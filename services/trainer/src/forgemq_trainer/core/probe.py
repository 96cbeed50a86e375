"""Which tokens of fresh trees tell whether trainer and engine compute the same.

Just before a step's update the trainer still holds the weights that the engine samples with, and
completions have come in that those weights sampled (`core.fresh` makes trees of them). The probe is
a forward over such tokens and their ancestors, without gradient and within a budget; they train
later as if it had not been. In a run whose steps train older tokens only, nothing else compares the
two.

N tokens, M segments, E entries.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forgemq_trainer.core.tree import Forest, Integers

PROBE_SHARE = 16
"""One token is probed for so many trained ones. Without a backward it costs a third, so the probe
adds about 1 / 48 to a step."""

PROBE_TOKENS_MIN = 1024
"""For the steps of small models: enough for the episodes of one group..."""

SMALL_STEP_SHARE = 4
"""... but never more than one token for four trained ones, which adds at most 1 / 12."""


def probe_tokens_max(step_tokens: int) -> int:
    """How many tokens a probe may have beside a step of so many.

    Args:
        step_tokens: Those that one rank trains, as every rank runs the whole probe.
    """
    return max(step_tokens // PROBE_SHARE, min(PROBE_TOKENS_MIN, step_tokens // SMALL_STEP_SHARE))


def probe_of(forest: Forest, *, version: int, tokens_max: int) -> Forest | None:
    """The part of a tree that a probe of the version runs; None if it has nothing for it.

    Samples that the version sampled in are taken the shallowest first, each with all ancestors and
    as far as the budget reaches. Entries of other versions are left out. Their expert routes are
    of other weights: when the engine loaded these it dropped its cache, so what it compared with
    had been computed again.

    Args:
        forest: The tree.
        version: Its entries are to be compared.
        tokens_max: Tokens of the part.
    """
    is_kept_N = np.zeros(forest.token_count, dtype=np.bool_)
    left = tokens_max
    for tokens in _fresh_tokens(forest, version=version):
        kept = _kept_above(forest, is_kept_N, tokens[-1])
        fitting = [token for token in tokens if forest.position_N[token] < kept + left]
        if fitting:
            left -= int(forest.position_N[fitting[-1]]) + 1 - kept
            for start, end in _path(forest, fitting[-1]):
                is_kept_N[start:end] = True
    if not is_kept_N.any():
        return None
    is_kept_E = is_kept_N[forest.entry_token_E] & (forest.entry_version_E == version)
    return _cut(forest, is_kept_N, is_kept_E)


def _fresh_tokens(forest: Forest, *, version: int) -> list[list[int]]:
    """The tokens that the version sampled, by sample and by depth; the shallowest sample first."""
    is_fresh_E = forest.entry_version_E == version
    tokens, samples = forest.entry_token_E[is_fresh_E], forest.entry_sample_E[is_fresh_E]
    cuts = np.flatnonzero(np.diff(samples)) + 1
    # A sample's entries lie on one path, which deepens along the layout.
    chosen = [sorted(part.tolist()) for part in np.split(tokens, cuts) if len(part)]
    return sorted(chosen, key=lambda part: (int(forest.position_N[part[-1]]), part[-1]))


def _path(forest: Forest, token: int) -> Iterator[tuple[int, int]]:
    """Layout ranges of the token and all its ancestors, from the token upwards."""
    segment = int(np.searchsorted(forest.segment_start_M, token, side="right")) - 1
    end = token + 1
    while segment >= 0:
        yield int(forest.segment_start_M[segment]), end
        segment = int(forest.segment_parent_M[segment])
        end = int(forest.segment_end_M[segment])


def _kept_above(forest: Forest, is_kept_N: NDArray[np.bool_], token: int) -> int:
    """How many of the token and its ancestors are kept; what is kept has all its ancestors."""
    return sum(int(is_kept_N[start:end].sum()) for start, end in _path(forest, token))


def _cut(forest: Forest, is_kept_N: NDArray[np.bool_], is_kept_E: NDArray[np.bool_]) -> Forest:
    """The forest of these tokens, each with all its ancestors, and of these of their entries."""
    index_N = np.concatenate([[0], np.cumsum(is_kept_N)])
    is_kept_M = is_kept_N[forest.segment_start_M]
    segment_M = np.cumsum(is_kept_M) - 1

    def moved(parents: Integers, to: Integers) -> Integers:
        return np.where(parents < 0, -1, to[parents])

    return replace(
        forest,
        group_end_G=index_N[forest.group_end_G],
        tokens_N=forest.tokens_N[is_kept_N],
        parent_N=moved(forest.parent_N[is_kept_N], index_N),
        position_N=forest.position_N[is_kept_N],
        subtree_end_N=index_N[forest.subtree_end_N[is_kept_N]],
        segment_start_M=index_N[forest.segment_start_M[is_kept_M]],
        segment_end_M=index_N[forest.segment_end_M[is_kept_M]],
        segment_parent_M=moved(forest.segment_parent_M[is_kept_M], segment_M),
        entry_token_E=index_N[forest.entry_token_E[is_kept_E]],
        entry_sample_E=forest.entry_sample_E[is_kept_E],
        entry_group_E=forest.entry_group_E[is_kept_E],
        entry_logprob_E=forest.entry_logprob_E[is_kept_E],
        entry_version_E=forest.entry_version_E[is_kept_E],
        entry_advantage_E=forest.entry_advantage_E[is_kept_E],
        entry_temperature_E=forest.entry_temperature_E[is_kept_E],
        entry_reference_E=forest.entry_reference_E[is_kept_E],
        entry_teacher_E=forest.entry_teacher_E[is_kept_E],
        entry_start_E=forest.entry_start_E[is_kept_E],
        entry_route_ER=forest.entry_route_ER[is_kept_E],
        entry_is_routed_E=forest.entry_is_routed_E[is_kept_E],
    )
