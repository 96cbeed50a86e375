"""Trains the same samples one by one and as a tree, by any clock: what tree benchmarks share.

All ways use the same model, norms, chunked head and loss; only attention and sharing differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tree_workloads import Sample

from forgemq_contracts.run import Loss
from forgemq_trainer.core.flops import Flops, flops
from forgemq_trainer.core.logprobs import Edges, edge_logprobs
from forgemq_trainer.core.loss import Entries, loss_function
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.step import forward_backward
from forgemq_trainer.core.tree import Forest
from forgemq_trainer.model import ATTENTION_NAME, LoadedModel

HEAD_CHUNK = 1024
LOSS = loss_function(Loss())

Clock = Callable[[], float]
"""Seconds since some moment; of a GPU only once it has done all that it was given."""


def flops_of_sequences(shape: ModelShape, samples: Sequence[Sample]) -> Flops:
    """Every sequence alone."""
    lengths = [len(sample.tokens) for sample in samples]
    return flops(
        shape,
        tokens=sum(lengths),
        pairs=sum(length * (length + 1) // 2 for length in lengths),
        rows=sum(len(sample.sampled) for sample in samples),
    )


def forward_twice(once: Flops) -> Flops:
    """With one forward more, as blocks run it: that is 2 W t, 4 Q L p and 2 H V r of the formula.

    Args:
        once: by the formula of `forgemq_trainer.core.flops`.
    """
    return Flops(
        weights=once.weights * 8 / 6, attention=once.attention * 18 / 14, head=once.head * 10 / 8
    )


class Sequences:
    """Trains sequences one by one: no padding, no mask, causal attention of the given name."""

    def __init__(
        self,
        loaded: LoadedModel,
        samples: Sequence[Sample],
        *,
        entries: int,
        attention: str,
        clock: Clock,
    ) -> None:
        """Set what trains.

        Args:
            loaded: the model; its device is where sequences go.
            samples: the sequences.
            entries: of the whole group, the loss's denominator.
            attention: as `set_attn_implementation` of transformers knows it.
            clock: what seconds are read from.
        """
        self._loaded = loaded
        self._samples = samples
        self._entries = entries
        self._attention = attention
        self._clock = clock
        self._device = loaded.policy.head_VH.device

    def train(self, index: int) -> float:
        """Forward and backward of one sequence; returns its seconds."""
        sample, policy = self._samples[index], self._loaded.policy
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(self._device)
        edges, entries = self._edges(sample, tokens), self._loss_entries(sample)
        set_attention(self._loaded, self._attention)
        started_s = self._clock()
        output = policy.decoder(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens), device=self._device)[None],
            use_cache=False,
        )
        rows = output.last_hidden_state[0].index_select(0, edges.source_R)
        logprob, _ = edge_logprobs(rows, policy.head_VH, edges, chunk=HEAD_CHUNK)
        torch.autograd.backward(LOSS(logprob, entries).loss.sum() / self._entries)
        return self._clock() - started_s

    def _edges(self, sample: Sample, tokens: Tensor) -> Edges:
        places = torch.from_numpy(sample.sampled).to(self._device)
        order = torch.arange(len(places), device=self._device)
        return Edges(
            entry_E=order,
            edge_of_entry_E=order,
            source_R=places - 1,
            temperature_R=torch.ones(len(places), dtype=torch.float64, device=self._device),
            row_J=order,
            target_J=tokens[places],
        )

    def _loss_entries(self, sample: Sample) -> Entries:
        behaviour = torch.from_numpy(sample.behaviour).to(self._device)
        zeros = torch.zeros(len(behaviour), dtype=torch.long, device=self._device)
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


def set_attention(loaded: LoadedModel, name: str) -> None:
    """From here on every layer attends by the function registered under this name."""
    loaded.model.set_attn_implementation(name)  # type: ignore[operator]  # transformers' method


def at_once(forests: Sequence[Forest]) -> Microbatch:
    """All of them side by side as one block."""
    tokens = sum(forest.token_count for forest in forests)
    return Microbatch(groups=tuple(range(len(forests))), blocks=((0, tokens),))


def train_trees(
    loaded: LoadedModel,
    forests: Sequence[Forest],
    *,
    clock: Clock,
    microbatch: Microbatch | None = None,
) -> float:
    """Forward and backward of trees side by side, as the trainer does it; returns their seconds.

    Args:
        loaded: the model.
        forests: one for each group.
        clock: what seconds are read from.
        microbatch: their blocks; None is all at once.
    """
    entries = sum(forest.entry_count for forest in forests)
    set_attention(loaded, ATTENTION_NAME)
    started_s = clock()
    forward_backward(
        loaded.policy,
        forests,
        [microbatch or at_once(forests)],
        weights=[1 / entries] * len(forests),
        loss=LOSS,
        head_chunk=HEAD_CHUNK,
    )
    return clock() - started_s


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
