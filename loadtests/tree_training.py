"""What does tree training save over per-request and append-merged training, and is it all reached?

The same samples of one group, in one run, three ways: every request alone, unpadded, through
torch's causal flash attention; rollouts merged while a request extends the one before; the prefix
tree. All three use the same model, norms, chunked head and loss; the optimizer is excluded.
Rounds interleave the three; times are CPU seconds of this process, one thread. The per-request
time is a quadratic fit in length over a stratified sample of requests, its error is a row;
`--case headline_full` trains every request instead.

The FLOP formula is `forgemq.trainer.core.flops`; the head counts on loss entries only.

`make load NAME=tree_training JSON=tree.json`
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from measurement import Measurement, arguments
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from tree_workloads import SHAPES, VOCABULARY, Sample, append_merged, merged_tree, requests

from forgemq.contracts.run import Loss
from forgemq.trainer.allocation import peak_allocated_bytes
from forgemq.trainer.core.flops import Flops, flops, flops_of_tree
from forgemq.trainer.core.logprobs import Edges, edge_logprobs
from forgemq.trainer.core.loss import Entries, loss_function
from forgemq.trainer.core.memory import Microbatch, ModelShape
from forgemq.trainer.core.step import forward_backward
from forgemq.trainer.core.tree import Forest, read_tree
from forgemq.trainer.heap import keep_freed_memory
from forgemq.trainer.model import LoadedModel, prepared

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
"""The fixed shape: a Qwen3 of width 512. The head weighs as much against the layers as in an 8B."""

HEAD_CHUNK = 1024
ROUNDS = 2
SAMPLED_REQUESTS = 16
"""Of each case, stratified by length."""

LOSS = loss_function(Loss())
MEBIBYTE = 2**20


def flops_of_sequences(shape: ModelShape, samples: Sequence[Sample]) -> Flops:
    """Every sequence alone."""
    lengths = [len(sample.tokens) for sample in samples]
    return flops(
        shape,
        tokens=sum(lengths),
        pairs=sum(length * (length + 1) // 2 for length in lengths),
        rows=sum(len(sample.sampled) for sample in samples),
    )


def made_model() -> LoadedModel:
    """The fixed shape with random weights."""
    torch.manual_seed(0)
    return prepared(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL)))


class Sequences:
    """Trains sequences one by one: no padding, no mask, torch's causal flash attention."""

    def __init__(self, loaded: LoadedModel, samples: Sequence[Sample], *, entries: int) -> None:
        self._loaded = loaded
        self._samples = samples
        self._entries = entries

    def train(self, index: int) -> float:
        """Forward and backward of one sequence; returns its CPU seconds."""
        sample, policy = self._samples[index], self._loaded.policy
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        edges, entries = self._edges(sample, tokens), self._loss_entries(sample)
        self._loaded.model.set_attn_implementation("sdpa")
        started_s = time.process_time()
        output = policy.decoder(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens))[None],
            use_cache=False,
        )
        rows = output.last_hidden_state[0].index_select(0, edges.source_R)
        logprob, _ = edge_logprobs(rows, policy.head_VH, edges, chunk=HEAD_CHUNK)
        (LOSS(logprob, entries).loss.sum() / self._entries).backward()
        return time.process_time() - started_s

    def _edges(self, sample: Sample, tokens: Tensor) -> Edges:
        places = torch.from_numpy(sample.sampled)
        order = torch.arange(len(places))
        return Edges(
            entry_E=order,
            edge_of_entry_E=order,
            source_R=places - 1,
            temperature_R=torch.ones(len(places), dtype=torch.float64),
            row_J=order,
            target_J=tokens[places],
        )

    def _loss_entries(self, sample: Sample) -> Entries:
        behaviour = torch.from_numpy(sample.behaviour)
        zeros = torch.zeros(len(behaviour), dtype=torch.long)
        return Entries(
            behaviour=behaviour,
            advantage=torch.full_like(behaviour, sample.advantage),
            temperature=torch.ones_like(behaviour),
            version=zeros,
            token=zeros,
            sample=zeros,
            group=zeros,
            sample_count=1,
        )


def train_tree(loaded: LoadedModel, forest: Forest) -> float:
    """Forward and backward of the whole tree, as the trainer does it; returns its CPU seconds."""
    loaded.model.set_attn_implementation("forgemq_tree")
    started_s = time.process_time()
    forward_backward(
        loaded.policy,
        [forest],
        [Microbatch(groups=(0,), blocks=((0, forest.token_count),))],
        weights=[1 / forest.entry_count],
        loss=LOSS,
        head_chunk=HEAD_CHUNK,
    )
    return time.process_time() - started_s


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Seconds of a sequence as a quadratic of its length, fitted to measured ones.

    Attributes:
        total_s: predicted for all sequences.
        error: standard error of `total_s`, as a share of it.
    """

    total_s: float
    error: float


def fitted(lengths: Sequence[int], timed: Sequence[tuple[int, float]]) -> Fit:
    """The time of all sequences from a sample of them."""

    def powers(values: Sequence[int]) -> np.ndarray:
        length = np.asarray(values, dtype=np.float64) / 1000
        return np.stack([np.ones_like(length), length, length**2], axis=1)

    design, seconds = powers([length for length, _ in timed]), np.array([s for _, s in timed])
    coefficients, *_ = np.linalg.lstsq(design, seconds, rcond=None)
    wanted = powers(lengths).sum(axis=0)
    residual = seconds - design @ coefficients
    variance = residual @ residual / max(1, len(timed) - 3)
    spread = wanted @ np.linalg.pinv(design.T @ design) @ wanted * variance
    total_s = float(wanted @ coefficients)
    return Fit(total_s=total_s, error=float(np.sqrt(spread)) / total_s)


def stratified(lengths: Sequence[int], *, count: int) -> list[int]:
    """Indices of sequences evenly spread over the order of their lengths."""
    order = np.argsort(lengths, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).astype(int))
    return [int(index) for index in order[places]]


@dataclass(frozen=True, kw_only=True)
class Times:
    """CPU seconds of the three ways, and what the estimate of the first may be off by."""

    per_request: Fit
    append_s: float
    tree_s: float


def timed(case: str, loaded: LoadedModel, samples: list[Sample], forest: Forest) -> Times:
    """The three ways in turns, until each was measured in every round."""
    merged = append_merged(samples)
    is_full = case.endswith("_full")
    lengths = [len(sample.tokens) for sample in samples]
    chosen = range(len(samples)) if is_full else stratified(lengths, count=SAMPLED_REQUESTS)
    alone = Sequences(loaded, samples, entries=forest.entry_count)
    appended = Sequences(loaded, merged, entries=forest.entry_count)
    nothing_merges = len(merged) == len(samples)
    seconds: list[tuple[int, float]] = []
    append_s = tree_s = 0.0
    for turn in range(ROUNDS):
        tree_s += train_tree(loaded, forest) / ROUNDS
        seconds += [(lengths[i], alone.train(i)) for i in list(chosen)[turn::ROUNDS]]
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
    """All rows of one case; returns the share of the FLOP ratio that was reached."""
    samples = requests(SHAPES[case.removesuffix("_full")])
    merged, forest = append_merged(samples), read_tree(merged_tree(samples))
    shape = loaded.policy.shape
    alone, appended = (flops_of_sequences(shape, sequences) for sequences in (samples, merged))
    tree = flops_of_tree(shape, forest)
    memory = _memory(loaded, samples, forest)
    train_tree(loaded, forest)  # The heap has its pages: as in any step but the first.
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
    """Peaks of what torch allocates beyond the weights, gradients included."""
    longest = max(range(len(samples)), key=lambda index: len(samples[index].tokens))
    alone = Sequences(loaded, samples, entries=forest.entry_count)

    def peak(run: Callable[[], object]) -> float:
        loaded.model.zero_grad()
        return peak_allocated_bytes(run) / MEBIBYTE

    tree, request = peak(lambda: train_tree(loaded, forest)), peak(lambda: alone.train(longest))
    return [
        ("peak_memory_ratio", tree / request, "x"),
        ("tree_peak", tree, "MiB"),
        ("longest_request_peak", request, "MiB"),
    ]


def main() -> int:
    """Measure the cases that were asked for, by default all but the full one."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    keep_freed_memory()  # As the trainer does; the baselines run in the same heap.
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
    train_tree(loaded, read_tree(merged_tree(requests(SHAPES["A"]))))  # Warms the kernels.
    reached = {case: measure(measurement, case, loaded) for case in options.case or SHAPES}
    usual = [share for case, share in reached.items() if not case.startswith("headline")]
    if usual:
        measurement.row("A to F", "flop_ratio_reached", prod(usual) ** (1 / len(usual)), "share")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
