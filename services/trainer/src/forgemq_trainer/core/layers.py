"""Attention and MLP of a decoder layer whose pointwise parts are those of `pointwise.py`.

They take over the projections and norms of the modules of transformers, with their names, so
weights load and save unchanged. Which modules they replace follows from the model's configuration,
and a module that does not have just the parts that they compute with is an error: a class that
transformers changes cannot stay as it is without anybody noticing.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from forgemq_trainer.core.pointwise import Gated, Rotated

ROTARY_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families whose layers without a window have an attention that does what `RotaryAttention` does.
"""

SILU = ("silu", "swish")
"""Names in a configuration of the activation that `Gated` computes."""

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
GATE_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


class RotaryAttention(nn.Module):
    """Projections, norms of heads if there are any, rotary embedding, attention, projection."""

    def __init__(self, stock: Any) -> None:  # noqa: ANN401  # of one of `ROTARY_FAMILIES`
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = stock.q_proj, stock.k_proj, stock.v_proj
        self.o_proj = stock.o_proj
        self.q_norm = getattr(stock, "q_norm", None)
        self.k_norm = getattr(stock, "k_norm", None)
        self.config = stock.config
        self.layer_idx: int = stock.layer_idx
        self.head_dim: int = stock.head_dim
        self.scaling: float = stock.scaling
        self.num_key_value_groups: int = stock.num_key_value_groups
        self.is_causal = True

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,  # noqa: ANN401  # a cache, if the model generates
        **others: Any,  # noqa: ANN401  # for the attention that the configuration names
    ) -> tuple[Tensor, Tensor | None]:
        """As the stock modules: the layer's attention [1, T, hidden], and its weights or None."""
        rows = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*rows, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_turned(values, *position_embeddings) for values in (query, key))
        query, key, value = (values.transpose(1, 2) for values in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = AttentionInterface()[self.config._attn_implementation]
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            **others,
        )
        return self.o_proj(output.reshape(*rows, -1)), weights


def _turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, T, heads, D] by angles [rows, T, D]."""
    turned: Tensor = Rotated.apply(values.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1))
    return turned.view(values.shape)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, stock: Any) -> None:  # noqa: ANN401  # has the three projections
        super().__init__()
        self.gate_proj, self.up_proj = stock.gate_proj, stock.up_proj
        self.down_proj = stock.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        """Of the input's shape."""
        output: Tensor = self.down_proj(Gated.apply(self.gate_proj(hidden), self.up_proj(hidden)))
        return output


def replace_layers(model: nn.Module) -> None:
    """Replace the model's attention and MLP modules by those of this file, where they are equal.

    Idempotent: modules of this file stay.

    Raises:
        ValueError: a layer's attention or MLP should be equal, and has other parts.
    """
    config: Any = model.config
    is_rotary = config.model_type in ROTARY_FAMILIES
    is_silu = getattr(config, "hidden_act", None) in SILU
    attentions = 0
    for name, module in list(model.named_modules()):
        replacement: nn.Module | None = None
        if is_rotary and name.endswith(".self_attn"):
            replacement = _attention(name, module)
            attentions += 1
        elif is_silu:
            replacement = _gated(name, module)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
    if is_rotary and attentions != config.num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__} has {attentions} modules named self_attn in "
            f"{config.num_hidden_layers} layers, so attention is not where it was"
        )


def _attention(name: str, module: nn.Module) -> nn.Module | None:
    # Only the stock module hands its window to the attention.
    if isinstance(module, RotaryAttention) or getattr(module, "sliding_window", None) is not None:
        return None
    parts = {*module._parameters, *module._buffers, *module._modules}
    if parts not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS):
        raise ValueError(
            f"{name} is {type(module).__name__} of {sorted(parts)}, and RotaryAttention computes "
            f"with {sorted(PROJECTIONS)}, and {sorted(HEAD_NORMS)} if heads are normed"
        )
    return RotaryAttention(module)


def _gated(name: str, module: nn.Module) -> nn.Module | None:
    parts = {*module._parameters, *module._buffers, *module._modules}
    if isinstance(module, GatedMlp):
        return None
    if parts == GATE_PROJECTIONS | {"act_fn"}:
        return GatedMlp(module)
    # A mixture's block has experts, which are tensors of all of them.
    if name.endswith(".mlp") and "experts" not in parts:
        raise ValueError(
            f"{name} is {type(module).__name__} of {sorted(parts)}, and GatedMlp computes with "
            f"{sorted(GATE_PROJECTIONS)} and their activation"
        )
    return None
