"""One group, ready to train every way on one device: alone, packed, appended, as a tree, in blocks.

Knows no case and prints nothing. Each method of `Ways` is one measurement; `timed` and `peaks` take
them in turns.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from scaled_model import CAUSAL_FLASH, Machine
from torch import Tensor, nn
from torch._dynamo.utils import counters
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

from forgemq_trainer.allocation import peak_allocated_bytes
from forgemq_trainer.core.attention.gpu_attention import AttentionKind
from forgemq_trainer.core.logprobs import Edges, edge_logprobs, edges_of
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import LoadedModel

ROUNDS = 3
SAMPLED_MAX = 24
SAMPLED_MIN = 6
"""Requests that are timed, stratified by length; a quadratic has three coefficients."""

SAMPLED_FLOPS_MAX = 6e15
"""Of the timed requests of one group: 20 s at 300 TFLOP/s, and once more to warm up."""


class Ways:
    """Trains one group every way; each method returns its seconds and adds to the gradients."""

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
            machine: gives the clock.
            loaded: the model.
            samples: the requests.
            forest: their tree.
            blocks: as the trainer planned them; None where the tree is not cut.
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
        """Whether any request extends the one before it."""
        return len(self.merged) < len(self.samples)

    def request(self, index: int) -> float:
        """One request alone."""
        return self._alone.train(index)

    def requests_packed(self) -> float:
        """Some requests side by side, none merged: to a GPU one causal call a layer."""
        return train_trees(self.loaded, self.packed, clock=self.machine.now_s)

    def requests_appended(self) -> float:
        """The group, merged by appending."""
        return sum(self._appended.train(index) for index in range(len(self.merged)))

    def tree(self) -> float:
        """The tree at once."""
        return train_trees(self.loaded, [self.forest], clock=self.machine.now_s)

    def tree_in_blocks(self) -> float:
        """The tree in its blocks."""
        assert self.blocks is not None
        return train_trees(
            self.loaded, [self.forest], clock=self.machine.now_s, microbatch=self.blocks
        )

    def head(self) -> float:
        """The head of the whole tree by itself, which costs every way about the same."""
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
    """As many requests as fit, evenly spread over their lengths, each a tree of its own.

    Args:
        samples: the requests.
        tokens_max: of all that are taken, at least those of the shortest request.
    """
    lengths = [len(sample.tokens) for sample in samples]
    choices = (stratified(lengths, count=count) for count in range(len(samples), 0, -1))
    chosen = next(c for c in choices if sum(lengths[index] for index in c) <= tokens_max)
    return [read_tree(merged_tree([samples[index]])) for index in chosen]


def in_turns(trains: Mapping[AttentionKind, Callable[[], float]]) -> dict[AttentionKind, float]:
    """Median seconds of each, after each ran once; the rounds interleave them."""
    for train in trains.values():
        train()
    rounds = [[train() for train in trains.values()] for _ in range(ROUNDS)]
    return dict(zip(trains, map(median, zip(*rounds, strict=True)), strict=True))


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of each way: medians of the rounds, and a fit for the requests.

    Attributes:
        per_request: of all requests.
        packed_s: of the requests that were packed.
        append_s: of the merged sequences; that of the requests where nothing merges.
        tree_s: of the tree at once.
        blocks_s: of the tree in blocks, None where it is not cut.
        head_s: of the tree's head by itself.
        spread: of the tree at once, slowest round over fastest, less 1.
        requests: that were timed.
        compilations: in the timed part.
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
    """Every way, in turns, after each shape ran once."""
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
    for turn in range(ROUNDS):
        ways.loaded.model.zero_grad()
        for name, train in whole.items():
            seconds[name].append(train())
        of_requests += [(lengths[index], ways.request(index)) for index in chosen[turn::ROUNDS]]
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

    At least `SAMPLED_MIN` of them, at most `SAMPLED_MAX`; the shortest and the longest are there.
    """
    lengths = [len(sample.tokens) for sample in samples]
    for count in range(SAMPLED_MAX, SAMPLED_MIN, -1):
        chosen = stratified(lengths, count=count)
        wanted = flops_of_sequences(shape, [samples[index] for index in chosen])
        if wanted.total <= flops_max:
            return chosen
    return stratified(lengths, count=SAMPLED_MIN)


def compilations() -> int:
    """How often torch has compiled anything in this process so far."""
    return int(counters["frames"]["total"])


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most bytes that torch held at once beyond the parameters.

    Attributes:
        tree: at once; beyond the parameters' gradients too, as predictions count.
        blocks: likewise of the tree in blocks, None where it is not cut.
        tree_with_gradients: at once, every gradient made in this run.
        request_with_gradients: likewise of the longest request.
    """

    tree: int
    blocks: int | None
    tree_with_gradients: int
    request_with_gradients: int


def peaks(ways: Ways) -> Peaks:
    """Each way by itself."""
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
    """The most bytes in a second run, which finds the parameters' gradients made."""
    train()
    return peak_allocated_bytes(train, device=str(machine.device))


def gradient_differences(ways: Ways, trains: Sequence[Callable[[], object]]) -> list[float]:
    """How far the gradients of other ways are from those of every request alone.

    The requests' are summed in at least float32: their summation in the model's dtype is not what
    is compared.

    Returns:
        Of each way the largest norm of the difference over the norm of the gradient, over the
        parameters.
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
    """Give back what a model held, for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
