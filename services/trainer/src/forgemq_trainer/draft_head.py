"""Loads a draft head as SGLang's `LlamaForCausalLMEagle` reads it, ready to train beside a policy.

The folder has a config.json of a Llama with one layer and a model.safetensors with `fc.weight`,
`fc.bias` and `layers.0.*`. In the engine's class the layer has no input norm and nothing norms its
output; embedding and language-model head are the policy's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from forgemq_contracts.draft_head import HeadShape, head_shape
from forgemq_contracts.model_families import ENGINE_EXTRAS_MODEL_TYPES
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.attention.attention import TreeAttention
from forgemq_trainer.core.attention.exchange import KeyExchange, shared_attention_interface
from forgemq_trainer.core.attention.gpu_attention import attention_on
from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.drafting import DraftModel, PolicyEnds
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.families import check_head_size
from forgemq_trainer.model import ATTENTION_NAME, LoadedModel
from forgemq_trainer.model_config import read_model_config
from forgemq_trainer.offload import store_of
from forgemq_trainer.storage.tensor_files import StoredTensorsError, tensors_in
from forgemq_trainer.storage.weights import WEIGHTS_FILE

ARCHITECTURE = "LlamaForCausalLMEagle"
DEPTHS = 2
"""Tokens in a row that the head learns to guess; each costs a step another pass of one layer.

On the demo's model a head that learned one token had an overlap of 0.78 there and of 0.41 at the
next; one that learned two had 0.75 at both.
"""


class UnsupportedHeadError(SettingsError):
    """The draft head is damaged, or does not fit the policy or the engine's class; says how."""


class DraftLayer(nn.Module):
    """The head's parameters, by the names in its file."""

    def __init__(self, config: object) -> None:
        super().__init__()
        settings: Any = config
        self.fc = nn.Linear(2 * settings.hidden_size, settings.hidden_size)
        layer = LlamaDecoderLayer(settings, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary_embedding = LlamaRotaryEmbedding(settings)
        make_precise(self)

    def forward(
        self,
        embedded: Tensor,
        state: Tensor,
        position: Tensor,
        *,
        tree_attention: TreeAttention,
        key_exchange: KeyExchange | None = None,
    ) -> Tensor:
        """Final states of the tokens, [T, H]."""
        hidden = self.fc(torch.cat((embedded, state), dim=-1))[None]
        output = self.layers[0](
            hidden,
            position_embeddings=self.rotary_embedding(hidden, position[None]),
            tree_attention=tree_attention,
            key_exchange=key_exchange,
        )
        final = output[0]
        assert isinstance(final, Tensor)
        return final


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A draft head in memory, and the same head as a step uses it."""

    layer: DraftLayer
    model: DraftModel


def with_draft_head(
    folder: Path,
    loaded: LoadedModel,
    *,
    top_k: int,
    depths: int = DEPTHS,
    gather_ends: Callable[[], PolicyEnds] | None = None,
) -> tuple[LoadedHead, PolicyModel]:
    """Load the head in a folder, in the dtype and on the device of the policy.

    Args:
        folder: Holds its config.json and model.safetensors.
        loaded: The policy whose tokens it guesses.
        top_k: Tokens that the loss compares one by one.
        depths: How many tokens in a row it learns to guess.
        gather_ends: Gathers what the head uses of the policy if ranks share the parameters; None
            if this process holds the whole policy.

    Returns:
        The head, and the policy with a shape that counts the head's memory.

    Raises:
        UnsupportedHeadError: it is no head of this policy, or damaged.
        OSError: the folder holds no head.
    """
    policy = loaded.policy
    check_policy(getattr(loaded.model.config, "model_type", ""))
    config = read_model_config(folder)
    check_head(config, hidden=policy.shape.hidden, vocabulary=policy.shape.vocabulary)
    device, dtype = policy.head_VH.device, policy.head_VH.dtype
    layer = _load_layer(folder, config, device=device, dtype=dtype)
    sizes = _sizes_of(folder)
    shape = draft_shape(
        sizes, policy=policy.shape, is_sharing=gather_ends is not None, depths=depths
    )
    check_head_size(sizes.head_dim, device=device.type)
    model = DraftModel(
        layer=layer,
        policy_ends=gather_ends or partial(_own_ends, loaded),
        dtype=dtype,
        device=device,
        shape=shape,
        key_heads=sizes.kv_heads,
        attention=attention_on(device, head_size=sizes.head_dim),
        make_store=store_of(device),
        top_k=top_k,
        depths=depths,
    )
    return LoadedHead(layer=layer, model=model), replace(
        policy, shape=replace(policy.shape, draft=shape)
    )


def _own_ends(loaded: LoadedModel) -> PolicyEnds:
    """Of a policy that this process holds whole."""
    embedding: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]  # transformers' method
    return PolicyEnds(
        embedding_VH=embedding.weight.detach(), head_VH=loaded.policy.head_VH.detach()
    )


def check_head(config: object, *, hidden: int, vocabulary: int) -> None:
    """Refuse a head that the engine would not run, or not with this policy.

    Raises:
        UnsupportedHeadError: names the field of the head's configuration and the rule.
    """
    wanted = {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    }
    for name, value in wanted.items():
        found = getattr(config, name, None)
        if found != value:
            raise UnsupportedHeadError(
                f"speculation.head: {name} of its config.json must be {value!r}, got {found!r}"
            )


def check_policy(kind: str) -> None:
    """Refuse a family for which no draft head was tried.

    Raises:
        UnsupportedHeadError: names the type of the model, and those that have one.
    """
    if kind not in ENGINE_EXTRAS_MODEL_TYPES:
        raise UnsupportedHeadError(
            f"speculation must be left out for a model of type {kind}; a draft head trains for "
            f"{', '.join(ENGINE_EXTRAS_MODEL_TYPES)}"
        )


def draft_shape(
    head: HeadShape, *, policy: ModelShape, is_sharing: bool, depths: int = DEPTHS
) -> DraftShape:
    """What a head's memory depends on.

    Args:
        head: Its sizes.
        policy: Of the policy.
        is_sharing: Whether several ranks share the policy's parameters.
        depths: How many tokens in a row it learns to guess.
    """
    gathered = 1 if policy.is_head_tied else 2
    return DraftShape(
        hidden=head.hidden_size,
        query_size=head.attention_heads * head.head_dim,
        key_size=head.kv_heads * head.head_dim,
        mlp_size=head.intermediate_size,
        vocabulary=head.vocabulary_size,
        value_bytes=policy.value_bytes,
        wide_bytes=policy.wide_bytes,
        depths=depths,
        gathered_matrices=gathered if is_sharing else 0,
    )


def _sizes_of(folder: Path) -> HeadShape:
    try:
        return head_shape((folder / "config.json").read_bytes())
    except ValueError as error:
        raise UnsupportedHeadError(f"speculation.head: {folder}: {error}") from error


def _load_layer(
    folder: Path,
    config: Any,  # noqa: ANN401  # of transformers
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> DraftLayer:
    AttentionInterface.register(ATTENTION_NAME, shared_attention_interface)
    config._attn_implementation = ATTENTION_NAME
    layer = DraftLayer(config)
    _fill(layer, _read_tensors(folder / WEIGHTS_FILE), folder=folder)
    layer.to(device)
    # The parameters alone: rotary frequencies rounded to bfloat16 would move every position.
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.data.to(dtype)
        # No update would change it: each one's gradient would not be finite either.
        if not bool(parameter.isfinite().all()):
            raise UnsupportedHeadError(
                f"speculation.head: {name} in {folder} has values that are infinite or no numbers"
            )
    return layer


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors_in(file)  # Says how a file is damaged, which `load_file` does not.
    except StoredTensorsError as error:
        raise UnsupportedHeadError(f"speculation.head: {error}") from error
    return load_file(file)


def _fill(layer: DraftLayer, tensors: Mapping[str, Tensor], *, folder: Path) -> None:
    own = layer.state_dict()
    if own.keys() != tensors.keys():
        differing = sorted(own.keys() ^ tensors.keys())
        raise UnsupportedHeadError(
            f"speculation.head: {folder} must hold exactly the tensors of {ARCHITECTURE} with one "
            f"layer; differing: {', '.join(differing)}"
        )
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise UnsupportedHeadError(
                f"speculation.head: {name} in {folder} must have the shape "
                f"{tuple(own[name].shape)}, got {tuple(tensor.shape)}"
            )
    layer.load_state_dict(dict(tensors))
