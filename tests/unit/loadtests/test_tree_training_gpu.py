"""The GPU benchmark, run whole on a CPU through a tiny model."""

from dataclasses import replace

import pytest
import torch
from measurement import Measurement
from scaled_model import PEAK_FLOPS_PER_S, Machine, trained_bytes
from tree_gpu_cases import CASES, UNSCALED_CASES
from tree_timing import forward_twice
from tree_training import reached_from_a_to_f
from tree_training_gpu import (
    SAME_GRADIENTS,
    above_limits,
    both_ways,
    compare_attention,
    compare_gradients,
    measure,
    measure_unscaled,
    whole_plan,
)
from tree_ways import ROUNDS
from tree_workloads import merged_tree, requests

from forgemq_trainer.core.attention.attention import AttentionBackend
from forgemq_trainer.core.attention.gpu_attention import AttentionKind, GpuAttention
from forgemq_trainer.core.attention.varlen import passes
from forgemq_trainer.core.flops import Flops, flops, flops_of_tree
from forgemq_trainer.core.tree import read_tree
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
)
from tests.unit.trainer.gpu_kernels import PieceByPiece, eager_flex


def rows_of(measurement: Measurement, case: str) -> dict[str, float]:
    return {metric: value for name, metric, value, _ in measurement.rows if name == case}


def made() -> Measurement:
    return Measurement(name="tree_training_gpu", question="On a CPU?")


def work_of_tree(machine: Machine, layers: int) -> Flops:
    """By hand. The rollouts' first turns continue one token, so they share a row of the head."""
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


@pytest.mark.slow
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
    assert whole["flop_ratio_reached_vs_packed"] == pytest.approx(
        whole["packed_s"] / whole["tree_s"] / whole["flop_ratio"]
    )
    assert whole["packed_model_flop_utilisation"] == pytest.approx(
        alone.total / whole["packed_s"] / 1e11
    )
    assert whole["speedup_vs_append"] == pytest.approx(whole["append_s"] / whole["tree_s"])
    assert cut["blocks"] == 3
    assert cut["peak"] < whole["peak"]
    predicted = shape_of(TINY, 2).block_bytes(forest.token_count, chunk=1024, is_carried=False)
    assert whole["peak_over_predicted"] == pytest.approx(whole["peak"] * 2**30 / predicted)
    assert whole["peak_memory_ratio"] == pytest.approx(
        whole["peak_with_gradients"] / whole["request_peak_with_gradients"]
    )
    assert whole["peak_memory_ratio"] > 1
    assert cut["flops_over_whole"] == pytest.approx(forward_twice(tree).total / tree.total)
    assert min(whole["head_s"], whole["append_s"], cut["tree_s"]) > 0
    assert above_limits(measurement) == []


@pytest.mark.slow
def test_a_tree_with_room_for_half_of_its_layers_runs_whole_and_repeats_the_others() -> None:
    measurement = made()
    measure(measurement, "tiny", replace(CASE, blocks_share=0.95), TINY)
    whole, again = rows_of(measurement, "tiny"), rows_of(measurement, "tiny, recomputed")
    assert (again["blocks"], again["recomputed_layers"]) == (1, 1)
    assert again["peak"] < whole["peak"]
    tree = work_of_tree(TINY, 2)
    assert again["flops_over_whole"] == pytest.approx(1 + tree.weights / 6 / tree.total)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_ways_of_one_run_have_equal_gradients(dtype: torch.dtype) -> None:
    measurement = made()
    compare_gradients(measurement, CASE, replace(TINY, dtype=dtype))
    for way in ("", ", recomputed", ", blocks"):
        rows = rows_of(measurement, f"{SAME_GRADIENTS}{way}")
        assert 0 < rows["gradient_difference"] < ROUNDING[dtype], way


@pytest.mark.slow
def test_blocks_of_the_unscaled_model_take_the_bytes_that_were_predicted() -> None:
    measurement = made()
    measure_unscaled(measurement, "wide", WIDE_CASE, WIDE)
    rows = rows_of(measurement, "wide")
    assert rows["blocks"] >= 2
    assert rows["peak_over_predicted"] == pytest.approx(1, rel=0.02)


@pytest.mark.slow
def test_a_tree_trains_both_ways_whichever_would_be_chosen() -> None:
    measurement, kernel = made(), PieceByPiece()
    both: dict[AttentionKind, AttentionBackend] = {
        "varlen": GpuAttention(head_size=HEAD_SIZE, kind="varlen", varlen=kernel),
        "flex": GpuAttention(head_size=HEAD_SIZE, kind="flex", flex=eager_flex),
    }
    compare_attention(measurement, "small, both ways", SMALL_CASE, TINY, both=both)
    rows = rows_of(measurement, "small, both ways")
    forest = read_tree(merged_tree(requests(SMALL_CASE.tree)))
    plan = whole_plan(forest)
    layers = TINY.layers_that_fit(forest.token_count)
    assert kernel.calls == (1 + ROUNDS) * layers * len(passes(plan))
    assert (rows["layers"], rows["is_varlen"]) == (layers, 0)
    assert rows["rectangles"] == len(plan.rectangles) == 1
    # The later rollout's chain reads the prompt, so only the prompt's keys are packed.
    assert rows["packed_keys"] == pytest.approx(SMALL_CASE.tree.prompt / forest.token_count)
    assert rows["flex_over_varlen"] == pytest.approx(rows["tree_s_flex"] / rows["tree_s_varlen"])


def test_blocks_of_the_200k_tree_reach_at_best_three_quarters_of_the_whole() -> None:
    forest = read_tree(merged_tree(requests(CASES["200k"].tree)))
    tree = flops_of_tree(shape_of(LARGE, 2), forest)
    assert tree.total / forward_twice(tree).total == pytest.approx(0.766, abs=0.001)


def test_cases_a_to_f_are_summed_up_only_where_all_six_were_measured() -> None:
    reached = dict.fromkeys("ABCDE", 0.9) | {"headline": 0.5, "F": 0.9 / 2**6}
    assert reached_from_a_to_f(reached) == pytest.approx(0.45)
    for left_out in "ABCDEF":
        others = {case: share for case, share in reached.items() if case != left_out}
        assert reached_from_a_to_f(others) is None


def test_the_unscaled_model_has_all_its_layers_and_no_share_of_an_unknown_peak() -> None:
    measurement = made()
    measure_unscaled(measurement, "tiny", CASE, replace(TINY, peak_flops_per_s=None))
    rows = rows_of(measurement, "tiny")
    assert rows["tflops"] * 1e12 * rows["tree_s"] == pytest.approx(work_of_tree(TINY, 4).total)
    assert "model_flop_utilisation" not in rows


def test_a_device_too_small_for_one_layer_has_no_rows_and_says_so() -> None:
    measurement = made()
    measure(measurement, "no room", CASE, replace(TINY, memory_bytes=1000))
    assert rows_of(measurement, "no room") == {}
    assert "left out" in measurement.conditions["no room"]
    assert PEAK_FLOPS_PER_S.get("NVIDIA H200") == 989.4e12
    assert PEAK_FLOPS_PER_S.get("NVIDIA H200 NVL") is None


def test_the_unscaled_model_and_its_blocks_fit_into_an_h200() -> None:
    shape, case = shape_of(LARGE, 36), UNSCALED_CASES["8B, 200k"]
    forest = read_tree(merged_tree(requests(case.tree)))
    blocks = case.blocks(forest, shape)
    assert blocks is not None
    assert len(blocks.blocks) <= 64
    assert trained_bytes(shape) + blocks.predicted_bytes < 0.85 * 150e9


def test_what_may_not_be_high_is_named() -> None:
    measurement = made()
    measurement.row("32k", "compilations", 1, "compilations")
    measurement.row("32k", "tree_s", 99.0, "s")
    measurement.row(SAME_GRADIENTS, "gradient_difference", 0.2, "share")
    assert above_limits(measurement) == [
        "32k compilations = 1, at most 0.0",
        "same gradients gradient_difference = 0.2, at most 0.05",
    ]


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_gpu_compiles_nothing_while_timed_and_has_equal_gradients() -> None:
    machine = replace(TINY, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    measurement = made()
    compare_gradients(measurement, CASE, machine)
    measure(measurement, "tiny", CASE, machine)
    assert rows_of(measurement, SAME_GRADIENTS)["gradient_difference"] > 0
    assert rows_of(measurement, "tiny, blocks")["blocks"] >= 2
    compare_attention(measurement, "tiny, both ways", CASE, machine, both=both_ways(machine))
    assert rows_of(measurement, "tiny, both ways")["flex_over_varlen"] > 0
    assert above_limits(measurement) == []
