"""What does it cost a step to read the expert routes of its trees, on one core?

A tree of rollouts that branch from one context, with a recorded route for every sampled token. The
clock runs over checking the routes and giving every token its own; it is CPU time of this thread.

The baseline does the same in the plainest way, once for training and once for the count: all values
as int64, each layer's experts sorted to compare them. `speedup` is a ratio of one run, so it says
the same on a fast machine and on a slow one.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from measurement import Measurement, arguments
from numpy.typing import NDArray

from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.expert_routes import check_expert_routes, token_expert_routes
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, read_tree

REPEATS = 5
ROLLOUTS = 16
SAMPLED_TOKENS = 1_024
"""Of each rollout: 16,384 entries make the int64 of the larger mixture 100 MB."""
CONTEXT_TOKENS = 4_096


@dataclass(frozen=True)
class Mixture:
    """Layers, experts of a layer, and how many of them run for a token."""

    layers: int
    experts: int
    top_k: int


MIXTURES = {"30B-A3B": Mixture(48, 128, 8), "235B-A22B": Mixture(94, 128, 8)}


def shape_of(mixture: Mixture) -> ModelShape:
    """Only the sizes of the mixture count here."""
    return ModelShape(
        layers=mixture.layers,
        hidden=1,
        query_size=1,
        key_size=1,
        mlp_size=mixture.top_k,
        vocabulary=1,
        value_bytes=2,
        wide_bytes=4,
        experts=mixture.experts,
        experts_per_token=mixture.top_k,
    )


def tree_of(mixture: Mixture) -> MergedTree:
    """One context, and rollouts that each sampled another continuation."""

    def packed(values: object, dtype: str = "<i4") -> bytes:
        return np.asarray(values, dtype).tobytes()

    lengths = [CONTEXT_TOKENS, *[SAMPLED_TOKENS] * ROLLOUTS]
    starts = np.cumsum([0, *lengths[:-1]])
    entries = ROLLOUTS * SAMPLED_TOKENS
    samples = np.arange(ROLLOUTS)
    return MergedTree(
        group_id="g",
        domain="d",
        tokens=packed(np.ones(sum(lengths))),
        segment_start=packed(starts),
        segment_length=packed(lengths),
        segment_parent=packed([-1, *[0] * ROLLOUTS]),
        entry_token=packed(np.arange(CONTEXT_TOKENS, sum(lengths))),
        entry_logprob=packed(np.full(entries, -1.0), "<f4"),
        entry_version=packed(np.zeros(entries)),
        sample_first_entry=packed(np.arange(ROLLOUTS + 1) * SAMPLED_TOKENS),
        sample_advantage=packed(np.ones(ROLLOUTS), "<f4"),
        sample_temperature=packed(np.ones(ROLLOUTS), "<f4"),
        sample_leaf=packed(starts[1:] + SAMPLED_TOKENS - 1),
        sample_episode=packed(samples),
        sample_turn=packed(np.zeros(ROLLOUTS)),
        sample_ids=tuple(f"{sample:032x}" for sample in samples),
        entry_route=packed(random_routes(mixture, entries=entries), "<i2"),
    )


def random_routes(mixture: Mixture, *, entries: int) -> NDArray[np.int64]:
    """Different experts for each entry and layer: runs of `top_k` from a random first one."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, mixture.experts, (entries, mixture.layers, 1))
    routes: NDArray[np.int64] = (first + np.arange(mixture.top_k)) % mixture.experts
    return routes


def plain(forest: Forest, mixture: Mixture) -> tuple[NDArray[np.int64], int]:
    """The baseline for one use of the routes: experts by token, and entries that disagree."""
    layers, top_k = mixture.layers, mixture.top_k
    routes = forest.entry_route_ER.astype(np.int64)
    sources = forest.parent_N[forest.entry_token_E]
    chosen = np.full((forest.token_count, layers * top_k), -1, dtype=np.int64)
    entries = np.flatnonzero((routes >= 0).all(axis=1))[::-1]
    chosen[sources[entries]] = routes[entries]
    of_token = np.sort(chosen[sources].reshape(-1, layers, top_k), axis=2)
    of_entry = np.sort(routes.reshape(-1, layers, top_k), axis=2)
    return chosen, int((of_token != of_entry).any(axis=(1, 2)).sum())


def plain_check(forest: Forest, mixture: Mixture) -> None:
    """The baseline of the check."""
    ordered = np.sort(forest.entry_route_ER.reshape(-1, mixture.layers, mixture.top_k), axis=2)
    assert not (np.diff(ordered, axis=2) == 0).any()


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def measure(measurement: Measurement, case: str, mixture: Mixture) -> None:
    """Rows of one mixture, medians over repeats."""
    forest, shape = read_tree(tree_of(mixture)), shape_of(mixture)
    routes = token_expert_routes(forest, shape)
    assert routes is not None
    expected, disagreements = plain(forest, mixture)
    found = routes.expert_NLK.reshape(len(expected), -1)
    assert np.array_equal(np.where(expected < 0, mixture.experts, expected), found)
    assert routes.disagreements == disagreements

    def baseline() -> None:
        plain_check(forest, mixture)
        plain(forest, mixture)
        plain(forest, mixture)

    def product() -> None:
        check_expert_routes(forest, shape)
        token_expert_routes(forest, shape)

    taken = [(cpu_s(baseline), cpu_s(product)) for _ in range(REPEATS)]
    per_million = 1e6 / forest.entry_count
    speedup = statistics.median(slow_s / fast_s for slow_s, fast_s in taken)
    seconds = statistics.median(fast_s for _, fast_s in taken) * per_million
    measurement.row(case, "speedup", speedup, "x")
    measurement.row(case, "million_entries", seconds, "CPU s")
    measurement.row(case, "bytes_per_token", found.nbytes / forest.token_count, "B")
    measurement.row(case, "smaller", expected.nbytes / found.nbytes, "x")


def main() -> int:
    """Measure all cases."""
    chosen = arguments(__doc__ or "")
    measurement = Measurement(
        name="expert_routes",
        question="What does it cost a step to read the expert routes of its trees, on one core?",
        conditions={
            "tree": f"{ROLLOUTS} rollouts of {SAMPLED_TOKENS} sampled tokens after "
            f"{CONTEXT_TOKENS} of context",
            "repeats": str(REPEATS),
        },
    )
    for case, mixture in MIXTURES.items():
        if chosen.case is None or case in chosen.case:
            measure(measurement, case, mixture)
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
