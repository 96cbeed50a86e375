"""The GPU benchmark, run whole on a CPU through a tiny model."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from measurement import Measurement
from scaled_model import Machine, causal_flash, trained_bytes
from transformers import AutoConfig
from tree_timing import fitted, stratified
from tree_training_gpu import (
    PEAK_FLOPS_PER_S,
    QWEN3_8B,
    SAME_GRADIENTS,
    UNSCALED_CASES,
    Case,
    compare_gradients,
    measure,
    measure_unscaled,
    over_their_most,
)
from tree_ways import SAMPLED_MAX, SAMPLED_MIN, compilations, requests_to_time
from tree_workloads import Sample, Shape, append_merged, merged_tree, requests

from forgemq.trainer.core.flops import Flops, flops
from forgemq.trainer.core.memory import ModelShape
from forgemq.trainer.core.tree import read_tree
from forgemq.trainer.model import model_shape

TINY = Machine(
    device=torch.device("cpu"),
    dtype=torch.float32,
    model={
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    memory_bytes=36_000_000,
    peak_flops_per_s=1e11,
)
LARGE = replace(TINY, dtype=torch.bfloat16, model=QWEN3_8B)
CASE = Case(
    tree=Shape(rollouts=4, turns=4, prompt=200, act=16, observe=24),
    blocks_share=0.95,
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def rows_of(measurement: Measurement, case: str) -> dict[str, float]:
    return {metric: value for name, metric, value, _ in measurement.rows if name == case}


def made() -> Measurement:
    return Measurement(name="tree_training_gpu", question="On a CPU?")


def shape_of(machine: Machine, layers: int) -> ModelShape:
    config = AutoConfig.for_model("qwen3", **machine.scaled(layers))
    return model_shape(config, dtype=machine.dtype)


def whole_bytes_of(machine: Machine, layers: int, *, tokens: int) -> int:
    shape = shape_of(machine, layers)
    return trained_bytes(shape) + shape.block_bytes(tokens, chunk=1024, is_carried=False)


def work_of_tree(machine: Machine, layers: int) -> Flops:
    """By hand: the rollouts' first turns continue one token, so they share a row of the head."""
    forest = read_tree(merged_tree(requests(CASE.tree)))
    return flops(
        shape_of(machine, layers),
        tokens=forest.token_count,
        pairs=forest.attention_pairs,
        rows=forest.entry_count - CASE.tree.rollouts + 1,
    )


def work_alone(machine: Machine, layers: int) -> Flops:
    samples = requests(CASE.tree)
    lengths = [len(sample.tokens) for sample in samples]
    return flops(
        shape_of(machine, layers),
        tokens=sum(lengths),
        pairs=sum(length * (length + 1) // 2 for length in lengths),
        rows=sum(len(sample.sampled) for sample in samples),
    )


def test_a_case_times_every_way_on_the_same_samples() -> None:
    measurement = made()
    measure(measurement, "tiny", CASE, TINY)
    samples = requests(CASE.tree)
    forest = read_tree(merged_tree(samples))
    whole, cut = rows_of(measurement, "tiny"), rows_of(measurement, "tiny, blocks")
    assert whole["request_tokens"] == sum(len(sample.tokens) for sample in samples)
    assert whole["tree_tokens"] == forest.token_count
    assert (whole["requests"], whole["requests_timed"]) == (16, 16)
    assert (whole["layers"], whole["vocabulary"], whole["compilations"]) == (2, 2048, 0)
    tree, alone = work_of_tree(TINY, 2), work_alone(TINY, 2)
    assert whole["flop_ratio"] == pytest.approx(alone.total / tree.total)
    for rows in (whole, cut):
        assert rows["speedup_vs_per_request"] == pytest.approx(
            whole["per_request_s"] / rows["tree_s"]
        )
        assert rows["flop_ratio_reached"] == pytest.approx(
            rows["speedup_vs_per_request"] / whole["flop_ratio"]
        )
        assert rows["model_flop_utilisation"] == pytest.approx(tree.total / rows["tree_s"] / 1e11)
    assert whole["per_request_model_flop_utilisation"] == pytest.approx(
        alone.total / whole["per_request_s"] / 1e11
    )
    assert whole["speedup_vs_append"] == pytest.approx(whole["append_s"] / whole["tree_s"])
    assert cut["blocks"] == 2
    assert cut["peak"] < whole["peak"]
    assert whole["peak_memory_ratio"] > 1
    assert min(whole["head_s"], whole["append_s"], cut["tree_s"]) > 0
    assert over_their_most(measurement) == []


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_ways_of_one_run_have_equal_gradients(dtype: torch.dtype) -> None:
    measurement = made()
    compare_gradients(measurement, CASE, replace(TINY, dtype=dtype))
    whole = rows_of(measurement, SAME_GRADIENTS)
    cut = rows_of(measurement, f"{SAME_GRADIENTS}, blocks")
    assert whole["blocks"] >= 2
    assert 0 < whole["gradient_difference"] < ROUNDING[dtype]
    assert 0 < cut["gradient_difference"] < ROUNDING[dtype]


def test_the_unscaled_model_has_all_its_layers_and_its_blocks_stay_in_the_prediction() -> None:
    measurement = made()
    measure_unscaled(measurement, "tiny", CASE, TINY)
    rows = rows_of(measurement, "tiny")
    assert rows["tflops"] * 1e12 * rows["tree_s"] == pytest.approx(work_of_tree(TINY, 4).total)
    assert rows["blocks"] >= 2
    assert 0 < rows["peak_over_predicted"] < 1


def test_a_device_of_unknown_peak_has_no_utilisation_and_a_small_one_no_rows() -> None:
    measurement = made()
    measure_unscaled(measurement, "tiny", CASE, replace(TINY, peak_flops_per_s=None))
    assert "tflops" in rows_of(measurement, "tiny")
    assert "model_flop_utilisation" not in rows_of(measurement, "tiny")
    measure(measurement, "no room", CASE, replace(TINY, memory_bytes=1000))
    assert rows_of(measurement, "no room") == {}
    assert "left out" in measurement.conditions["no room"]
    assert PEAK_FLOPS_PER_S.get("NVIDIA H200") == 989.4e12
    assert PEAK_FLOPS_PER_S.get("NVIDIA H200 NVL") is None


@pytest.mark.parametrize("layers", [2, 6, 17])
def test_the_last_byte_decides_how_many_layers_fit(layers: int) -> None:
    needed = whole_bytes_of(LARGE, layers, tokens=31_540)
    assert replace(LARGE, memory_bytes=needed).layers_that_fit(31_540) == layers
    assert replace(LARGE, memory_bytes=needed - 1).layers_that_fit(31_540) == layers - 1


@pytest.mark.parametrize("layers", [1, 2, 6, 17, 36])
def test_the_head_weighs_what_it_weighs_in_the_whole_model(layers: int) -> None:
    def share(count: int) -> float:
        work = flops(shape_of(LARGE, count), tokens=1, pairs=0, rows=1)
        return work.head / work.weights

    assert share(layers) == pytest.approx(share(36), rel=0.02)


def test_parameters_and_gradients_are_counted_as_the_8b_has_them() -> None:
    parameters = trained_bytes(shape_of(LARGE, 36)) / 4
    assert parameters == pytest.approx(8.19e9, rel=0.002)


def test_the_unscaled_model_and_its_blocks_fit_into_an_h200() -> None:
    shape, case = shape_of(LARGE, 36), UNSCALED_CASES["8B, 200k"]
    forest = read_tree(merged_tree(requests(case.tree)))
    blocks = case.blocks(forest, shape)
    assert blocks is not None
    assert len(blocks.blocks) <= 64
    assert trained_bytes(shape) + blocks.predicted_bytes < 0.85 * 150e9


def test_baseline_attention_is_causal_softmax_attention_with_shared_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 7, 8, generator=generator)
    key, value = (torch.randn(1, 2, 7, 8, generator=generator) for _ in range(2))
    output, _ = causal_flash(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    for head in range(4):
        scores = 0.3 * query[0, head] @ key[0, head // 2].T
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
        wanted = scores.softmax(-1) @ value[0, head // 2]
        torch.testing.assert_close(output[0, :, head], wanted, rtol=1e-5, atol=1e-6)


def test_baseline_attention_raises_where_flash_cannot_run() -> None:
    query, value = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 4)
    with warnings.catch_warnings(action="ignore"), pytest.raises(RuntimeError, match="kernel"):
        causal_flash(torch.nn.Identity(), query, query, value, None)
    mask = torch.zeros(1, 1, 5, 5)
    with pytest.raises(ValueError, match="no mask"):
        causal_flash(torch.nn.Identity(), query, query, query, mask)
    with pytest.raises(ValueError, match="no window"):
        causal_flash(torch.nn.Identity(), query, query, query, None, sliding_window=4)


def test_every_compilation_is_counted_once() -> None:
    doubled = torch.compile(lambda values: values * 2, backend="eager", dynamic=False)
    counts = [compilations()]
    for size in (3, 3, 4):
        doubled(torch.ones(size))
        counts.append(compilations())
    assert np.diff(counts).tolist() == [1, 0, 1]


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


def test_what_may_not_be_high_is_named() -> None:
    measurement = made()
    measurement.row("32k", "compilations", 1, "compilations")
    measurement.row("32k", "tree_s", 99.0, "s")
    measurement.row(SAME_GRADIENTS, "gradient_difference", 0.2, "share")
    assert over_their_most(measurement) == [
        "32k compilations = 1, at most 0.0",
        "same gradients gradient_difference = 0.2, at most 0.05",
    ]


def test_stripped_histories_append_to_nothing() -> None:
    shape = Shape(rollouts=2, turns=3, prompt=20, act=4, observe=4, think=6)
    samples = requests(shape)
    assert len(append_merged(samples)) == len(samples)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_compiles_nothing_while_timed_and_has_equal_gradients() -> None:
    machine = replace(TINY, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    measurement = made()
    compare_gradients(measurement, CASE, machine)
    measure(measurement, "tiny", CASE, machine)
    assert rows_of(measurement, SAME_GRADIENTS)["gradient_difference"] > 0
    assert rows_of(measurement, "tiny, blocks")["blocks"] >= 2
    assert over_their_most(measurement) == []
