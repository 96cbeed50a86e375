"""Every way of training one group, and the times that are taken of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scaled_model import made_model, trained_bytes
from tree_timing import fitted, flops_of_sequences, forward_twice, stratified
from tree_ways import (
    SAMPLED_MAX,
    SAMPLED_MIN,
    Ways,
    compilations,
    gradient_differences,
    peaks,
    requests_to_time,
    unmerged,
)
from tree_workloads import Sample, Shape, append_merged, merged_tree, requests

from forgemq_trainer.core.attention.gpu_attention import AttentionKind, GpuAttention
from forgemq_trainer.core.flops import Flops, flops, flops_of_tree
from forgemq_trainer.core.tree import joined, read_tree
from tests.unit.loadtests.tiny import (
    CASE,
    HEAD_SIZE,
    LARGE,
    ROUNDING,
    SMALL_CASE,
    TINY,
    WIDE,
    WIDE_CASE,
    shape_of,
    ways_of,
)
from tests.unit.trainer.gpu_kernels import PieceByPiece, eager_flex


@pytest.mark.slow
def test_measured_peaks_count_the_gradients_of_parameters_only_where_they_say_so() -> None:
    """Gradients are a twelfth of the tree's bytes: a peak that counts them fails this bound."""
    ways = ways_of(WIDE, WIDE_CASE, layers=1)
    shape = ways.loaded.policy.shape
    predicted = shape.block_bytes(ways.forest.token_count, chunk=1024, is_carried=False)
    assert trained_bytes(shape) / 2 > 0.08 * predicted
    held = peaks(ways)
    assert ways.blocks is not None
    assert held.tree / predicted == pytest.approx(1, rel=0.02)
    assert held.blocks is not None
    assert held.blocks / ways.blocks.predicted_bytes == pytest.approx(1, rel=0.02)
    assert held.tree_with_gradients > 1.02 * held.tree
    assert held.request_with_gradients < held.tree_with_gradients


@pytest.mark.parametrize("kind", ["varlen", "flex"])
def test_each_forced_way_of_a_gpu_has_the_gradients_of_every_request_alone(
    kind: AttentionKind,
) -> None:
    ways = ways_of(TINY, SMALL_CASE, layers=1)
    forced = GpuAttention(head_size=HEAD_SIZE, kind=kind, flex=eager_flex, varlen=PieceByPiece())
    ways.loaded = replace(ways.loaded, policy=replace(ways.loaded.policy, attention=forced))
    (difference,) = gradient_differences(ways, [ways.tree])
    assert 0 < difference < ROUNDING[torch.float32]


def test_packed_requests_fit_beside_one_another_share_nothing_and_train_as_if_alone() -> None:
    samples = requests(CASE.tree)
    tree = read_tree(merged_tree(samples))
    lengths = [len(sample.tokens) for sample in samples]
    shape = shape_of(TINY, 1)
    some = unmerged(samples, tokens_max=tree.token_count)
    chosen = [samples[index] for index in stratified(lengths, count=len(some))]
    assert flops_of_tree(shape, joined(some)) == flops_of_sequences(shape, chosen)
    more = stratified(lengths, count=len(some) + 1)
    assert sum(forest.token_count for forest in some) <= tree.token_count
    assert sum(lengths[index] for index in more) > tree.token_count
    every = unmerged(samples, tokens_max=sum(lengths))
    ways = Ways(TINY, made_model(TINY, layers=1), samples, joined(every))
    (difference,) = gradient_differences(ways, [ways.requests_packed])
    assert 0 < difference < ROUNDING[torch.float32]


def test_one_forward_more_is_a_third_of_the_layers_products() -> None:
    more = forward_twice(Flops(weights=6.0, attention=14.0, head=8.0))
    assert more == Flops(weights=8.0, attention=18.0, head=10.0)


def sample_of(length: int) -> Sample:
    return Sample(
        tokens=np.zeros(length, np.int32),
        sampled=np.arange(length - 1, length),
        behaviour=np.zeros(1, np.float32),
        advantage=1.0,
        rollout=0,
    )


def test_as_many_requests_are_timed_as_the_work_allows() -> None:
    shape = shape_of(LARGE, 2)
    samples = [sample_of(length) for length in range(1000, 31_000, 1000)]

    def work(chosen: list[int]) -> float:
        return sum(
            flops(
                shape,
                tokens=len(samples[index].tokens),
                pairs=len(samples[index].tokens) * (len(samples[index].tokens) + 1) // 2,
                rows=1,
            ).total
            for index in chosen
        )

    lengths = [len(sample.tokens) for sample in samples]
    limit = work(stratified(lengths, count=10))
    chosen = requests_to_time(shape, samples, flops_max=limit)
    assert chosen == stratified(lengths, count=10)
    assert (chosen[0], chosen[-1]) == (0, 29)
    assert len(requests_to_time(shape, samples, flops_max=math.inf)) == SAMPLED_MAX
    assert len(requests_to_time(shape, samples, flops_max=0.0)) == SAMPLED_MIN


def test_a_fit_recovers_a_quadratic_and_says_how_far_it_may_be_off() -> None:
    def seconds(length: int) -> float:
        return 0.1 + 2e-4 * length + 3e-8 * length**2

    lengths = list(range(500, 8000, 250))
    exact = fitted(lengths, [(n, seconds(n)) for n in lengths[::3]])
    assert exact.total_s == pytest.approx(sum(seconds(n) for n in lengths))
    assert exact.error < 1e-9
    rough = [(n, seconds(n) * (1.1 if k % 2 else 0.9)) for k, n in enumerate(lengths[::3])]
    assert 0.01 < fitted(lengths, rough).error < 0.1


def test_stripped_histories_append_to_nothing() -> None:
    shape = Shape(rollouts=2, turns=3, prompt=20, act=4, observe=4, think=6)
    samples = requests(shape)
    assert len(append_merged(samples)) == len(samples)


def test_every_graph_is_counted_once_and_a_function_without_tensors_is_not() -> None:
    doubled = torch.compile(lambda values: values * 2, backend="eager", dynamic=False)
    without = torch.compile(lambda seen: seen.append(1), backend="eager", dynamic=False)
    counts = [compilations()]
    for size in (3, 3, 4):
        doubled(torch.ones(size))
        without([])
        counts.append(compilations())
    assert np.diff(counts).tolist() == [1, 0, 1]
