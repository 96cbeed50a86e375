"""Norm, rotary embedding and router that compute in at least fp32.

The stock modules of transformers cast to exactly fp32, which also rounds a float64 model down:
tree and per-request gradients then differ by 1e-7 for reasons that have nothing to do with trees.
These modules compute the same in the wider of float32 and the model's dtype. Parameters keep their
names, so weights load and save unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STATIC_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the sequence's length, so that requests of
different lengths can share a token's activations."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32, rounded once at the end."""

    def __init__(self, weight: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm over the last dimension, times the weight; the input's dtype."""
        output = _Normed.apply(hidden, self.weight, self.eps)
        assert isinstance(output, Tensor)
        return output


class _Normed(torch.autograd.Function):
    """Saves its input and one number for each row; torch's composite saves three further tensors.

    y = x s w with s = 1 / sqrt(mean(x^2) + eps); dx = s (g w - x s mean(g w x s)), means by row.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        hidden: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        wide = hidden.to(_wide(hidden.dtype))
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        # Rounded once, after the weight; the stock module of transformers rounds before it too.
        return (wide * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        hidden, weight, scale = ctx.saved_tensors
        grad = grad.to(scale.dtype)
        normed = hidden.to(scale.dtype) * scale
        product = grad * normed
        weight_grad = product.reshape(-1, hidden.shape[-1]).sum(0)
        along = product.mul_(weight).mean(-1, keepdim=True)
        hidden_grad = torch.mul(grad, weight, out=product)
        hidden_grad.sub_(normed.mul_(along)).mul_(scale)
        return hidden_grad.to(hidden.dtype), weight_grad.to(weight.dtype), None


class RotaryAngles(nn.Module):
    """Cosines and sines of positions, in at least fp32 for every dtype of the model."""

    def __init__(self, frequency: Tensor, *, scaling: float) -> None:
        super().__init__()
        self.frequency = nn.Buffer(frequency, persistent=False)
        self.scaling = scaling

    @torch.no_grad()
    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [rows, T, D]; only the dtype of `hidden` is used."""
        wide = _wide(hidden.dtype)
        angle = position_ids[..., None].to(wide) * self.frequency.to(wide)
        # The layout of transformers' rotate_half: both halves of a head have the same angles.
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * self.scaling, angle.sin() * self.scaling


class TopKRouter(nn.Module):
    """Router of a mixture of experts: softmax in at least fp32, then the best k. Dropless."""

    def __init__(self, weight: nn.Parameter, *, top_k: int, is_normalised: bool) -> None:
        super().__init__()
        self.weight = weight
        self.top_k = top_k
        self.is_normalised = is_normalised
        self.recorded_TK: Tensor | None = None
        """Experts to run instead of the best k, of any integer dtype; the number of experts, which
        is one past the last, stands for the best. Set before each forward."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router logits, weights of the chosen experts in at least fp32, and their indices.

        The weights are not rounded to the model's dtype, as the stock router of transformers does:
        the engine multiplies with them in fp32, and a rounded weight would add to the difference
        between the log-probabilities of both.
        """
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        shares = functional.softmax(logits, dim=-1, dtype=_wide(logits.dtype))
        weights, experts = torch.topk(shares, self.top_k, dim=-1)
        if self.recorded_TK is not None:
            # Only the choice is replayed; probabilities, hence gradients, are this router's own.
            recorded = self.recorded_TK.to(experts.dtype)
            experts = torch.where(recorded == shares.shape[-1], experts, recorded)
            weights = shares.gather(-1, experts)
        if self.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, experts


PRECISE = (RmsNorm, RotaryAngles, TopKRouter)
"""The modules of this file, which replace those of transformers."""


def make_precise(model: nn.Module) -> None:
    """Replace the model's norms, rotary embedding and routers by those of this file.

    Idempotent: modules of this file stay, with their attributes.

    Raises:
        ValueError: a rotary type depends on the sequence, or no norm was found to replace.
    """
    for name, module in list(model.named_modules()):
        precise = None if isinstance(module, PRECISE) else _precise(module)
        if precise is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, precise)
    if not any(isinstance(module, RmsNorm) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no RMSNorm with weight and variance_epsilon")


def _precise(module: nn.Module) -> nn.Module | None:
    kind = type(module).__name__
    weight = getattr(module, "weight", None)
    if kind.endswith("RMSNorm") and isinstance(weight, nn.Parameter):
        return RmsNorm(weight, eps=float(getattr(module, "variance_epsilon")))  # noqa: B009
    if kind.endswith("RotaryEmbedding"):
        rotary_type = getattr(module, "rope_type", "default")
        if rotary_type not in STATIC_ROTARY_TYPES:
            raise ValueError(
                f"rope_type {rotary_type} depends on the sequence, so a tree cannot share it; "
                f"supported: {', '.join(STATIC_ROTARY_TYPES)}"
            )
        frequency = module.get_buffer("inv_freq")
        return RotaryAngles(frequency, scaling=float(getattr(module, "attention_scaling", 1.0)))
    if kind.endswith("TopKRouter") and isinstance(weight, nn.Parameter):
        return TopKRouter(
            weight,
            top_k=int(getattr(module, "top_k")),  # noqa: B009
            is_normalised=bool(getattr(module, "norm_topk_prob", False)),
        )
    return None
