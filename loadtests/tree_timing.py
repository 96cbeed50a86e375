"""Trains the same samples one by one and as a tree, timed by a given clock.

All ways use the same model, norms, chunked head and loss; only attention and sharing differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tree_workloads import Sample

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.flops import Flops, flops
from forgemq_trainer.core.logprobs import Edges, edge_logprobs
from forgemq_trainer.core.loss import Entries, loss_function
from forgemq_trainer.core.memory import Microbatch, ModelShape
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest
from forgemq_trainer.model import ATTENTION_NAME, LoadedModel

HEAD_CHUNK = 1024
"""Rows of logits at once, the default of `trainer.head_chunk_tokens`."""

LOSS = loss_function(Loss())

Clock = Callable[[], float]
"""Seconds since some moment; a GPU's clock first waits until its queued work is finished."""


def flops_of_sequences(shape: ModelShape, samples: Sequence[Sample]) -> Flops:
    """FLOPs of training every sequence alone."""
    lengths = [len(sample.tokens) for sample in samples]
    return flops(
        shape,
        tokens=sum(lengths),
        pairs=sum(length * (length + 1) // 2 for length in lengths),
        rows=sum(len(sample.sampled) for sample in samples),
    )


def forward_twice(once: Flops) -> Flops:
    """FLOPs with the second forward of blocks, which is 2 W t, 4 Q L p and 2 H V r of the formula.

    Args:
        once: By the formula of `forgemq_trainer.core.flops`.
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
        """Train nothing yet.

        Args:
            loaded: The model; sequences are moved to its device.
            samples: The sequences.
            entries: Of the whole group, the loss's denominator.
            attention: A name for `set_attn_implementation` of transformers.
            clock: Gives the seconds.
        """
        self._loaded = loaded
        self._samples = samples
        self._entries = entries
        self._attention = attention
        self._clock = clock
        self._device = loaded.policy.head_VH.device

    def train(self, index: int) -> float:
        """Run one sequence forward and backward; returns its seconds."""
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
        sampled = torch.from_numpy(sample.sampled).to(self._device)
        order = torch.arange(len(sampled), device=self._device)
        return Edges(
            entry_E=order,
            edge_of_entry_E=order,
            source_R=sampled - 1,
            temperature_R=torch.ones(len(sampled), dtype=torch.float64, device=self._device),
            row_J=order,
            target_J=tokens[sampled],
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
    """Make every layer attend by the function registered under this name."""
    loaded.model.set_attn_implementation(name)  # type: ignore[operator]  # transformers' method


def at_once(forests: Sequence[Forest]) -> Microbatch:
    """One microbatch with all forests side by side in one block."""
    tokens = sum(forest.token_count for forest in forests)
    return Microbatch(groups=tuple(range(len(forests))), blocks=((0, tokens),))


def train_trees(
    loaded: LoadedModel,
    forests: Sequence[Forest],
    *,
    clock: Clock,
    microbatch: Microbatch | None = None,
) -> float:
    """Run trees side by side forward and backward, as the trainer does; returns their seconds.

    Args:
        loaded: The model.
        forests: One for each group.
        clock: Gives the seconds.
        microbatch: Their blocks; None runs all at once.
    """
    entries = sum(forest.entry_count for forest in forests)
    set_attention(loaded, ATTENTION_NAME)
    started_s = clock()
    forward_backward(
        loaded.policy,
        Objective(forests=forests, loss_weights=[1 / entries] * len(forests), loss=LOSS),
        [microbatch or at_once(forests)],
        head_chunk=HEAD_CHUNK,
    )
    return clock() - started_s


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Seconds of a sequence as a quadratic of its length, fitted to measured ones.

    Attributes:
        total_s: Predicted for all sequences.
        error: Standard error of `total_s`, as a share of it.
    """

    total_s: float
    error: float


def fitted(lengths: Sequence[int], timed: Sequence[tuple[int, float]]) -> Fit:
    """Estimate the time of all sequences from the times of some, by least squares."""

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
    ranks = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).astype(int))
    return [int(index) for index in order[ranks]]
