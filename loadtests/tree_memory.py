"""Does a step stay within the memory that was predicted for it, and what does less memory cost?

Trees of several shapes train within a byte budget, each in a new process with the trainer's heap
settings. Two peaks are compared with the prediction:

- tensors: what torch's allocator held at once (its profiler counts each allocation);
- resident: the growth of the process's resident memory over `fixed`, its size before the step:
  interpreter, libraries, parameters, their gradients, the read tree.

`resident` does not count the file of offloaded keys, whose pages are the kernel's cache.

The case `ways` trains one tree whole with everything kept, with all layers recomputed but one, and
in blocks that need as much memory as that. All run in one process, in turn, on one heap.

`make load NAME=tree_memory JSON=memory.json`
"""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from measurement import Measurement, arguments
from torch_allocation import peak_allocated_bytes
from transformers import AutoConfig, AutoModelForCausalLM
from tree_timing import HEAD_CHUNK, LOSS
from tree_training import MEBIBYTE, MODEL
from tree_workloads import SHAPES, Shape, merged_tree, requests

from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.microbatches import path_microbatch, plan_step
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.heap import suit_heap
from forgemq_trainer.model import LoadedModel, prepare

SAMPLE_EVERY_S = 0.002
"""Between two reads of the resident size; a step takes seconds."""

PAGE_BYTES = 4096
"""Of the page size in /proc/self/statm on x86-64."""

Row = tuple[str, float, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tree, a budget and how it runs.

    Attributes:
        tree: Its shape.
        budget_share: Of the bytes that the tree takes whole.
        model: Changes to the fixed model.
        is_kept_here: True keeps the keys in memory that the plan offloads, for comparison.
        is_counted: True counts torch's allocations too, in a further run; False if keys lie in a
            file, for torch counts the file's bytes as well.
        threads: Of torch.
    """

    tree: Shape
    budget_share: float
    model: dict[str, int] = field(default_factory=dict)
    is_kept_here: bool = False
    is_counted: bool = True
    threads: int = 1


DEEP = Shape(rollouts=2, turns=60, prompt=1024, act=40, observe=60)
WIDE = Shape(rollouts=64, turns=4, prompt=512, act=24, observe=40)
LONG = Shape(rollouts=8, turns=30, prompt=512, act=40, observe=60)
PLAN_200K = Shape(rollouts=6, turns=40, prompt=14_000, act=260, observe=525)
"""Six rollouts of 31,000 tokens after a task of 14,000: the tree of the 8B plan."""

SCALED_8B = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 4748,
}
"""Qwen3-8B with 1/16 of its widths, 1/64 of its query size, 1/32 of its vocabulary, 2 layers."""

WAYS = "ways"
"""The case that compares kept, recomputed and blocks."""

WAYS_TREE = Shape(rollouts=2, turns=8, prompt=512, act=40, observe=60)
WAYS_LAYERS = 8
WAYS_ROUNDS = 2
"""After one that is not counted."""

CASES = {
    "small, room": Case(tree=SHAPES["A"], budget_share=4.0),
    "small, whole": Case(tree=SHAPES["A"], budget_share=1.0),
    "deep, blocks": Case(tree=DEEP, budget_share=0.25),
    "wide, blocks": Case(tree=WIDE, budget_share=0.15),
    "long, offloaded": Case(tree=LONG, budget_share=0.045, is_counted=False),
    "long, not offloaded": Case(tree=LONG, budget_share=0.045, is_kept_here=True, is_counted=False),
    "200k, scaled 8B": Case(
        tree=PLAN_200K, budget_share=0.043, model=SCALED_8B, is_counted=False, threads=2
    ),
}


def rows_of(case: Case) -> list[Row]:
    """Train the tree within its budget, in a new process; returns the case's rows."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **(MODEL | case.model))
    loaded = prepare(AutoModelForCausalLM.from_config(config))
    _train(loaded, read_tree(merged_tree(requests(Shape(rollouts=2, turns=2, prompt=64, act=16,
                                                       observe=16)))))  # fmt: skip
    forest, shape = read_tree(merged_tree(requests(case.tree))), loaded.policy.shape
    whole = shape.block_bytes(forest.token_count, chunk=HEAD_CHUNK, is_carried=False)
    budget = int(whole * case.budget_share)
    plan = planned(forest, shape, budget=budget)
    suit_heap(predicted_bytes=plan.predicted_bytes, budget_bytes=budget)
    run = replace(plan, is_offloaded=plan.is_offloaded and not case.is_kept_here)
    fixed = _anonymous_bytes()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    resident = resident_peak_bytes(lambda: _train(loaded, forest, run)) - fixed
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    rows: list[Row] = [
        ("tree_tokens", forest.token_count, "tokens"),
        ("longest_path", int(forest.position_N.max()) + 1, "tokens"),
        ("whole", whole / MEBIBYTE, "MiB"),
        ("budget", budget / MEBIBYTE, "MiB"),
        ("blocks", len(plan.blocks), "blocks"),
        ("is_offloaded", float(run.is_offloaded), ""),
        ("predicted", plan.predicted_bytes / MEBIBYTE, "MiB"),
        ("fixed", fixed / MEBIBYTE, "MiB"),
        ("resident", resident / MEBIBYTE, "MiB"),
        ("resident_over_predicted", resident / plan.predicted_bytes, "x"),
        ("budget_over_resident", budget / resident, "x"),
        ("cpu_s", cpu_s, "s"),
        ("wall_s", wall_s, "s"),
    ]
    if case.is_counted:
        tensors = peak_allocated_bytes(lambda: _train(loaded, forest, run))
        rows.append(("tensors", tensors / MEBIBYTE, "MiB"))
        rows.append(("tensors_over_predicted", tensors / plan.predicted_bytes, "x"))
    return rows


def rows_of_ways() -> list[Row]:
    """Train one tree in three ways; returns their seconds and peaks, also as ratios."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **(MODEL | {"num_hidden_layers": WAYS_LAYERS}))
    loaded = prepare(AutoModelForCausalLM.from_config(config))
    forest, shape = read_tree(merged_tree(requests(WAYS_TREE))), loaded.policy.shape
    tokens, layers = forest.token_count, shape.layers
    whole, recomputed = (
        Microbatch(
            groups=(0,),
            blocks=((0, tokens),),
            recomputed_layers=count,
            predicted_bytes=shape.block_bytes(
                tokens, chunk=HEAD_CHUNK, is_carried=False, recomputed_layers=count
            ),
        )
        for count in (0, layers - 1)
    )
    blocks = path_microbatch(
        0, forest, shape=shape, budget_bytes=recomputed.predicted_bytes, head_chunk=HEAD_CHUNK
    )
    suit_heap(predicted_bytes=0, budget_bytes=whole.predicted_bytes)  # It keeps what is freed.
    ways = {"kept": whole, "recomputed": recomputed, "blocks": blocks}
    cpu_s = dict.fromkeys(ways, 0.0)
    for count in range(1 + WAYS_ROUNDS):
        for name, way in ways.items():
            started_s = time.process_time()
            _train(loaded, forest, way)
            cpu_s[name] += (time.process_time() - started_s) * (count > 0)
    rows: list[Row] = [
        ("tree_tokens", tokens, "tokens"),
        ("recomputed_layers", recomputed.recomputed_layers, "layers"),
        ("blocks", len(blocks.blocks), "blocks"),
        ("is_offloaded", float(blocks.is_offloaded), ""),
    ]
    tensors = {
        name: peak_allocated_bytes(partial(_train, loaded, forest, way))
        for name, way in ways.items()
    }
    for name, way in ways.items():
        rows.append((f"{name}_cpu_s", cpu_s[name] / WAYS_ROUNDS, "s"))
        rows.append((f"{name}_tensors", tensors[name] / MEBIBYTE, "MiB"))
        rows.append((f"{name}_tensors_over_predicted", tensors[name] / way.predicted_bytes, "x"))
        rows.append((f"{name}_time_over_kept", cpu_s[name] / cpu_s["kept"], "x"))
        rows.append((f"{name}_tensors_over_kept", tensors[name] / tensors["kept"], "x"))
    return rows


def planned(forest: Forest, shape: ModelShape, *, budget: int) -> Microbatch:
    """The tree's only microbatch, as the trainer plans it."""
    (plan,) = plan_step(
        [forest],
        shape=shape,
        budget_bytes=budget,
        head_chunk=HEAD_CHUNK,
    )
    return plan


def resident_peak_bytes(run: Callable[[], None]) -> int:
    """The most resident bytes during `run` without pages of files, read every 2 ms."""
    stopped = threading.Event()
    peak = 0

    def watch() -> None:
        nonlocal peak
        while not stopped.wait(SAMPLE_EVERY_S):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        stopped.set()
        watcher.join()
    return peak


def _anonymous_bytes() -> int:
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(of_files)) * PAGE_BYTES


def _train(loaded: LoadedModel, forest: Forest, plan: Microbatch | None = None) -> None:
    whole = Microbatch(groups=(0,), blocks=((0, forest.token_count),))
    forward_backward(
        loaded.policy,
        Objective(forests=[forest], loss_weights=[1 / forest.entry_count], loss=LOSS),
        [plan or whole],
        head_chunk=HEAD_CHUNK,
    )


def main() -> int:
    """Measure the cases that the arguments name, by default all."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="tree_memory",
        question="Does a step stay within the memory that was predicted for it?",
        conditions={
            "model": ", ".join(f"{key} {value}" for key, value in MODEL.items()),
            "model of 200k": ", ".join(f"{key} {value}" for key, value in SCALED_8B.items()),
            "dtype": "float32, one thread; 200k: two",
            "torch": torch.__version__,
        },
    )
    processes = multiprocessing.get_context("spawn")
    for name in options.case or (*CASES, WAYS):
        with processes.Pool(1) as pool:
            rows = pool.apply(rows_of_ways) if name == WAYS else pool.apply(rows_of, (CASES[name],))
            for metric, value, unit in rows:
                measurement.row(name, metric, value, unit)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
