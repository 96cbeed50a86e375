"""A Qwen3 with fewer layers, on one device, and attention of single sequences that is only flash.

The vocabulary shrinks with the layers: the head weighs against them what it weighs in the whole
model. On any device the attention of single sequences is pinned to torch's flash kernel: where that
cannot run, torch raises instead of taking a slower one.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from tree_timing import HEAD_CHUNK
from tree_workloads import VOCABULARY

from forgemq_trainer.core.flops import flops
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.model import LoadedModel, model_shape, prepared

CAUSAL_FLASH = "pinned_causal"
"""What transformers knows `causal_flash` by; it loads a kernel of its own for names with flash."""

VOCABULARY_STEP = 128
"""Rows of a scaled head are a multiple of this, as tensor cores like them and as Qwen3 has them."""

QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}

PEAK_FLOPS_PER_S = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}
"""Dense bfloat16 products a second by the name that torch gives the device; vendor's data sheets.

The H100 and H200 of this table are the SXM modules; their PCIe and NVL siblings have other names.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What trains.

    Attributes:
        device: where.
        dtype: of the parameters.
        model: configuration of the unscaled Qwen3.
        memory_bytes: that parameters, their gradients and a tree's activations may take.
        peak_flops_per_s: of dense products of the dtype, by the vendor; None where unknown.
    """

    device: torch.device
    dtype: torch.dtype
    model: Mapping[str, int]
    memory_bytes: int
    peak_flops_per_s: float | None

    def now_s(self) -> float:
        """Seconds, once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def scaled(self, layers: int) -> dict[str, int]:
        """The model with fewer layers, and its vocabulary shrunk with them."""
        share = layers / self.model["num_hidden_layers"]
        wanted = max(VOCABULARY, round(self.model["vocab_size"] * share))
        rows = -(-wanted // VOCABULARY_STEP) * VOCABULARY_STEP
        return dict(self.model) | {
            "num_hidden_layers": layers,
            "vocab_size": rows,
        }

    def layers_that_fit(self, tokens: int) -> int:
        """The most layers whose parameters, gradients and activations of a whole tree fit."""

        def needed_bytes(layers: int) -> int:
            config: Any = AutoConfig.for_model("qwen3", **self.scaled(layers))
            shape = model_shape(config, dtype=self.dtype)
            return trained_bytes(shape) + shape.block_bytes(
                tokens, chunk=HEAD_CHUNK, is_carried=False
            )

        counts = range(1, self.model["num_hidden_layers"] + 1)
        return sum(needed_bytes(layers) <= self.memory_bytes for layers in counts)


def trained_bytes(shape: ModelShape) -> int:
    """Parameters and their gradients."""
    layers = flops(shape, tokens=1, pairs=0, rows=0).weights / 6
    return int(layers + 2 * shape.hidden * shape.vocabulary) * 2 * shape.value_bytes


def made_model(machine: Machine, *, layers: int) -> LoadedModel:
    """The scaled model with random weights."""
    AttentionInterface.register(CAUSAL_FLASH, causal_flash)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **machine.scaled(layers))
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    return prepared(model)


def causal_flash(
    _layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention of one sequence by torch's flash kernel, and by no other.

    Args:
        _layer: unused.
        query: [1, heads, T, D], perhaps wider than `value`'s dtype.
        key: [1, key/value heads, T, D], likewise.
        value: [1, key/value heads, T, D].
        attention_mask: must be None.
        scaling: of the scores; None is 1 / sqrt(D).
        **others: what else a layer passes; dropout and a window must be off.

    Returns:
        [1, T, heads, D] and None.

    Raises:
        ValueError: a mask, dropout or a window was asked for.
        RuntimeError: the flash kernel does not run these tensors.
    """
    if attention_mask is not None or others.get("dropout") or others.get("sliding_window"):
        raise ValueError("the baseline is causal attention: no mask, no dropout, no window")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = scaled_dot_product_attention(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.transpose(1, 2), None
