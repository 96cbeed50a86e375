"""Attention and MLP of a decoder layer whose pointwise parts are those of `pointwise.py`.

They take over the projections and norms of the modules of transformers, with their names, so
weights load and save unchanged. A module that has anything else stays as it is.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from forgemq_trainer.core.pointwise import Gated, Rotated

ATTENTIONS = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
"""Classes of transformers that do what `RotaryAttention` does, in layers without a window."""

GATED_ACTIVATIONS = ("SiLU", "SiLUActivation")
"""Classes of the gate's activation that `Gated` computes."""


class RotaryAttention(nn.Module):
    """Projections, norms of heads if there are any, rotary embedding, attention, projection."""

    def __init__(self, stock: Any) -> None:  # noqa: ANN401  # one of `ATTENTIONS`
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
    """Replace the model's attention and MLP modules by those of this file, where they are equal."""
    for name, module in list(model.named_modules()):
        replacement = _replacement(module)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _replacement(module: nn.Module) -> nn.Module | None:
    # Only the stock module hands its window to the attention.
    is_windowed = getattr(module, "sliding_window", None) is not None
    if type(module).__name__ in ATTENTIONS and not is_windowed:
        return RotaryAttention(module)
    is_gated = {"gate_proj", "up_proj", "down_proj", "act_fn"} <= {
        *(name for name, _ in module.named_children())
    }
    if is_gated and type(module.act_fn).__name__ in GATED_ACTIVATIONS:
        return GatedMlp(module)
    return None
