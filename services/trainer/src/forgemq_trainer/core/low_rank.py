"""Low-rank adapters on the linear layers of a frozen model (LoRA, arXiv 2106.09685, section 4.1).

y = W x + b + scale B A x. W and b have no gradient and no optimizer state; A is drawn, B begins as
zeros, so that the first version is the base model.

T tokens, I inputs of a layer, O outputs, R rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgemq_contracts.lora import ATTENTION_TARGETS, MLP_TARGETS, AdapterTarget, Lora

_KEY = "base_model.model.{layer}.lora_{factor}.weight"
"""Names a factor as the package peft writes it; SGLang reads these names."""


class AdaptedLinear(nn.Module):
    """A linear layer that stays, and two factors that train beside it.

    `weight` and `bias` are the layer's own, so their names are those of the model's file.
    """

    def __init__(
        self, linear: nn.Linear, *, rank: int, scale: float, dtype: torch.dtype | None = None
    ) -> None:
        """Take the layer's parameters; both factors are zeros, of its dtype unless one is given."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        outputs, inputs = linear.weight.shape
        self.a_RI = nn.Parameter(linear.weight.new_zeros(rank, inputs, dtype=dtype))
        self.b_OR = nn.Parameter(linear.weight.new_zeros(outputs, rank, dtype=dtype))

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


def add_adapters(model: nn.Module, lora: Lora, *, dtype: torch.dtype | None = None) -> AdapterShape:
    """Freeze the model, and give the layers that `lora` names adapters whose factors are zeros.

    Args:
        model: A causal language model of transformers; it may be on the meta device.
        lora: Rank, scale and targets.
        dtype: Of the factors; None is that of the layers.

    Returns:
        Sizes of the adapters.

    Raises:
        ValueError: A target is no linear layer of this model, or of an MLP beside experts.
    """
    model.requires_grad_(requires_grad=False)
    # An MLP that all tokens share, or of the first layers, is not trained beside frozen experts: no
    # test has compared it, and what SGLang does with its adapter nobody has tried.
    is_mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
    known = ATTENTION_TARGETS if is_mixture else ATTENTION_TARGETS + MLP_TARGETS
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in {*lora.targets} & {*known} and isinstance(module, nn.Linear)
    }
    has = {name.rpartition(".")[2] for name in found}
    for target in lora.targets:
        if target not in has:
            raise ValueError(
                f"lora.targets: {target} is no linear layer of {type(model).__name__}; of these it "
                f"has {', '.join(sorted(has)) or 'none'} (in a mixture of experts only attention "
                "has adapters)"
            )
    parameters = 0
    for name, linear in found.items():
        adapted = AdaptedLinear(linear, rank=lora.rank, scale=lora.scale, dtype=dtype)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, adapted)
        parameters += adapted.a_RI.numel() + adapted.b_OR.numel()
    layers = len(found) // len(lora.targets)
    return AdapterShape(rank=lora.rank, targets=lora.targets, parameters=parameters // layers)


def drawn_factors(model: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """The factors of a new run by their names in the adapter's file: A drawn, B zeros; float32.

    Args:
        model: Has adapters, of which only the sizes count.
        seed: Of the factors A, which are drawn layer by layer.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Tensor] = {}
    for name, layer in _adapted(model):
        a_name, b_name = factor_names(name)
        # peft's: uniform within 1 / sqrt(I).
        values_RI = torch.rand(layer.a_RI.shape, generator=generator).mul_(2).sub_(1)
        drawn[a_name] = values_RI.div_(math.sqrt(layer.a_RI.shape[1]))
        drawn[b_name] = torch.zeros(layer.b_OR.shape)
    return drawn


def factors_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The factors of all adapters, by their names in the adapter's file."""
    factors: dict[str, nn.Parameter] = {}
    for name, layer in _adapted(model):
        a_name, b_name = factor_names(name)
        factors |= {a_name: layer.a_RI, b_name: layer.b_OR}
    return factors


def merge_factors(state: dict[str, Tensor], *, scale: float) -> None:
    """Add B A to the weights in a model's whole state, and drop the factors from it.

    Weights are replaced, not changed: they may be the model's own.

    Args:
        state: By name, with the factors of the adapters among them.
        scale: What B A counts.
    """
    for layer in [name.removesuffix(".a_RI") for name in state if name.endswith(".a_RI")]:
        a_RI, b_OR = state.pop(f"{layer}.a_RI"), state.pop(f"{layer}.b_OR")
        weight_OI = state[f"{layer}.weight"]
        state[f"{layer}.weight"] = merged_weight(weight_OI, a_RI, b_OR, scale=scale)


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
