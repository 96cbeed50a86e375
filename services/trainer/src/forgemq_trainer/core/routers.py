"""Routers of mixtures of experts, which can run the experts that an engine chose. Dropless.

Only the choice is replayed: weights of the chosen experts, hence gradients, are the router's own.
A bias that corrects the choice has no part in the weights, so a replayed route does without it; it
is used for tokens without a route, is no parameter, and stays as it was loaded.

Weights are in at least fp32 and are not rounded to the model's dtype, as the stock routers of
transformers do: the engine multiplies with them in fp32, and a rounded weight would add to the
difference between the log-probabilities of both.

T tokens, K experts for each token, E experts.
"""

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgemq_trainer.core.pointwise import wide_dtype

SUM_MIN = 1e-20
"""Added to the sum that weights are divided by, as DeepSeek-V3's router does."""


def replayed(best_TK: Tensor, recorded_TK: Tensor | None, *, experts: int) -> Tensor:
    """The recorded experts, and the best ones if none is recorded.

    Args:
        best_TK: The router's own choice.
        recorded_TK: Of any integer dtype; `experts`, one past the last, stands for the best.
        experts: Their number.
    """
    if recorded_TK is None:
        return best_TK
    recorded = recorded_TK.to(best_TK.dtype)
    return torch.where(recorded == experts, best_TK, recorded)


class TopKRouter(nn.Module):
    """Softmax over all experts, then the best k.

    `recorded_TK` are the experts to run instead of the best k, as `replayed` takes them; set before
    each forward.
    """

    def __init__(self, weight: nn.Parameter, *, top_k: int, is_normalised: bool) -> None:
        super().__init__()
        self.weight, self.top_k = weight, top_k
        self.recorded_TK: Tensor | None = None
        self.is_normalised = is_normalised

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits, weights of the chosen experts in at least fp32, and their indices."""
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        shares = functional.softmax(logits, dim=-1, dtype=wide_dtype(logits.dtype))
        weights, experts = torch.topk(shares, self.top_k, dim=-1)
        if self.recorded_TK is not None:
            experts = replayed(experts, self.recorded_TK, experts=shares.shape[-1])
            weights = shares.gather(-1, experts)
        if self.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, experts


class ChosenSoftmaxRouter(nn.Module):
    """The best k, then softmax over these alone; `recorded_TK` as in `TopKRouter`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, *, top_k: int) -> None:
        super().__init__()
        self.weight, self.top_k = weight, top_k
        self.recorded_TK: Tensor | None = None
        self.bias = bias

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits, weights of the chosen experts in at least fp32, and their indices."""
        logits = functional.linear(hidden, self.weight, self.bias)
        best = torch.topk(logits, self.top_k, dim=-1).indices
        experts = replayed(best, self.recorded_TK, experts=logits.shape[-1])
        chosen = logits.gather(-1, experts)
        weights = functional.softmax(chosen, dim=-1, dtype=wide_dtype(logits.dtype))
        return logits, weights, experts


class SigmoidRouter(nn.Module):
    """A sigmoid for each expert; the best k by that plus a bias, perhaps within the best groups.

    Attributes:
        groups: Experts lie in so many groups of equal size.
        groups_kept: Groups to choose experts from; those with the largest sum of two experts.
        is_normalised: True if the weights of a token's experts sum to `scaling`.
        scaling: Multiplies the weights.
        recorded_TK: As in `TopKRouter`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        top_k: int,
        correction_E: Tensor | None = None,
        groups: int = 1,
        groups_kept: int = 1,
        is_normalised: bool = True,
        scaling: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight, self.top_k = weight, top_k
        self.recorded_TK: Tensor | None = None
        self.groups, self.groups_kept = groups, groups_kept
        self.is_normalised, self.scaling = is_normalised, scaling
        if correction_E is not None:  # By the name that it has in the files of weights.
            self.e_score_correction_bias = nn.Buffer(correction_E)

    def forward(
        self, hidden: Tensor, correction_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits, weights of the chosen experts in at least fp32, and their indices.

        Args:
            hidden: Of the tokens.
            correction_E: Added to the sigmoids for the choice; None is the router's own buffer.
        """
        wide = wide_dtype(self.weight.dtype)
        rows = hidden.reshape(-1, hidden.shape[-1]).to(wide)
        logits = functional.linear(rows, self.weight.to(wide))
        scores = logits.sigmoid()
        correction = self.e_score_correction_bias if correction_E is None else correction_E
        best = self._best(scores.detach() + correction)
        experts = replayed(best, self.recorded_TK, experts=scores.shape[-1])
        weights = scores.gather(-1, experts)
        if self.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SUM_MIN)
        return logits, weights * self.scaling, experts

    def _best(self, scores_TE: Tensor) -> Tensor:
        if self.groups_kept < self.groups:
            by_group = scores_TE.view(len(scores_TE), self.groups, -1)
            of_group = by_group.topk(2, dim=-1).values.sum(-1)
            kept = of_group.topk(self.groups_kept, dim=-1).indices
            is_kept = torch.zeros_like(of_group).scatter_(-1, kept, 1.0) > 0
            scores_TE = by_group.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)
        return torch.topk(scores_TE, self.top_k, dim=-1).indices


ROUTERS = (TopKRouter, ChosenSoftmaxRouter, SigmoidRouter)
ExpertRouter: TypeAlias = TopKRouter | ChosenSoftmaxRouter | SigmoidRouter
