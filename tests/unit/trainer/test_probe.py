"""The probe: which tokens of fresh trees tell how far trainer and engine are apart."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts import topics
from forgemq_contracts.gaps import GAP_EDGES_NATS, LogprobGap, merged_gap
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.expert_routes import token_expert_routes
from forgemq_trainer.core.metrics import GAP_NATS_MAX, gap_of
from forgemq_trainer.core.probe import probe_of, probe_tokens_max
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.training import ReadStep, Training
from tests.unit.trainer.scene import (
    SHAPE,
    agent_samples,
    configuration_of,
    merge,
    routed,
    save_base,
    scheduled_step,
)

NEW = 7
"""A version above those of `agent_samples`."""


def _tree(name: str, *, version: int | None = None, seed: int = 0) -> MergedTree:
    samples = agent_samples(np.random.default_rng(seed))
    if version is not None:
        samples = [dataclasses.replace(sample, version=version) for sample in samples]
    return merge(samples, name)


def _forest(*, fresh: tuple[int, ...]) -> Forest:
    """A tree of which these samples are of version NEW."""
    samples = [
        dataclasses.replace(sample, version=NEW if number in fresh else 0)
        for number, sample in enumerate(agent_samples(np.random.default_rng(0)))
    ]
    return read_tree(merge(samples))


def _path(forest: Forest, token: int) -> list[int]:
    path = []
    while token >= 0:
        path.append(int(forest.tokens_N[token]))
        token = int(forest.parent_N[token])
    return path[::-1]


def _contexts(forest: Forest) -> set[tuple[int, ...]]:
    """Tokens up to each fresh entry, so that parts of a tree can be compared with all of it."""
    fresh = forest.entry_token_E[forest.entry_version_E == NEW]
    return {tuple(_path(forest, int(token))) for token in fresh}


@pytest.mark.parametrize("fresh", [(0,), (3, 5), (1, 2, 7)])
def test_a_probe_has_the_fresh_tokens_with_all_their_ancestors_and_no_other(
    fresh: tuple[int, ...],
) -> None:
    whole = _forest(fresh=fresh)
    part = probe_of(whole, version=NEW, tokens_max=whole.token_count)
    assert part is not None
    assert _contexts(part) == _contexts(whole)
    assert part.token_count < whole.token_count
    assert part.entry_count < whole.entry_count
    needed = {context[:n] for context in _contexts(whole) for n in range(1, len(context) + 1)}
    assert {tuple(_path(part, token)) for token in range(part.token_count)} == needed
    ends = [
        max(n + 1 for n in range(part.token_count) if _path(part, n)[: len(above)] == above)
        for above in (_path(part, token) for token in range(part.token_count))
    ]
    assert part.subtree_end_N.tolist() == ends
    starts, stops = part.segment_start_M.tolist(), part.segment_end_M.tolist()
    assert [0, *stops] == [*starts, part.token_count]


def test_a_probe_keeps_to_its_budget_and_takes_as_much_of_a_sample_as_fits() -> None:
    whole = _forest(fresh=(0, 4))
    assert probe_of(_forest(fresh=()), version=NEW, tokens_max=1000) is None
    shallowest = min(len(context) for context in _contexts(whole))
    assert probe_of(whole, version=NEW, tokens_max=shallowest - 1) is None
    counts = []
    for tokens_max in range(shallowest, whole.token_count):
        part = probe_of(whole, version=NEW, tokens_max=tokens_max)
        assert part is not None
        assert part.token_count <= tokens_max
        assert _contexts(part) <= _contexts(whole)
        counts.append(len(_contexts(part)))
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == len(_contexts(whole))


def test_a_probe_replays_expert_routes_of_its_own_version_only() -> None:
    """The engine computed older tokens again, through experts that no record names."""
    shape = dataclasses.replace(SHAPE, experts=4, experts_per_token=2)
    samples = [
        dataclasses.replace(sample, version=NEW if number == 2 else 0)
        for number, sample in enumerate(agent_samples(np.random.default_rng(0)))
    ]
    whole = read_tree(routed(merge(samples), layers=2, top_k=2, experts=4))
    part = probe_of(whole, version=NEW, tokens_max=whole.token_count)
    assert part is not None
    routes = token_expert_routes(part, shape)
    assert routes is not None
    is_replayed = (routes.expert_NLK < shape.experts).all(axis=(1, 2))
    is_source = np.zeros(part.token_count, dtype=np.bool_)
    is_source[part.parent_N[part.entry_token_E]] = True
    assert set(part.entry_version_E.tolist()) == {NEW}
    assert is_replayed.tolist() == is_source.tolist()
    assert part.entry_count == len(samples[2].behaviour)


def test_a_probe_is_a_small_share_of_its_step() -> None:
    assert probe_tokens_max(400) == 100
    assert probe_tokens_max(10_000) == 1024
    assert probe_tokens_max(1_600_000) == 100_000


def _training(folder: Path, **trainer: object) -> Training:
    if not (folder / "base").exists():
        save_base(folder / "base")
    return Training(configuration_of(folder / "base", **trainer), device="cpu", checkpoint=None)


def _weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in training.model.named_parameters()}


def test_a_step_of_older_tokens_measures_the_gap_on_fresh_trees_and_trains_the_same(
    tmp_path: Path,
) -> None:
    """Without a probe the step's record has no gap: none, not a gap of zero."""
    found = []
    for fresh in ((), (topics.encode(_tree("g-new", version=1, seed=5)),)):
        training = _training(tmp_path)
        training.train(_read(training, [_tree("g-0", version=0)], step=0))
        training.compute_gradients(_read(training, [_tree("g-1", version=0, seed=1)], step=1))
        found.append((training.update(fresh), _weights(training)))
    (blind, expected), (probed, weights) = found
    assert blind.logprob_gap is None
    assert blind.measured_gap() is None
    assert probed.logprob_gap is not None
    assert probed.gap_entries == probed.logprob_gap.entries > 0
    assert probed.logprob_gap_max == probed.logprob_gap.max >= probed.logprob_gap.mean > 0
    assert probed.grad_norm == blind.grad_norm
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def _read(training: Training, trees: list[MergedTree], *, step: int) -> ReadStep:
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    return training.read(scheduled_step(step, trees), values)


def test_a_probe_reads_the_log_probabilities_that_training_computes(tmp_path: Path) -> None:
    """The same tokens once in the step and once in the probe: the same gap."""
    tree, training = _tree("g-0", version=0), _training(tmp_path)
    alone = _training(tmp_path).train(_read(training, [tree], step=0))
    training.compute_gradients(_read(training, [tree], step=0))
    twice = training.update((topics.encode(tree)[:-20], topics.encode(tree)))
    assert alone.logprob_gap is not None
    assert twice.logprob_gap is not None
    step = read_tree(tree)
    part = probe_of(step, version=0, tokens_max=probe_tokens_max(step.token_count))
    assert part is not None
    assert twice.gap_entries == alone.gap_entries + part.entry_count
    assert twice.logprob_gap.max == pytest.approx(alone.logprob_gap.max, rel=1e-5)


def test_a_quantile_lies_between_the_exact_one_and_half_an_octave_above() -> None:
    gaps = np.abs(np.random.default_rng(0).normal(scale=0.01, size=5000))
    gap = gap_of(gaps)
    assert gap is not None
    for share in (0.5, 0.9, 0.99):
        exact = float(np.quantile(gaps, share, method="inverted_cdf"))
        assert exact <= gap.quantile(share) <= exact * 2**0.5
    assert gap.quantile(1.0) == gap.max
    assert (gap.entries, gap.mean) == (5000, pytest.approx(float(gaps.mean())))


def test_gaps_of_several_steps_add_up_to_those_of_all_their_tokens() -> None:
    gaps = np.abs(np.random.default_rng(0).standard_cauchy(size=300))
    whole = gap_of(gaps)
    parts = merged_gap(gap for gap in map(gap_of, np.split(gaps, [10, 100, 100])) if gap)
    assert whole is not None
    assert parts is not None
    assert parts == msgspec.structs.replace(whole, mean=parts.mean)
    assert parts.mean == pytest.approx(whole.mean)
    assert merged_gap(()) is None
    older = LogprobGap(entries=10, mean=0.1, max=0.5)
    merged = merged_gap((whole, older))
    assert merged is not None
    assert merged.bins == ()
    assert merged.quantile(0.5) == merged.max


def test_a_gap_that_is_no_number_counts_as_the_worst() -> None:
    gap = gap_of(np.array([np.nan, np.inf, 0.0, 1e-3]))
    assert gap is not None
    assert gap.max == GAP_NATS_MAX
    assert sum(gap.bins) == 4
    assert len(gap.bins) == len(GAP_EDGES_NATS) + 1
    assert gap.mean == pytest.approx((2 * GAP_NATS_MAX + 1e-3) / 4)
