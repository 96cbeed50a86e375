"""One group that trains in several ways: alone, packed, appended, as a tree, in blocks.

Knows no case and prints nothing. Each method of `Ways` is one measurement; `timed` and `peaks` run
them in rounds.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from scaled_model import CAUSAL_FLASH, Machine
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch_allocation import peak_allocated_bytes
from tree_timing import (
    HEAD_CHUNK,
    Fit,
    Sequences,
    fitted,
    flops_of_sequences,
    stratified,
    train_trees,
)
from tree_workloads import Sample, append_merged, merged_tree

from forgemq_trainer.core.attention.gpu_attention import AttentionKind
from forgemq_trainer.core.logprobs import Edges, edge_logprobs, edges_of
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import LoadedModel

ROUNDS = 3
"""Measurements of each way: the fewest that have a median."""

SAMPLED_MAX = 24
"""Requests that are timed at most; with 16 the fit's error was below 1 % on a CPU."""

SAMPLED_MIN = 6
"""Requests that are timed at least: a quadratic has three coefficients, and an error needs more."""

SAMPLED_FLOPS_MAX = 3e15
"""Operations of the timed requests of one group: 6 s at 500 TFLOP/s, and as long to warm up."""


class Ways:
    """Trains one group in every way; each method returns its seconds and adds to the gradients."""

    def __init__(
        self,
        machine: Machine,
        loaded: LoadedModel,
        samples: Sequence[Sample],
        forest: Forest,
        *,
        blocks: Microbatch | None = None,
    ) -> None:
        """Prepare the ways.

        Args:
            machine: Gives the clock.
            loaded: The model.
            samples: The requests.
            forest: Their tree.
            blocks: As the trainer planned them; None if the tree is not cut.
        """
        self.machine, self.loaded = machine, loaded
        self.samples, self.merged = samples, append_merged(samples)
        self.forest, self.blocks = forest, blocks
        self.packed = unmerged(samples, tokens_max=forest.token_count)
        self._alone, self._appended = (
            Sequences(
                loaded,
                sequences,
                entries=forest.entry_count,
                attention=CAUSAL_FLASH,
                clock=machine.now_s,
            )
            for sequences in (samples, self.merged)
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of every request."""
        return [len(sample.tokens) for sample in self.samples]

    @property
    def is_appendable(self) -> bool:
        """True if any request extends the previous one."""
        return len(self.merged) < len(self.samples)

    def request(self, index: int) -> float:
        """Train one request alone."""
        return self._alone.train(index)

    def requests_packed(self) -> float:
        """Train some requests side by side, none merged: on a GPU one causal call per layer."""
        return train_trees(self.loaded, self.packed, clock=self.machine.now_s)

    def requests_appended(self) -> float:
        """Train the group, merged by appending."""
        return sum(self._appended.train(index) for index in range(len(self.merged)))

    def tree(self) -> float:
        """Train the tree at once."""
        return train_trees(self.loaded, [self.forest], clock=self.machine.now_s)

    def tree_in_blocks(self) -> float:
        """Train the tree in its blocks."""
        assert self.blocks is not None
        return train_trees(
            self.loaded, [self.forest], clock=self.machine.now_s, microbatch=self.blocks
        )

    def head(self) -> float:
        """Run the head of the whole tree alone, whose time is about the same in every way."""
        weight = self.loaded.policy.head_VH
        edges = edges_of(self.forest, start=0, end=self.forest.token_count)
        rows = torch.randn(
            (len(edges.source_R), weight.shape[1]),
            dtype=weight.dtype,
            device=weight.device,
            requires_grad=True,
        )
        on_device = Edges(
            entry_E=edges.entry_E,
            edge_of_entry_E=edges.edge_of_entry_E,
            source_R=edges.source_R,
            temperature_R=edges.temperature_R.to(weight.device),
            row_J=edges.row_J.to(weight.device),
            target_J=edges.target_J.to(weight.device),
        )
        started_s = self.machine.now_s()
        logprob, _ = edge_logprobs(rows, weight, on_device, chunk=HEAD_CHUNK)
        torch.autograd.backward(logprob.sum())
        return self.machine.now_s() - started_s


def unmerged(samples: Sequence[Sample], *, tokens_max: int) -> list[Forest]:
    """As many requests as fit, evenly spread over their lengths, one tree for each.

    Args:
        samples: The requests.
        tokens_max: Of all chosen requests; at least the tokens of the shortest one.
    """
    lengths = [len(sample.tokens) for sample in samples]
    choices = (stratified(lengths, count=count) for count in range(len(samples), 0, -1))
    chosen = next(c for c in choices if sum(lengths[index] for index in c) <= tokens_max)
    return [read_tree(merged_tree([samples[index]])) for index in chosen]


def interleaved(trains: Mapping[AttentionKind, Callable[[], float]]) -> dict[AttentionKind, float]:
    """Median seconds of each; each runs once before, and the rounds interleave them."""
    for train in trains.values():
        train()
    rounds = [[train() for train in trains.values()] for _ in range(ROUNDS)]
    return dict(zip(trains, map(median, zip(*rounds, strict=True)), strict=True))


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of each way: medians of the rounds, and a fit for the requests.

    Attributes:
        per_request: Of all requests.
        packed_s: Of the requests that were packed.
        append_s: Of the merged sequences; of the requests if none can be merged.
        tree_s: Of the tree at once.
        blocks_s: Of the tree in blocks; None if it is not cut.
        head_s: Of the tree's head alone.
        spread: Of the tree at once: slowest round over fastest, minus 1.
        requests: Number of requests that were timed.
        compilations: In the timed part.
    """

    per_request: Fit
    packed_s: float
    append_s: float
    tree_s: float
    blocks_s: float | None
    head_s: float
    spread: float
    requests: int
    compilations: int


def timed(ways: Ways) -> Times:
    """Time every way in interleaved rounds, after each shape ran once."""
    chosen = requests_to_time(ways.loaded.policy.shape, ways.samples)
    lengths = ways.lengths
    whole: dict[str, Callable[[], float]] = {
        "head": ways.head,
        "tree": ways.tree,
        "packed": ways.requests_packed,
    }
    if ways.blocks is not None:
        whole["blocks"] = ways.tree_in_blocks
    if ways.is_appendable:
        whole["append"] = ways.requests_appended
    for train in whole.values():
        train()
    for index in chosen:
        ways.request(index)
    seconds: dict[str, list[float]] = {name: [] for name in whole}
    of_requests: list[tuple[int, float]] = []
    compiled = compilations()
    for number in range(ROUNDS):
        ways.loaded.model.zero_grad()
        for name, train in whole.items():
            seconds[name].append(train())
        of_requests += [(lengths[index], ways.request(index)) for index in chosen[number::ROUNDS]]
    fit = fitted(lengths, of_requests)
    return Times(
        per_request=fit,
        packed_s=median(seconds["packed"]),
        append_s=median(seconds["append"]) if ways.is_appendable else fit.total_s,
        tree_s=median(seconds["tree"]),
        blocks_s=median(seconds["blocks"]) if ways.blocks is not None else None,
        head_s=median(seconds["head"]),
        spread=max(seconds["tree"]) / min(seconds["tree"]) - 1,
        requests=len(chosen),
        compilations=compilations() - compiled,
    )


def requests_to_time(
    shape: ModelShape, samples: Sequence[Sample], *, flops_max: float = SAMPLED_FLOPS_MAX
) -> list[int]:
    """Indices of as many requests as `flops_max` allows, evenly spread over their lengths.

    At least `SAMPLED_MIN` of them, at most `SAMPLED_MAX`, the shortest and the longest among them.
    """
    lengths = [len(sample.tokens) for sample in samples]
    for count in range(SAMPLED_MAX, SAMPLED_MIN, -1):
        chosen = stratified(lengths, count=count)
        wanted = flops_of_sequences(shape, [samples[index] for index in chosen])
        if wanted.total <= flops_max:
            return chosen
    return stratified(lengths, count=SAMPLED_MIN)


def compilations() -> int:
    """How many graphs torch has compiled in this process so far.

    Frames would count functions without a tensor too: torch looks at whatever runs within a
    compiled call, finalizers included.
    """
    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most bytes that torch held at once beyond the parameters.

    Attributes:
        tree: Of the tree at once, without the parameters' gradients, as predictions count.
        blocks: Of the tree in blocks, without the gradients; None if it is not cut.
        tree_with_gradients: Of the tree at once, with the gradients.
        request_with_gradients: Of the longest request, with the gradients.
    """

    tree: int
    blocks: int | None
    tree_with_gradients: int
    request_with_gradients: int


def peaks(ways: Ways) -> Peaks:
    """Measure the peak of each way."""
    lengths = ways.lengths
    longest = max(range(len(lengths)), key=lambda index: lengths[index])

    def with_gradients(train: Callable[[], object]) -> int:
        ways.loaded.model.zero_grad()
        return peak_allocated_bytes(train, device=str(ways.machine.device))

    return Peaks(
        tree=_peak_beyond_gradients(ways.machine, ways.tree),
        blocks=None
        if ways.blocks is None
        else _peak_beyond_gradients(ways.machine, ways.tree_in_blocks),
        tree_with_gradients=with_gradients(ways.tree),
        request_with_gradients=with_gradients(lambda: ways.request(longest)),
    )


def _peak_beyond_gradients(machine: Machine, train: Callable[[], object]) -> int:
    """The most bytes in a second run, when the parameters' gradients exist already."""
    train()
    return peak_allocated_bytes(train, device=str(machine.device))


def gradient_differences(ways: Ways, trains: Sequence[Callable[[], object]]) -> list[float]:
    """How far the gradients of other ways are from those of every request alone.

    The requests' gradients are summed in at least float32: the comparison is not about rounding in
    their summation.

    Returns:
        For each way, the largest share over the parameters: norm of the difference over norm of the
        gradient.
    """
    wanted = _gradients_alone(ways)
    worst = []
    for train in trains:
        ways.loaded.model.zero_grad()
        train()
        shares = [
            float((_gradient(parameter) - total).norm() / total.norm())
            for total, parameter in zip(wanted, ways.loaded.model.parameters(), strict=True)
        ]
        worst.append(max(shares))
    return worst


def _gradients_alone(ways: Ways) -> list[Tensor]:
    wide = torch.promote_types(ways.machine.dtype, torch.float32)
    parameters = list(ways.loaded.model.parameters())
    totals = [torch.zeros_like(parameter, dtype=wide) for parameter in parameters]
    for index in range(len(ways.samples)):
        ways.loaded.model.zero_grad()
        ways.request(index)
        for total, parameter in zip(totals, parameters, strict=True):
            total += _gradient(parameter)
    return totals


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def release() -> None:
    """Free the memory of a dropped model, for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
