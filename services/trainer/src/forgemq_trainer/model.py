"""Loads a Hugging Face causal language model as the policy that trains.

Accepts only architectures for which tree training is exact; refuses every other by name before a
step is taken.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.exchange import shared_attention_interface
from forgemq_trainer.core.attention.gpu_attention import attention_on
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.layers import replace_layers
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.precision import TopKRouter, make_precise
from forgemq_trainer.core.recomputation import LayerCall
from forgemq_trainer.loading import allocate, empty_model, fill
from forgemq_trainer.offload import store_of

ATTENTION_NAME = "forgemq_tree"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose activations at a token depend on its ancestors only; a test compares each with
per-request training."""

GPU_HEAD_SIZE_MIN = 16
"""FlexAttention compiles no smaller head size."""

GPU_HEAD_SIZE_MAX = 256
"""Larger head sizes are untested, and torch's flash kernels have none."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UnsupportedModelError(SettingsError):
    """The model cannot be trained exactly on trees; says which field and rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the same model as a step uses it."""

    model: nn.Module
    policy: PolicyModel


def load_model(
    folder: Path, *, dtype: Literal["float32", "bfloat16"], device: str = "cpu"
) -> LoadedModel:
    """Load the model in a folder of Hugging Face format, ready to train on trees.

    Args:
        folder: Holds its configuration and weights.
        dtype: To load the parameters in.
        device: That it computes on, and that the parameters are read to.

    Raises:
        UnsupportedModelError: an architecture or a setting rules out exact tree training.
        StoredTensorsError: the folder's tensors are not the model's.
        OSError: the folder holds no model.
    """
    model = _unfilled(folder, dtype=dtype)
    allocate(model, device=torch.device(device))
    model.tie_weights()
    fill(model, folder)
    return prepare(model, device=torch.device(device))


def load_empty(folder: Path, *, dtype: Literal["float32", "bfloat16"], device: str) -> LoadedModel:
    """The same, with parameters on the meta device, to be allocated and filled as ranks share them.

    Args:
        folder: Holds its configuration.
        dtype: Of the parameters.
        device: That it computes on.

    Raises:
        UnsupportedModelError: an architecture or a setting rules out exact tree training.
        OSError: the folder holds no model.
    """
    return prepare(_unfilled(folder, dtype=dtype), device=torch.device(device))


def prepare(model: nn.Module, *, device: torch.device | None = None) -> LoadedModel:
    """Give a model of transformers our norms, rotary embedding, routers and attention, in place.

    Args:
        model: A causal language model of transformers.
        device: That it computes on; None is the device of its parameters.

    Raises:
        UnsupportedModelError: an architecture or a setting rules out exact tree training.
    """
    config: Any = model.config
    check_supported(config)
    AttentionInterface.register(ATTENTION_NAME, shared_attention_interface)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]  # transformers' method
    make_precise(model)
    replace_layers(model)
    model.train()
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    # The chunked head computes hidden @ weights only.
    if getattr(head, "bias", None) is not None:
        raise UnsupportedModelError("a head with a bias is not supported")
    shape = model_shape(config, dtype=head.weight.dtype)
    device = device or head.weight.device
    head_size = shape.key_size // int(config.num_key_value_heads)
    check_head_size(head_size, device=device.type)
    attention = attention_on(device, head_size=head_size)
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]  # transformers' method
    policy = PolicyModel(
        decoder=decoder,
        head_VH=head.weight,
        shape=replace(shape, slot_multiple=attention.slot_multiple),
        key_heads=int(config.num_key_value_heads),
        attention=attention,
        layer_calls=_layer_calls(decoder),
        routers=tuple(module for module in model.modules() if isinstance(module, TopKRouter)),
        make_store=store_of(device),
    )
    return LoadedModel(model=model, policy=policy)


def _unfilled(folder: Path, *, dtype: Literal["float32", "bfloat16"]) -> Any:  # noqa: ANN401  # transformers' model
    disable_progress_bar()  # A service writes events only, one JSON line each.
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config)
    # Registered before the model is built, which refuses an attention that it does not know.
    AttentionInterface.register(ATTENTION_NAME, shared_attention_interface)
    return empty_model(config, dtype=DTYPES[dtype], attention=ATTENTION_NAME)


def _layer_calls(decoder: nn.Module) -> tuple[LayerCall, ...]:
    """Let the trainer decide how each of the decoder's layers is called."""
    calls = []
    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            calls.append(LayerCall())
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = calls[-1]
    return tuple(calls)


def check_supported(config: object) -> None:
    """Refuse a model that tree training would not train exactly.

    Raises:
        UnsupportedModelError: names the field of the model's configuration and the rule.
    """
    kind = getattr(config, "model_type", "")
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model_type {kind!r} is not supported for tree training; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        raise UnsupportedModelError(
            f"quantization_config must be left out, got {quantised}: training needs weights in "
            "full, and model.engine_quantization says how engines hold them"
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
    """Refuse a head size that a GPU's kernels do not support; a CPU's support every size.

    Raises:
        UnsupportedModelError: names the size and the rule.
    """
    if device == "cuda" and not GPU_HEAD_SIZE_MIN <= head_size <= GPU_HEAD_SIZE_MAX:
        raise UnsupportedModelError(
            f"head_dim is {head_size}; attention on a GPU needs {GPU_HEAD_SIZE_MIN} to "
            f"{GPU_HEAD_SIZE_MAX}"
        )


def model_shape(config: object, *, dtype: torch.dtype) -> ModelShape:
    """Sizes of a model, from its configuration in transformers."""

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
        query_heads=heads,
        mlp_size=experts * size("moe_intermediate_size") if experts else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        value_bytes=dtype.itemsize,
        wide_bytes=wide.itemsize,
        is_head_normed=str(getattr(config, "model_type", "")).startswith("qwen3"),
        experts=size("num_experts") if experts else 0,
        experts_per_token=experts,
        is_head_tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
