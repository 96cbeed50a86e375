"""Loads a Hugging Face causal language model as the policy that trains.

Only architectures for which tree training is exact are accepted; everything else is refused by
name before a step is taken.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.exchange import shared_attention_interface
from forgemq_trainer.core.attention.gpu_attention import GpuAttention
from forgemq_trainer.core.forward import Policy
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.precision import TopKRouter, make_precise
from forgemq_trainer.offload import store_of

ATTENTION_NAME = "forgemq_tree"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose tokens depend on their ancestors only, each tested against per-request runs."""

GPU_HEAD_SIZE_MIN = 16
GPU_HEAD_SIZE_MAX = 256
"""FlexAttention compiles no smaller one; larger ones are tried nowhere."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UnsupportedModelError(SettingsError):
    """The model cannot be trained exactly on trees; says which field and rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the view of it that a step uses."""

    model: nn.Module
    policy: Policy


def load_model(
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: str = "cpu",
    place: str | None = None,
) -> LoadedModel:
    """The model in a folder of Hugging Face format, ready to train on trees.

    Args:
        folder: of the model.
        dtype: of its parameters.
        device: that it computes on.
        place: where its parameters lie, to be moved later; None: on that device.

    Raises:
        UnsupportedModelError: its architecture or a setting rules out exact tree training.
        OSError: the folder holds no model.
    """
    disable_progress_bar()  # A service writes events, one JSON line each, and nothing else.
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config)
    AttentionInterface.register(ATTENTION_NAME, shared_attention_interface)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=_DTYPES[dtype],
        attn_implementation=ATTENTION_NAME,
        local_files_only=True,
    )
    return prepared(model.to(place or device), device=torch.device(device))


def prepared(model: nn.Module, *, device: torch.device | None = None) -> LoadedModel:
    """A model of transformers with our norms, rotary embedding, routers and attention.

    Args:
        model: of transformers.
        device: that it computes on; None: where its parameters lie.
    """
    config: Any = model.config
    check_supported(config)
    AttentionInterface.register(ATTENTION_NAME, shared_attention_interface)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]  # transformers' method
    make_precise(model)
    model.train()
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError("a head with a bias is not supported")
    shape = model_shape(config, dtype=head.weight.dtype)
    device = device or head.weight.device
    head_size = shape.key_size // int(config.num_key_value_heads)
    check_head_size(head_size, device=device.type)
    attention = GpuAttention(head_size=head_size) if device.type == "cuda" else CpuAttention()
    policy = Policy(
        decoder=model.get_decoder(),  # type: ignore[operator]  # transformers' method
        head_VH=head.weight,
        shape=replace(shape, slot_multiple=attention.slot_multiple),
        key_heads=int(config.num_key_value_heads),
        attention=attention,
        routers=tuple(module for module in model.modules() if isinstance(module, TopKRouter)),
        make_store=store_of(device),
    )
    return LoadedModel(model=model, policy=policy)


def check_supported(config: object) -> None:
    """Refuse what cannot be exact on a tree.

    Raises:
        UnsupportedModelError: naming the field of the model's configuration and the rule.
    """
    kind = getattr(config, "model_type", "")
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {kind!r} is not supported for tree training; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError("attention_dropout must be 0: a shared token drops once")
    layers = getattr(config, "layer_types", None) or []
    if any(layer != "full_attention" for layer in layers):
        raise UnsupportedModelError(f"layer_types must all be full_attention, got {set(layers)}")
    window = getattr(config, "sliding_window", None)
    if not layers and window is not None:
        raise UnsupportedModelError(f"sliding_window must be off, got {window}")
    dense = getattr(config, "mlp_only_layers", None) or []
    if dense:
        raise UnsupportedModelError(f"mlp_only_layers must be empty, got {list(dense)}")
    step = getattr(config, "decoder_sparse_step", 1)
    if step != 1:
        raise UnsupportedModelError(f"decoder_sparse_step must be 1, got {step}")
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "output_router_logits must be off: the balance loss would count shared tokens once"
        )


def check_head_size(head_size: int, *, device: str) -> None:
    """Refuse what the device's kernel does not do; those of a CPU do every size.

    Raises:
        UnsupportedModelError: naming the size and the rule.
    """
    if device == "cuda" and not GPU_HEAD_SIZE_MIN <= head_size <= GPU_HEAD_SIZE_MAX:
        raise UnsupportedModelError(
            f"head_dim is {head_size}; attention on a GPU needs {GPU_HEAD_SIZE_MIN} to "
            f"{GPU_HEAD_SIZE_MAX}"
        )


def model_shape(config: object, *, dtype: torch.dtype) -> ModelShape:
    """Sizes of a model of transformers."""

    def size(name: str, default: int = 0) -> int:
        return int(getattr(config, name, None) or default)

    heads = size("num_attention_heads")
    head_size = size("head_dim", size("hidden_size") // heads)
    experts = size("num_experts_per_tok")
    wide = torch.promote_types(dtype, torch.float32)
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        query_size=heads * head_size,
        key_size=size("num_key_value_heads", heads) * head_size,
        mlp_size=experts * size("moe_intermediate_size") if experts else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        value_bytes=dtype.itemsize,
        wide_bytes=wide.itemsize,
        is_head_normed=str(getattr(config, "model_type", "")).startswith("qwen3"),
        experts=size("num_experts") if experts else 0,
        experts_per_token=experts,
        is_head_tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
