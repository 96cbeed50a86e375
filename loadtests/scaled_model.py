"""A Qwen3 with fewer layers on one device; single sequences attend by the flash kernel only.

The vocabulary shrinks with the layers, so that the head has the share of the work that it has in
the whole model. Attention of single sequences is pinned to torch's flash kernel on every device: if
that kernel cannot run, torch raises an error instead of choosing a slower one.
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
from forgemq_trainer.model import LoadedModel, prepare
from forgemq_trainer.model_sizes import model_shape

CAUSAL_FLASH = "pinned_causal"
"""Name of `causal_flash` in transformers; for a name with "flash" it would load another kernel."""

VOCABULARY_STEP = 128
"""A scaled head has a multiple of so many rows, as Qwen3's: tensor cores compute whole tiles."""

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
"""Dense bfloat16 operations a second, from the vendor's data sheets, by torch's name of the device.

The H100 and H200 of this table are the SXM modules; the PCIe and NVL versions have other names.
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and the unscaled model that is measured on it.

    Attributes:
        device: That trains.
        dtype: Of the parameters.
        model: Configuration of the unscaled Qwen3.
        memory_bytes: That parameters, their gradients and a tree's activations may take.
        peak_flops_per_s: Of dense products of the dtype, by the vendor; None if unknown.
    """

    device: torch.device
    dtype: torch.dtype
    model: Mapping[str, int]
    memory_bytes: int
    peak_flops_per_s: float | None

    def now_s(self) -> float:
        """Wait until the device has finished its queued work; returns the clock, in seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def scaled(self, layers: int) -> dict[str, int]:
        """The model's configuration with fewer layers and a vocabulary that shrinks with them."""
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
    """Bytes of the parameters and their gradients."""
    layers = flops(shape, tokens=1, pairs=0, rows=0).weights / 6
    return int(layers + 2 * shape.hidden * shape.vocabulary) * 2 * shape.value_bytes


def made_model(machine: Machine, *, layers: int) -> LoadedModel:
    """Make the scaled model with random weights."""
    AttentionInterface.register(CAUSAL_FLASH, causal_flash)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **machine.scaled(layers))
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype)
    return prepare(model)


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
    """Causal attention of one sequence by torch's flash kernel only, as transformers calls it.

    Args:
        _layer: Unused.
        query: [1, heads, T, D], perhaps wider than `value`'s dtype.
        key: [1, key/value heads, T, D], perhaps wider than `value`'s dtype.
        value: [1, key/value heads, T, D].
        attention_mask: Must be None.
        scaling: Multiplies the scores; None is 1 / sqrt(D).
        **others: Other arguments of the layer; dropout and a window must be off.

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
