"""Loads a Hugging Face causal language model as the policy that trains.

Accepts only architectures for which tree training is exact; refuses every other by name before a
step is taken.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from forgemq_contracts.lora import Lora
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.exchange import shared_attention_interface
from forgemq_trainer.core.attention.gpu_attention import attention_on
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.layers import replace_layers
from forgemq_trainer.core.low_rank import add_adapters
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.recomputation import LayerCall
from forgemq_trainer.core.routers import ROUTERS
from forgemq_trainer.families import (
    UnsupportedModelError,
    check_expert_rows,
    check_head_size,
    check_modules,
    check_supported,
)
from forgemq_trainer.loading import allocate, empty_model, fill
from forgemq_trainer.model_config import read_model_config
from forgemq_trainer.model_sizes import head_size_of, key_heads_of, model_shape
from forgemq_trainer.offload import store_of

ATTENTION_NAME = "forgemq_tree"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        ModelConfigError: its configuration is damaged or contradicts itself.
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
        ModelConfigError: its configuration is damaged or contradicts itself.
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
    # Else every layer's output would be held until the last has run, whatever the plan keeps.
    config.output_hidden_states = False
    make_precise(model)
    check_modules(model)
    _replace_layers(model)
    model.train()
    head = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    shape = model_shape(config, dtype=head.weight.dtype)
    device = device or head.weight.device
    head_size = head_size_of(config)
    check_head_size(head_size, device=device.type)
    attention = attention_on(device, head_size=head_size)
    decoder: nn.Module = model.get_decoder()  # type: ignore[operator]  # transformers' method
    policy = PolicyModel(
        decoder=decoder,
        head_VH=head.weight,
        shape=replace(shape, slot_multiple=attention.slot_multiple),
        key_heads=key_heads_of(config),
        attention=attention,
        layer_calls=_layer_calls(decoder),
        routers=tuple(module for module in model.modules() if isinstance(module, ROUTERS)),
        make_store=store_of(device),
    )
    return LoadedModel(model=model, policy=policy)


def _replace_layers(model: nn.Module) -> None:
    try:
        replace_layers(model)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{error}; the installed transformers has another layer than the trainer was written "
            "for: install the version that requirements.lock names"
        ) from error


def with_adapters(
    loaded: LoadedModel, lora: Lora, *, dtype: torch.dtype | None = None
) -> LoadedModel:
    """The same model, frozen in place, with adapters that change nothing.

    Args:
        loaded: Filled or not.
        lora: Rank, scale and targets.
        dtype: Of the adapters; None is the model's.

    Raises:
        SettingsError: A target is no linear layer of this model.
    """
    try:
        adapters = add_adapters(loaded.model, lora, dtype=dtype)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    policy = loaded.policy
    return replace(loaded, policy=replace(policy, shape=replace(policy.shape, adapters=adapters)))


def _unfilled(folder: Path, *, dtype: Literal["float32", "bfloat16"]) -> Any:  # noqa: ANN401  # transformers' model
    disable_progress_bar()  # A service writes events only, one JSON line each.
    config = read_model_config(folder)
    check_supported(config)
    check_expert_rows(config, dtype=DTYPES[dtype])
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
