"""How far a draft head's distributions are from the policy's: top-K KL with one tail bucket.

The buckets of a row are the policy's K most likely tokens, one each, and all other tokens together.
The loss is the Kullback-Leibler divergence of the policy's buckets (p) from the head's (q):

    sum over the buckets of p (log p - log q), nats

so it is at least 0, and 0 exactly if both give every bucket the same probability. Without the tail
it could be below 0, and a head would gain by giving tokens beyond the K more than the policy does.

The gradient for the head's logits is q - p for a top token and q - p_tail q / q_tail for another.
Logits exist for `chunk` rows at a time and once only, as the loss and its gradient are taken
together. p is a constant: no gradient leaves for the policy.

Shapes: T rows, C rows of a chunk, H hidden size, V vocabulary, K top tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from forgemq_trainer.core.logprobs import products_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTotals:
    """Sums over rows.

    Attributes:
        rows: How many.
        loss: Of the losses, nats, without any weight.
        overlap: Of sum over V of min(p, q), 0..1 a row: the share of tokens drawn from the head
            that exact speculative sampling accepts.
    """

    rows: int = 0
    loss: float = 0.0
    overlap: float = 0.0

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        """Sums over the rows of both."""
        return DraftTotals(
            rows=self.rows + other.rows,
            loss=self.loss + other.loss,
            overlap=self.overlap + other.overlap,
        )


@torch.no_grad()
def draft_loss(
    state_TH: Tensor,
    teacher_TH: Tensor,
    head_VH: Tensor,
    *,
    is_row_T: Tensor,
    top_k: int,
    chunk: int,
) -> tuple[DraftTotals, Tensor]:
    """Sums over the rows, and the gradient of the summed loss for the head's states.

    Args:
        state_TH: Final states of the draft head.
        teacher_TH: Final hidden states of the policy at the same tokens.
        head_VH: Weights of the policy's language-model head, which both use.
        is_row_T: False for tokens that count nothing; their gradient is 0.
        top_k: K; at most V of them are used.
        chunk: Rows of logits that exist at once, at least 1.

    Returns:
        The sums, and [T, H] of the states' dtype.
    """
    wide = torch.promote_types(state_TH.dtype, torch.float32)
    head = head_VH.to(wide)
    grad_TH = torch.empty_like(state_TH)
    sums = torch.zeros(2, dtype=torch.float64, device=state_TH.device)
    for start in range(0, len(state_TH), chunk):
        rows = slice(start, start + chunk)
        is_row_C = is_row_T[rows].to(wide)
        with products_of(state_TH.dtype):
            teacher = teacher_TH[rows].to(state_TH.device, wide) @ head.t()
            logits = state_TH[rows].to(wide) @ head.t()
        loss_C, overlap_C, slope = _compare(teacher, logits, top_k=min(top_k, len(head)))
        sums[0] += (loss_C * is_row_C).sum()
        sums[1] += (overlap_C * is_row_C).sum()
        with products_of(state_TH.dtype):
            grad_TH[rows] = (slope.mul_(is_row_C[:, None]) @ head).to(grad_TH.dtype)
    loss, overlap = sums.tolist()
    return DraftTotals(rows=int(is_row_T.sum()), loss=loss, overlap=overlap), grad_TH


def _compare(teacher: Tensor, logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, overlap and gradient of each row; overwrites both arguments."""
    p = teacher.sub_(teacher.logsumexp(-1, keepdim=True)).exp_()
    top_p, top = p.topk(top_k, dim=-1)
    tail_p = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
    top_log_q = log_q.gather(-1, top)
    # From the tail's own terms: 1 - sum(top) would lose all digits of a tail near 0.
    tail_log_q = log_q.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    loss = _divergence(top_p, top_log_q).sum(-1) + _divergence(tail_p, tail_log_q)[:, 0]
    q = log_q.exp()
    overlap = torch.minimum(p, q, out=p).sum(-1)
    # q / q_tail as one exponential: the quotient p_tail / q_tail may exceed every float. If no
    # token is left for the tail, its log is -inf, and so would the difference be no number.
    tail_log_q.clamp_(min=torch.finfo(log_q.dtype).min)
    owed = torch.sub(log_q, tail_log_q, out=p).exp_().mul_(tail_p)
    slope = q.sub_(owed).scatter_(-1, top, top_log_q.exp_() - top_p)
    return loss, overlap, slope


def _divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Each bucket's p (log p - log q); 0 if p is 0, whatever q is."""
    return torch.where(p > 0, p * (p.log() - log_q), 0.0)
