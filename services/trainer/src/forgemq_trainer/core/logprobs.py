"""Log-probabilities of sampled tokens, through a language-model head in at least fp32.

Logits exist for `chunk` rows at a time, forward and again backward; the logits of a whole tree
never exist. A row is a distinct pair of (token that is continued, temperature); an edge is a row
and one sampled next token. Entries that share a tree token share its edge, siblings share a row.

Shapes: R rows, J edges, H hidden size, V vocabulary, E entries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.tree import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The log-probabilities that a run of tokens gives; edges are sorted by row.

    Attributes:
        entry_E: Indices of the forest's entries that continue these tokens.
        edge_of_entry_E: The edge of each of them.
        source_R: Layout index of the token that each row continues.
        temperature_R: Divides the row's logits.
        row_J: Row of each edge, ascending.
        target_J: Sampled token id of each edge.
    """

    entry_E: Tensor
    edge_of_entry_E: Tensor
    source_R: Tensor
    temperature_R: Tensor
    row_J: Tensor
    target_J: Tensor

    def to(self, device: torch.device) -> "Edges":
        """The same edges on another device."""
        return Edges(
            entry_E=self.entry_E.to(device),
            edge_of_entry_E=self.edge_of_entry_E.to(device),
            source_R=self.source_R.to(device),
            temperature_R=self.temperature_R.to(device),
            row_J=self.row_J.to(device),
            target_J=self.target_J.to(device),
        )


def edges_of(forest: Forest, *, start: int, end: int) -> Edges:
    """Edges that leave the tokens [start, end): a run of these tokens can compute their rows."""
    source_E = forest.parent_N[forest.entry_token_E]
    entry_E = np.flatnonzero((source_E >= start) & (source_E < end))
    token_E = forest.entry_token_E[entry_E]
    temperatures, temperature_E = np.unique(
        forest.entry_temperature_E[entry_E], return_inverse=True
    )
    # One integer for each pair, so that np.unique finds the distinct pairs, in ascending order.
    row_key_E = source_E[entry_E] * max(1, len(temperatures)) + temperature_E
    rows, row_E = np.unique(row_key_E, return_inverse=True)
    edge_key_E = row_E * forest.token_count + token_E
    edges, edge_of_entry_E = np.unique(edge_key_E, return_inverse=True)
    kinds = max(1, len(temperatures))
    return Edges(
        entry_E=torch.from_numpy(entry_E),
        edge_of_entry_E=torch.from_numpy(edge_of_entry_E.reshape(-1)),
        source_R=torch.from_numpy(rows // kinds),
        temperature_R=torch.from_numpy(temperatures[rows % kinds]),
        row_J=torch.from_numpy(edges // forest.token_count),
        target_J=torch.from_numpy(forest.tokens_N[edges % forest.token_count]),
    )


def edge_logprobs(
    hidden_RH: Tensor, head_VH: Tensor, edges: Edges, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each edge, and the entropy of each row (without gradient).

    Args:
        hidden_RH: Final hidden states of `edges.source_R`.
        head_VH: Weights of the head.
        edges: On the same device.
        chunk: Rows of logits that exist at once, at least 1.

    Returns:
        [J] and [R], nats, in at least fp32.
    """
    result: tuple[Tensor, Tensor] = _ChunkedHead.apply(hidden_RH, head_VH, edges, chunk)
    return result


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Inside this context, multiply matrices in TF32 if `dtype` is bfloat16, else in full float32.

    TF32 runs on CUDA's tensor cores, keeps 10 bits of each factor's mantissa and sums in float32.
    bfloat16 has 7 bits, so its values are exact in TF32 and the logits are those of float32. In
    backward the gradient of the logits is rounded to 10 bits, before its products are rounded to
    bfloat16.
    """
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if dtype == torch.bfloat16 else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        hidden_RH: Tensor,
        head_VH: Tensor,
        edges: Edges,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        row_J, target_J = edges.row_J, edges.target_J
        wide = torch.promote_types(hidden_RH.dtype, torch.float32)
        head = head_VH.to(wide)
        scale_R = edges.temperature_R.to(wide).reciprocal()
        lse_R = torch.empty_like(scale_R)
        entropy_R = torch.empty_like(scale_R)
        logprob_J = torch.empty(row_J.shape, dtype=wide, device=row_J.device)
        bounds = _chunk_bounds(row_J, rows=len(scale_R), chunk=chunk)
        for rows, run_J in bounds:
            with products_of(hidden_RH.dtype):
                logits = (hidden_RH[rows].to(wide) @ head.t()).mul_(scale_R[rows, None])
            lse = logits.logsumexp(-1)
            lse_R[rows] = lse
            chosen = logits[row_J[run_J] - rows.start, target_J[run_J]]
            logprob_J[run_J] = chosen - lse[row_J[run_J] - rows.start]
            share = (logits - lse[:, None]).exp_()
            entropy_R[rows] = lse - torch.einsum("rv,rv->r", share, logits)
        ctx.save_for_backward(hidden_RH, head_VH, scale_R, row_J, target_J, lse_R)
        ctx.bounds = bounds
        # Entropy is reported, never trained on; its backward would need the logits again.
        ctx.mark_non_differentiable(entropy_R)
        return logprob_J, entropy_R

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_J: Tensor,
        _entropy_grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        hidden_RH, head_VH, scale_R, row_J, target_J, lse_R = ctx.saved_tensors
        wide = lse_R.dtype
        head = head_VH.to(wide)
        hidden_grad = torch.empty_like(hidden_RH)
        # The head of a frozen model has no gradient.
        head_grad = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        # d logprob / d logits = onehot(target) - softmax(logits), hence for a row with gradients
        # g_j: sum_j g_j onehot(target_j) - (sum_j g_j) softmax. Logits are computed again: kept
        # from forward they would take V values a row.
        owed_R = torch.zeros_like(lse_R).index_add_(0, row_J, grad_J)
        for rows, run_J in ctx.bounds:
            hidden = hidden_RH[rows].to(wide)
            with products_of(hidden_RH.dtype):
                logits = (hidden @ head.t()).mul_(scale_R[rows, None])
            slope = logits.sub_(lse_R[rows, None]).exp_().mul_(-owed_R[rows, None])
            local_J = row_J[run_J] - rows.start
            slope.index_put_((local_J, target_J[run_J]), grad_J[run_J], accumulate=True)
            slope.mul_(scale_R[rows, None])
            with products_of(hidden_RH.dtype):
                hidden_grad[rows] = (slope @ head).to(hidden_grad.dtype)
                if head_grad is not None:
                    head_grad.addmm_(slope.t(), hidden)
        rounded = None if head_grad is None else head_grad.to(head_VH.dtype)
        return hidden_grad, rounded, None, None


def _chunk_bounds(row_J: Tensor, *, rows: int, chunk: int) -> list[tuple[slice, slice]]:
    """(rows, edges) of each chunk; edges are sorted by row, so both are contiguous."""
    starts = list(range(0, rows, chunk))
    edge_starts = torch.searchsorted(row_J, torch.tensor([*starts, rows], device=row_J.device))
    edges = edge_starts.tolist()
    return [
        (slice(start, min(start + chunk, rows)), slice(edges[i], edges[i + 1]))
        for i, start in enumerate(starts)
    ]
