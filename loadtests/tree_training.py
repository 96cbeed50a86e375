"""How much faster is tree training than per-request and append-merged training?

The same samples of one group train in three ways, in one run: every request alone, unpadded,
through torch's causal flash attention; requests merged with the previous one if they extend it; the
prefix tree. All three use the same model, norms, chunked head and loss; the optimizer is excluded.
Rounds interleave the three; times are CPU seconds of this process, one thread. The per-request
time is a quadratic fit in length over a stratified sample of requests, and its error is a row;
`--case headline_full` trains every request instead.

The FLOP formula is `forgemq_trainer.core.flops`; the head counts on loss entries only.

`make load NAME=tree_training JSON=tree.json`
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from measurement import Measurement, arguments
from torch_allocation import peak_allocated_bytes
from transformers import AutoConfig, AutoModelForCausalLM
from tree_timing import Fit, Sequences, fitted, flops_of_sequences, stratified, train_trees
from tree_workloads import SHAPES, VOCABULARY, Sample, append_merged, merged_tree, requests

from forgemq_trainer.core.flops import flops_of_tree
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.heap import keep_freed_memory
from forgemq_trainer.model import LoadedModel, prepare

MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""A Qwen3 of width 512 whose head has about the share of the work that it has in an 8B model."""

ROUNDS = 2
"""Measurements of each way, whose mean is reported: chosen for a run of minutes, not an hour."""

SAMPLED_REQUESTS = 16
"""Timed requests of each case, stratified by length: the fit's error is then below 1 %."""

A_TO_F = ("A", "B", "C", "D", "E", "F")
"""The shapes of real agent runs; the headline case shares more than they do."""

MEBIBYTE = 2**20


def made_model() -> LoadedModel:
    """Make the model with random weights."""
    torch.manual_seed(0)
    return prepare(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL)))


def sequences(loaded: LoadedModel, samples: list[Sample], *, entries: int) -> Sequences:
    """Sequences that train one by one through torch's causal attention, in CPU seconds."""
    return Sequences(loaded, samples, entries=entries, attention="sdpa", clock=time.process_time)


def whole(loaded: LoadedModel, forest: Forest) -> float:
    """Train the tree at once; returns this process's CPU seconds."""
    return train_trees(loaded, [forest], clock=time.process_time)


@dataclass(frozen=True, kw_only=True)
class Times:
    """CPU seconds of the three ways; that of the requests with its standard error."""

    per_request: Fit
    append_s: float
    tree_s: float


def timed(case: str, loaded: LoadedModel, samples: list[Sample], forest: Forest) -> Times:
    """Time the three ways in interleaved rounds."""
    merged = append_merged(samples)
    is_full = case.endswith("_full")
    lengths = [len(sample.tokens) for sample in samples]
    chosen = range(len(samples)) if is_full else stratified(lengths, count=SAMPLED_REQUESTS)
    alone = sequences(loaded, samples, entries=forest.entry_count)
    appended = sequences(loaded, merged, entries=forest.entry_count)
    nothing_merges = len(merged) == len(samples)
    seconds: list[tuple[int, float]] = []
    append_s = tree_s = 0.0
    for number in range(ROUNDS):
        tree_s += whole(loaded, forest) / ROUNDS
        seconds += [(lengths[i], alone.train(i)) for i in list(chosen)[number::ROUNDS]]
        if not nothing_merges:
            append_s += sum(appended.train(i) for i in range(len(merged))) / ROUNDS
        loaded.model.zero_grad()
    fit = fitted(lengths, seconds)
    if is_full:
        fit = Fit(total_s=sum(second for _, second in seconds), error=0.0)
    return Times(
        per_request=fit, append_s=fit.total_s if nothing_merges else append_s, tree_s=tree_s
    )


def measure(measurement: Measurement, case: str, loaded: LoadedModel) -> float:
    """Measure all rows of one case; returns the share of the FLOP ratio that was reached."""
    samples = requests(SHAPES[case.removesuffix("_full")])
    merged, forest = append_merged(samples), read_tree(merged_tree(samples))
    shape = loaded.policy.shape
    alone, appended = (flops_of_sequences(shape, sequences) for sequences in (samples, merged))
    tree = flops_of_tree(shape, forest)
    memory = _memory(loaded, samples, forest)
    whole(
        loaded, forest
    )  # Fills the heap: the first step of a process is slower than all later ones.
    times = timed(case, loaded, samples, forest)
    speedup = times.per_request.total_s / times.tree_s
    reached = speedup / (alone.total / tree.total)
    tokens = [sum(len(sample.tokens) for sample in group) for group in (samples, merged)]
    for name, value, unit in [
        ("flop_ratio_reached", reached, "share"),
        ("speedup_vs_per_request", speedup, "x"),
        ("speedup_vs_append", times.append_s / times.tree_s, "x"),
        ("token_ratio", tokens[0] / forest.token_count, "x"),
        ("flop_ratio", alone.total / tree.total, "x"),
        ("flop_ratio_weights", alone.weights / tree.weights, "x"),
        ("flop_ratio_attention", alone.attention / tree.attention, "x"),
        ("flop_ratio_vs_append", appended.total / tree.total, "x"),
        ("attention_share", tree.attention / tree.total, "share"),
        ("request_tokens", tokens[0], "tokens"),
        ("append_tokens", tokens[1], "tokens"),
        ("tree_tokens", forest.token_count, "tokens"),
        ("per_request_s", times.per_request.total_s, "s"),
        ("per_request_error", times.per_request.error, "share"),
        ("append_s", times.append_s, "s"),
        ("tree_s", times.tree_s, "s"),
        ("tree_gflops", tree.total / times.tree_s / 1e9, "GFLOP/s"),
        *memory,
    ]:
        measurement.row(case, name, value, unit)
    return reached


def _memory(
    loaded: LoadedModel, samples: list[Sample], forest: Forest
) -> list[tuple[str, float, str]]:
    """Peaks of what torch holds beyond the weights, gradients included."""
    longest = max(range(len(samples)), key=lambda index: len(samples[index].tokens))
    alone = sequences(loaded, samples, entries=forest.entry_count)

    def peak(run: Callable[[], object]) -> float:
        loaded.model.zero_grad()
        return peak_allocated_bytes(run) / MEBIBYTE

    tree, request = peak(lambda: whole(loaded, forest)), peak(lambda: alone.train(longest))
    return [
        ("peak_memory_ratio", tree / request, "x"),
        ("tree_peak", tree, "MiB"),
        ("longest_request_peak", request, "MiB"),
    ]


def reached_from_a_to_f(reached: Mapping[str, float]) -> float | None:
    """Geometric mean of the shares of cases A to F; None unless all six were measured."""
    if not all(case in reached for case in A_TO_F):
        return None
    return float(prod(reached[case] for case in A_TO_F) ** (1 / len(A_TO_F)))


def main() -> int:
    """Measure the cases that the arguments name, by default all but `headline_full`."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    keep_freed_memory()  # As the trainer does; the baselines use the same heap.
    measurement = Measurement(
        name="tree_training",
        question="What does tree training save, and how much of its FLOP ratio is reached?",
        conditions={
            "model": ", ".join(f"{key} {value}" for key, value in MODEL.items()),
            "dtype": "float32, one thread",
            "baseline": f"unpadded, causal flash, {SAMPLED_REQUESTS} requests and a fit",
            "torch": torch.__version__,
        },
    )
    loaded = made_model()
    whole(loaded, read_tree(merged_tree(requests(SHAPES["A"]))))  # Loads the kernels.
    reached = {case: measure(measurement, case, loaded) for case in options.case or SHAPES}
    usual = reached_from_a_to_f(reached)
    if usual is not None:
        measurement.row("A to F", "flop_ratio_reached", usual, "share")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
