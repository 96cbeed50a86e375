"""Low-rank adapters on the linear layers of a frozen model (LoRA, arXiv 2106.09685, section 4.1).

y = W x + b + scale B A x. W and b have no gradient and no optimizer state; A is drawn, B begins as
zeros, so that the first version is the base model.

T tokens, I inputs of a layer, O outputs, R rank.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgemq_contracts.lora import AdapterTarget, Lora

_KEY = "base_model.model.{layer}.lora_{factor}.weight"
"""Names a factor as the package peft writes it; SGLang reads these names."""


class AdaptedLinear(nn.Module):
    """A linear layer that stays, and two factors that train beside it.

    `weight` and `bias` are the layer's own, so their names are those of the model's file.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Take the layer's parameters; both factors are zeros."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        outputs, inputs = linear.weight.shape
        self.a_RI = nn.Parameter(linear.weight.new_zeros(rank, inputs))
        self.b_OR = nn.Parameter(linear.weight.new_zeros(outputs, rank))

    def forward(self, input_TI: Tensor) -> Tensor:
        """W x + b + scale B A x."""
        output_TO = functional.linear(input_TI, self.weight, self.bias)
        # Scaled where a token has R values; the sum in place, as nothing else reads W x.
        low_TR = functional.linear(input_TI, self.a_RI) * self.scale
        return output_TO.add_(functional.linear(low_TR, self.b_OR))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Sizes of a model's adapters that decide memory and cost.

    Attributes:
        rank: Of every adapter.
        targets: The layers that have one.
        parameters: Of all adapters of one decoder layer.
    """

    rank: int
    targets: tuple[AdapterTarget, ...]
    parameters: int

    def unkept_values(self, hidden: int, query_size: int, mlp_size: int) -> int:
        """Values of a token in a layer that autograd need not keep, less those of the adapters.

        An input is kept for the gradient of a factor A, and R values for that of B. In the first
        layer less is kept if nothing before its attention trains; that is not counted.

        Args:
            hidden: Size of the residual stream.
            query_size: Query heads times head size.
            mlp_size: Of a dense MLP; 0 if there is none.
        """
        targets = set(self.targets)
        unkept = 0 if targets & {"q_proj", "k_proj", "v_proj"} else hidden
        unkept += 0 if "o_proj" in targets else query_size
        if mlp_size:
            unkept += 0 if targets & {"gate_proj", "up_proj"} else hidden
            unkept += 0 if "down_proj" in targets else mlp_size
        return unkept - self.rank * len(targets)


def add_adapters(model: nn.Module, lora: Lora, *, seed: int) -> AdapterShape:
    """Freeze the model, and give the layers that `lora` names their adapters.

    Args:
        model: A causal language model of transformers.
        lora: Rank, scale and targets.
        seed: Of the factors A, which are drawn layer by layer.

    Returns:
        Sizes of the adapters.

    Raises:
        ValueError: A target is no linear layer of this model.
    """
    model.requires_grad_(requires_grad=False)
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in lora.targets and isinstance(module, nn.Linear)
    }
    has = {name.rpartition(".")[2] for name in found}
    for target in lora.targets:
        if target not in has:
            raise ValueError(
                f"lora.targets: {target} is no linear layer of {type(model).__name__}; of these it "
                f"has {', '.join(sorted(has)) or 'none'} (experts are one tensor, no linear layer)"
            )
    generator = torch.Generator().manual_seed(seed)
    parameters = 0
    for name, linear in found.items():
        adapted = AdaptedLinear(linear, rank=lora.rank, scale=lora.scale)
        # peft's: uniform within 1 / sqrt(I).
        drawn_RI = torch.rand(adapted.a_RI.shape, generator=generator).mul_(2).sub_(1)
        with torch.no_grad():
            adapted.a_RI.copy_(drawn_RI.div_(math.sqrt(linear.in_features)))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, adapted)
        parameters += adapted.a_RI.numel() + adapted.b_OR.numel()
    layers = len(found) // len(lora.targets)
    return AdapterShape(rank=lora.rank, targets=lora.targets, parameters=parameters // layers)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The factors of all adapters, by their names in the adapter's file."""
    tensors: dict[str, Tensor] = {}
    for name, layer in _adapted(model):
        a_name, b_name = factor_names(name)
        tensors |= {a_name: layer.a_RI.detach(), b_name: layer.b_OR.detach()}
    return tensors


@torch.no_grad()
def fill_adapters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the model's adapters these values.

    Raises:
        ValueError: they are those of other adapters.
    """
    own = adapter_tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise ValueError(f"the adapter's file must have the tensors of lora.targets: {name}")
        own[name].copy_(tensors[name])


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights of the model by name, with B A in them."""
    adapted = dict(_adapted(model))
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        layer, _, field = name.rpartition(".")
        if layer not in adapted:
            weights[name] = value
        elif field == "weight":
            own = adapted[layer]
            weights[name] = merged_weight(value, own.a_RI, own.b_OR, scale=own.scale)
        elif field == "bias":
            weights[name] = value
    return weights


def merged_weight(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """W + scale B A, added in at least fp32 and rounded once to the dtype of W."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    product_OI = b_OR.to(wide) @ a_RI.to(wide)
    return product_OI.mul_(scale).add_(weight_OI).to(weight_OI.dtype)


def factor_names(layer: str) -> tuple[str, str]:
    """The names of a layer's factors A and B in an adapter's file."""
    return _KEY.format(layer=layer, factor="A"), _KEY.format(layer=layer, factor="B")


def _adapted(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module
