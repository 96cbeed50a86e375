"""What share of its FLOP ratio does tree training reach on a GPU, at which share of its peak?

The same samples of one group train in several ways, in one run, through layers of a Qwen3-8B in
bfloat16: every request alone, unpadded, by torch's causal flash attention; some requests packed
side by side; requests merged with the previous one if they extend it; the prefix tree at once and,
in some cases, in blocks within a byte budget. The model has as many layers as the device holds with
the whole tree's activations; the vocabulary shrinks with them, so that the head has the share of
the work that it has with all 36.

Every shape runs once before it is timed; rounds interleave the ways. The per-request time is a
quadratic fit in length over a stratified sample of requests, and its error is a row. The case `same
gradients` compares the ways' gradients on a small tree. Two kinds of cases run only if they are
named: `8B, ...` train the tree of 200k through the unscaled model in blocks, without a comparison;
a case's name followed by `, both ways` trains its tree by flash over pieces and under the block
mask in interleaved rounds.

`make load NAME=tree_training_gpu JSON=tree_gpu.json`
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from measurement import Measurement, arguments
from scaled_model import PEAK_FLOPS_PER_S, QWEN3_8B, Machine, made_model
from torch_allocation import peak_allocated_bytes
from tree_gpu_cases import CASES, GRADIENT_CASE, UNSCALED_CASES, Case, whole_bytes
from tree_timing import flops_of_sequences, forward_twice, train_trees
from tree_ways import (
    Times,
    Ways,
    compilations,
    gradient_differences,
    interleaved,
    peaks,
    release,
    timed,
)
from tree_workloads import merged_tree, requests

from forgemq_trainer.core.attention.attention import AttentionBackend
from forgemq_trainer.core.attention.flash4_varlen import choose_kernel, is_flash4_here
from forgemq_trainer.core.attention.gpu_attention import AttentionKind, GpuAttention, attention_kind
from forgemq_trainer.core.attention.plan import AttentionPlan, attention_plan, pieces
from forgemq_trainer.core.flops import Flops, flops_of_tree
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.tree import Forest, joined, read_tree
from forgemq_trainer.model import LoadedModel

MEMORY_SHARE = 0.75
"""Of the device's memory, for parameters, gradients and what the formula predicts. The rest is for
the CUDA context, the kernels' workspaces and holes between tensors."""

GIBIBYTE = 2**30
LIMITS = {"compilations": 0.0, "gradient_difference": 0.05}
"""The largest allowed value of these rows. Nothing may compile while it is timed. Gradients are
sums of bfloat16 values, each rounded by up to 0.004 of itself."""

EXIT_NO_DEVICE = 2
"""Exit status if torch sees no GPU."""

Row = tuple[str, float, str]

SAME_GRADIENTS = "same gradients"
SAME_GRADIENTS_LAYERS = 2
"""The fewest in which one layer's input depends on another's attention."""

BOTH_WAYS = ", both ways"
"""Suffix of a case's name."""


def measure(measurement: Measurement, name: str, case: Case, machine: Machine) -> None:
    """Measure all rows of one case; if no layer fits, note that as a condition instead."""
    samples = requests(case.tree)
    forest = read_tree(merged_tree(samples))
    loaded = _model_for(measurement, name, forest, machine)
    if loaded is None:
        return
    blocks = case.blocks(forest, loaded.policy.shape)
    ways = Ways(machine, loaded, samples, forest, blocks=blocks)
    held = peaks(ways)
    times = timed(ways)
    rows = [
        *_speed_rows(ways, times),
        ("layers", loaded.policy.shape.layers, "layers"),
        ("vocabulary", loaded.policy.shape.vocabulary, "tokens"),
        ("peak", held.tree / GIBIBYTE, "GiB"),
        ("peak_over_predicted", held.tree / whole_bytes(forest, loaded.policy.shape), "x"),
        ("peak_with_gradients", held.tree_with_gradients / GIBIBYTE, "GiB"),
        ("request_peak_with_gradients", held.request_with_gradients / GIBIBYTE, "GiB"),
        ("peak_memory_ratio", held.tree_with_gradients / held.request_with_gradients, "x"),
    ]
    for metric, value, unit in rows:
        measurement.row(name, metric, value, unit)
    if blocks is None:
        return
    assert times.blocks_s is not None
    assert held.blocks is not None
    alone = flops_of_sequences(loaded.policy.shape, samples)
    tree = flops_of_tree(loaded.policy.shape, forest)
    speedup = times.per_request.total_s / times.blocks_s
    rows = [
        ("flop_ratio_reached", speedup / (alone.total / tree.total), "share"),
        ("speedup_vs_per_request", speedup, "x"),
        ("seconds_over_whole", times.blocks_s / times.tree_s, "x"),
        ("flops_over_whole", _planned_flops(tree, blocks, loaded).total / tree.total, "x"),
        *_block_rows(machine, blocks, tree, seconds=times.blocks_s, peak_bytes=held.blocks),
    ]
    way = "recomputed" if blocks.recomputed_layers else "blocks"
    for metric, value, unit in rows:
        measurement.row(f"{name}, {way}", metric, value, unit)


def _planned_flops(tree: Flops, plan: Microbatch, loaded: LoadedModel) -> Flops:
    """FLOPs of the tree as planned: blocks run forward twice, recomputed layers their products."""
    if len(plan.blocks) > 1:
        return forward_twice(tree)
    share = plan.recomputed_layers / loaded.policy.shape.layers
    return replace(tree, weights=tree.weights * (1 + share * 2 / 6))


def _model_for(
    measurement: Measurement, name: str, forest: Forest, machine: Machine
) -> LoadedModel | None:
    """Make a model of as many layers as fit with the whole tree; None and a condition if 0 do."""
    layers = machine.layers_that_fit(forest.token_count)
    if layers == 0:
        measurement.conditions[name] = "left out: not one layer fits into the device's memory"
        return None
    return made_model(machine, layers=layers)


def _speed_rows(ways: Ways, times: Times) -> list[Row]:
    shape, forest, machine = ways.loaded.policy.shape, ways.forest, ways.machine
    tree = flops_of_tree(shape, forest)
    alone, appended = (flops_of_sequences(shape, group) for group in (ways.samples, ways.merged))
    packed = flops_of_tree(shape, joined(ways.packed))
    packed_s = times.packed_s * alone.total / packed.total
    speedup = times.per_request.total_s / times.tree_s
    return [
        ("flop_ratio_reached", speedup / (alone.total / tree.total), "share"),
        ("speedup_vs_per_request", speedup, "x"),
        (
            "flop_ratio_reached_vs_packed",
            packed_s / times.tree_s / (alone.total / tree.total),
            "share",
        ),
        ("speedup_vs_append", times.append_s / times.tree_s, "x"),
        ("token_ratio", sum(ways.lengths) / forest.token_count, "x"),
        ("flop_ratio", alone.total / tree.total, "x"),
        ("flop_ratio_weights", alone.weights / tree.weights, "x"),
        ("flop_ratio_attention", alone.attention / tree.attention, "x"),
        ("flop_ratio_vs_append", appended.total / tree.total, "x"),
        ("attention_share", tree.attention / tree.total, "share"),
        ("request_tokens", sum(ways.lengths), "tokens"),
        ("tree_tokens", forest.token_count, "tokens"),
        ("longest_path", int(forest.position_N.max()) + 1, "tokens"),
        ("requests", len(ways.samples), "requests"),
        ("requests_timed", times.requests, "requests"),
        ("per_request_s", times.per_request.total_s, "s"),
        ("per_request_error", times.per_request.error, "share"),
        ("requests_packed", len(ways.packed), "requests"),
        ("packed_s", packed_s, "s"),
        ("append_s", times.append_s, "s"),
        ("tree_s", times.tree_s, "s"),
        ("tree_spread", times.spread, "share"),
        ("head_s", times.head_s, "s"),
        ("compilations", times.compilations, "compilations"),
        ("is_varlen", float(_is_varlen(ways.loaded, whole_plan(forest))), ""),
        *_utilisation("", machine, tree, seconds=times.tree_s),
        *_utilisation("per_request_", machine, alone, seconds=times.per_request.total_s),
        *_utilisation("packed_", machine, alone, seconds=packed_s),
    ]


def whole_plan(forest: Forest) -> AttentionPlan:
    """The attention plan of the tree at once."""
    return attention_plan(pieces(forest), start=0, end=forest.token_count)


def _is_varlen(loaded: LoadedModel, plan: AttentionPlan) -> bool:
    """True if a GPU runs flash over pieces, False if it runs the block mask."""
    policy = loaded.policy
    head_size = policy.shape.key_size // policy.key_heads
    return attention_kind(plan, dtype=policy.head_VH.dtype, head_size=head_size) == "varlen"


def _utilisation(prefix: str, machine: Machine, wanted: Flops, *, seconds: float) -> list[Row]:
    """The formula's operations per second, and their share of the device's peak if it is known."""
    rate = wanted.total / seconds
    rows = [(f"{prefix}tflops", rate / 1e12, "TFLOP/s")]
    if machine.peak_flops_per_s is not None:
        rows.append((f"{prefix}model_flop_utilisation", rate / machine.peak_flops_per_s, "share"))
    return rows


def _block_rows(
    machine: Machine, blocks: Microbatch, tree: Flops, *, seconds: float, peak_bytes: int
) -> list[Row]:
    return [
        ("tree_s", seconds, "s"),
        *_utilisation("", machine, tree, seconds=seconds),
        ("blocks", len(blocks.blocks), "blocks"),
        ("recomputed_layers", blocks.recomputed_layers, "layers"),
        ("is_offloaded", float(blocks.is_offloaded), ""),
        ("predicted", blocks.predicted_bytes / GIBIBYTE, "GiB"),
        ("peak", peak_bytes / GIBIBYTE, "GiB"),
        ("peak_over_predicted", peak_bytes / blocks.predicted_bytes, "x"),
    ]


def compare_gradients(measurement: Measurement, case: Case, machine: Machine) -> None:
    """Measure how far the tree's gradients are from the requests', in each way of training it."""
    samples = requests(case.tree)
    forest = read_tree(merged_tree(samples))
    loaded = made_model(machine, layers=SAME_GRADIENTS_LAYERS)

    count = forest.token_count
    recomputed, cut = (
        Ways(machine, loaded, samples, forest, blocks=plan)
        for plan in (
            Microbatch(groups=(0,), blocks=((0, count),), recomputed_layers=1),
            Microbatch(groups=(0,), blocks=((0, count // 2), (count // 2, count))),
        )
    )
    trains = [recomputed.tree, recomputed.tree_in_blocks, cut.tree_in_blocks]
    for way, difference in zip(
        ("", ", recomputed", ", blocks"), gradient_differences(recomputed, trains), strict=True
    ):
        measurement.row(f"{SAME_GRADIENTS}{way}", "gradient_difference", difference, "share")


def compare_attention(
    measurement: Measurement,
    name: str,
    case: Case,
    machine: Machine,
    *,
    both: Mapping[AttentionKind, AttentionBackend],
) -> None:
    """Time the tree at once by each of a GPU's ways, with the numbers that choose between them."""
    forest = read_tree(merged_tree(requests(case.tree)))
    loaded = _model_for(measurement, name, forest, machine)
    if loaded is None:
        return
    plan = whole_plan(forest)

    def by(attention: AttentionBackend) -> Callable[[], float]:
        forced = replace(loaded, policy=replace(loaded.policy, attention=attention))
        return lambda: train_trees(forced, [forest], clock=machine.now_s)

    seconds = interleaved({kind: by(attention) for kind, attention in both.items()})
    packed_keys = sum(end - start for _, _, start, end in plan.rectangles)
    for metric, value, unit in [
        ("tree_s_varlen", seconds["varlen"], "s"),
        ("tree_s_flex", seconds["flex"], "s"),
        ("flex_over_varlen", seconds["flex"] / seconds["varlen"], "x"),
        ("is_varlen", float(_is_varlen(loaded, plan)), ""),
        ("rectangles", len(plan.rectangles), "rectangles"),
        ("packed_keys", packed_keys / forest.token_count, "x"),
        ("layers", loaded.policy.shape.layers, "layers"),
    ]:
        measurement.row(name, metric, value, unit)


def measure_unscaled(measurement: Measurement, name: str, case: Case, machine: Machine) -> None:
    """Measure the unscaled model on a tree in blocks; its longest requests would not fit whole."""
    samples = requests(case.tree)
    forest = read_tree(merged_tree(samples))
    loaded = made_model(machine, layers=machine.model["num_hidden_layers"])
    blocks = case.blocks(forest, loaded.policy.shape)
    assert blocks is not None
    ways = Ways(machine, loaded, samples, forest, blocks=blocks)
    ways.tree_in_blocks()  # Makes the parameters' gradients and compiles.
    compiled = compilations()
    seconds: list[float] = []
    # One run, which takes a minute, gives both time and peak: a GPU counts its peak at no cost.
    peak_bytes = peak_allocated_bytes(
        lambda: seconds.append(ways.tree_in_blocks()), device=str(machine.device)
    )
    tree = flops_of_tree(loaded.policy.shape, forest)
    for metric, value, unit in [
        ("tree_tokens", forest.token_count, "tokens"),
        ("longest_path", int(forest.position_N.max()) + 1, "tokens"),
        *_block_rows(machine, blocks, tree, seconds=seconds[0], peak_bytes=peak_bytes),
        ("compilations", compilations() - compiled, "compilations"),
    ]:
        measurement.row(name, metric, value, unit)


def cuda_machine() -> Machine:
    """The first CUDA device and a Qwen3-8B in bfloat16."""
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        model=QWEN3_8B,
        memory_bytes=int(properties.total_memory * MEMORY_SHARE),
        peak_flops_per_s=PEAK_FLOPS_PER_S.get(properties.name),
    )


def both_ways(machine: Machine) -> dict[AttentionKind, AttentionBackend]:
    """A GPU's two ways of tree attention, each fixed for all trees."""
    head_size = machine.model["head_dim"]
    return {
        "varlen": GpuAttention(head_size=head_size, kind="varlen", varlen=choose_kernel(head_size)),
        "flex": GpuAttention(head_size=head_size, kind="flex"),
    }


def above_limits(measurement: Measurement) -> list[str]:
    """Rows above their limits: compilations while timed, unequal gradients."""
    return [
        f"{case} {metric} = {value:.4g}, at most {LIMITS[metric]}"
        for case, metric, value, _ in measurement.rows
        if value > LIMITS.get(metric, float("inf"))
    ]


def main() -> int:
    """Measure the cases that the arguments name, by default all of the scaled model."""
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        print("tree_training_gpu needs a CUDA device; torch sees none here", file=sys.stderr)
        return EXIT_NO_DEVICE
    machine = cuda_machine()
    if is_flash4_here():  # The baselines get the kernels that the tree has.
        torch.nn.attention.activate_flash_attention_impl("FA4")
    measurement = Measurement(
        name="tree_training_gpu",
        question="What share of its FLOP ratio and of a GPU's peak does tree training reach?",
        conditions={
            "device": torch.cuda.get_device_name(machine.device),
            "model": ", ".join(f"{key} {value}" for key, value in QWEN3_8B.items()),
            "layers": f"as many as fit into {machine.memory_bytes / GIBIBYTE:.0f} GiB",
            "dtype": f"bfloat16; float32 products: {torch.get_float32_matmul_precision()}",
            "flash attention": "flash-attn-4" if is_flash4_here() else "torch's own",
            "baseline": "unpadded, the same flash attention, some requests and a fit",
            "torch": torch.__version__,
        },
    )
    try:
        for name in options.case or (SAME_GRADIENTS, *CASES):
            if name == SAME_GRADIENTS:
                compare_gradients(measurement, GRADIENT_CASE, machine)
            elif name in UNSCALED_CASES:
                measure_unscaled(measurement, name, UNSCALED_CASES[name], machine)
            elif name.endswith(BOTH_WAYS):
                case = CASES[name.removesuffix(BOTH_WAYS)]
                compare_attention(measurement, name, case, machine, both=both_ways(machine))
            else:
                measure(measurement, name, CASES[name], machine)
            release()
    finally:  # A failure must not lose the rows measured before it.
        status = measurement.finish(options.json)
    broken = above_limits(measurement)
    for line in broken:
        print(f"above its limit: {line}")
    return 1 if broken else status


if __name__ == "__main__":
    sys.exit(main())
