"""Norm, rotary embedding and router that compute in at least fp32.

The stock modules of transformers cast to exactly fp32, which also rounds a float64 model down:
tree and per-request gradients then differ by 1e-7 for reasons that have nothing to do with trees.
These modules compute the same in the wider of float32 and the model's dtype. Parameters keep their
names, so weights load and save unchanged.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgemq_trainer.core.pointwise import Normed, wide_dtype

STATIC_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the sequence's length, so that requests of
different lengths can share a token's activations."""


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32, rounded once at the end."""

    def __init__(self, weight: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm over the last dimension, times the weight; the input's dtype."""
        output = Normed.apply(hidden, self.weight, self.eps)
        assert isinstance(output, Tensor)
        return output


class RotaryAngles(nn.Module):
    """Cosines and sines of positions, in at least fp32 for every dtype of the model."""

    def __init__(self, frequency: Tensor, *, scaling: float) -> None:
        super().__init__()
        self.frequency = nn.Buffer(frequency, persistent=False)
        self.scaling = scaling

    @torch.no_grad()
    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [rows, T, D]; only the dtype of `hidden` is used."""
        wide = wide_dtype(hidden.dtype)
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
        shares = functional.softmax(logits, dim=-1, dtype=wide_dtype(logits.dtype))
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
