"""Norm and rotary embedding that compute in at least fp32; puts them and `routers.py` into a model.

The stock modules of transformers cast to exactly fp32, which also rounds a float64 model down:
tree and per-request gradients then differ by 1e-7 for reasons that have nothing to do with trees.
These modules compute the same in the wider of float32 and the model's dtype. Parameters keep their
names, so weights load and save unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forgemq_trainer.core.pointwise import Normed, wide_dtype
from forgemq_trainer.core.routers import (
    ROUTERS,
    ChosenSoftmaxRouter,
    ExpertRouter,
    SigmoidRouter,
    TopKRouter,
)

STATIC_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the sequence's length, so that requests of
different lengths can share a token's activations."""


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in at least fp32, rounded once at the end."""

    def __init__(self, weight: nn.Parameter, *, eps: float, is_centred: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.is_centred = is_centred

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm over the last dimension, times the weight, or 1 plus it; the input's dtype."""
        weight = self.weight.to(wide_dtype(hidden.dtype)) + 1 if self.is_centred else self.weight
        output = Normed.apply(hidden, weight, self.eps)
        assert isinstance(output, Tensor)
        return output


class RotaryAngles(nn.Module):
    """Cosines and sines of positions, in at least fp32 for every dtype of the model."""

    def __init__(self, frequency: Tensor, *, scaling: float, is_doubled: bool = True) -> None:
        super().__init__()
        self.frequency = nn.Buffer(frequency, persistent=False)
        self.scaling = scaling
        self.is_doubled = is_doubled

    @torch.no_grad()
    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [rows, T, D]; only the dtype of `hidden` is used."""
        wide = wide_dtype(hidden.dtype)
        angle = position_ids[..., None].to(wide) * self.frequency.to(wide)
        # The layout of transformers' rotate_half: both halves of a head have the same angles.
        angle = torch.cat([angle, angle], dim=-1) if self.is_doubled else angle
        return angle.cos() * self.scaling, angle.sin() * self.scaling


class LayeredRotaryAngles(nn.Module):
    """The cosines and sines of a model whose layers of different kinds turn at different rates."""

    def __init__(self, kinds: dict[str, RotaryAngles]) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict(kinds)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, layer_type: str
    ) -> tuple[Tensor, Tensor]:
        """Of the layers of this kind, as `RotaryAngles`."""
        angles: tuple[Tensor, Tensor] = self.kinds[layer_type](hidden, position_ids)
        return angles


PRECISE = (RmsNorm, RotaryAngles, LayeredRotaryAngles, *ROUTERS)
"""The modules of this file and of `routers.py`, which replace those of transformers."""

CENTRED_NORMS = ("Gemma3RMSNorm",)
"""Norms of transformers whose factor is 1 plus their weight."""

PLAIN_ANGLES = ("GptOssRotaryEmbedding",)
"""Rotary embeddings of transformers that give each angle once; the others give it for both halves
of a head."""


def make_precise(model: nn.Module) -> None:
    """Replace the model's norms, rotary embedding and routers by those of this file.

    Idempotent: modules of this file stay, with their attributes.

    Raises:
        ValueError: a rotary type depends on the sequence, a router is of an unknown class, or no
            norm was found to replace.
    """
    for name, module in list(model.named_modules()):
        precise = None if isinstance(module, PRECISE) else _precise(module)
        if precise is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, precise)
    if not any(isinstance(module, RmsNorm) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no RMSNorm with weight and variance_epsilon")


def _precise(module: Any) -> nn.Module | None:  # noqa: ANN401  # reads the attributes of many classes
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and isinstance(module.weight, nn.Parameter):
        is_centred = kind in CENTRED_NORMS
        eps = float(module.eps if is_centred else module.variance_epsilon)
        return RmsNorm(module.weight, eps=eps, is_centred=is_centred)
    if kind.endswith("RotaryEmbedding"):
        return _angles(module)
    if kind.lower().endswith("router"):
        return _router(module)
    return None


def _angles(module: Any) -> nn.Module:  # noqa: ANN401  # as above
    def of(rotary_type: str, prefix: str = "") -> RotaryAngles:
        if rotary_type not in STATIC_ROTARY_TYPES:
            raise ValueError(
                f"rope_type {rotary_type} depends on the sequence, so a tree cannot share it; "
                f"supported: {', '.join(STATIC_ROTARY_TYPES)}"
            )
        return RotaryAngles(
            module.get_buffer(f"{prefix}inv_freq"),
            scaling=float(getattr(module, f"{prefix}attention_scaling", 1.0)),
            is_doubled=type(module).__name__ not in PLAIN_ANGLES,
        )

    rotary_types = getattr(module, "rope_type", "default")
    if isinstance(rotary_types, dict):
        return LayeredRotaryAngles(
            {kind: of(each, f"{kind}_") for kind, each in rotary_types.items()}
        )
    return of(rotary_types)


def _router(module: Any) -> ExpertRouter:  # noqa: ANN401  # as above
    match type(module).__name__:
        case "Qwen3MoeTopKRouter":
            return TopKRouter(
                module.weight, top_k=module.top_k, is_normalised=bool(module.norm_topk_prob)
            )
        case "GptOssTopKRouter":
            return ChosenSoftmaxRouter(module.weight, module.bias, top_k=module.top_k)
        case "MiniMaxM2TopKRouter":  # Its block hands it the bias.
            return SigmoidRouter(module.weight, top_k=module.top_k)
        case "Glm4MoeTopkRouter" | "DeepseekV3TopkRouter":
            return SigmoidRouter(
                module.weight,
                top_k=module.top_k,
                correction_E=module.e_score_correction_bias,
                groups=module.num_group,
                groups_kept=module.topk_group,
                is_normalised=bool(module.norm_topk_prob),
                scaling=float(module.routed_scaling_factor),
            )
    raise ValueError(f"{type(module).__name__} is a router of an unknown kind")
