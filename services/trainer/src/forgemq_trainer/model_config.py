"""Reads a model's config.json and builds its model; refuses what contradicts itself.

Code that a model's folder brings along is never run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from forgemq_settings.environment import SettingsError

CONFIG_FILE = "config.json"

REFUSALS = (
    StrictDataclassError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)
"""What transformers raises of a config.json that its classes do not take."""

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "sliding_window",
)
"""Fields that are at least 1 where a model has them."""

EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names that families give the number of a layer's experts. The first is that of its families'
config.json, whose classes know another one too."""

CHOSEN = "num_experts_per_tok"


class ModelConfigError(SettingsError):
    """A model's config.json cannot be used; says which file or field, and why."""


def read_model_config(folder: Path) -> Any:  # noqa: ANN401  # transformers' classes have no common type
    """The configuration in a folder of Hugging Face format, as its family's class has it.

    Raises:
        ModelConfigError: the file has no configuration, its family is unknown to transformers, or
            it lacks or contradicts what the family's class needs.
        OSError: the folder has none.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    try:
        return model_config(file.read_bytes())
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def model_config(content: bytes) -> Any:  # noqa: ANN401  # as above
    """The configuration in the bytes of a config.json, as its family's class has it.

    Raises:
        ModelConfigError: they have no configuration, its family is unknown to transformers, or it
            lacks or contradicts what the family's class needs.
    """
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ModelConfigError(f"not JSON: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelConfigError(
            f"model_type must be a family of the installed transformers, got {kind!r}; code that a "
            "model's folder brings along is never run"
        )
    if kind == "mistral" and "layer_types" in values:
        raise ModelConfigError(
            f"layer_types must be left out in a model of type mistral, got {values['layer_types']}:"
            " transformers takes such a model for ministral, whose layers differ, and no test "
            "compares that family with per-request training"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except REFUSALS as error:
        raise ModelConfigError(f"transformers: {_one_line(error)}") from error


def built(config: object, **options: object) -> Any:  # noqa: ANN401  # as above
    """The causal language model of transformers for a configuration.

    Args:
        config: Of transformers.
        options: Of transformers' `from_config`.

    Raises:
        ModelConfigError: its family has none, or none of these sizes and names.
    """
    check_sizes(config)
    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except REFUSALS as error:
        raise ModelConfigError(f"transformers: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """What an error of transformers says, which may be several lines, or the name of a key."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text


def check_sizes(config: object) -> None:
    """Refuse sizes with which no model can be built, or which its layers would misread.

    Args:
        config: Of transformers; fields that its family does not have are left out.

    Raises:
        ModelConfigError: names the field and the rule.
    """
    found = {name: getattr(config, name, None) for name in SIZES}
    sizes = {name: value for name, value in found.items() if isinstance(value, int)}
    for name, value in sizes.items():
        if value < 1:
            raise ModelConfigError(f"{name} must be at least 1, got {value}")
    heads, key_heads = sizes.get("num_attention_heads", 1), sizes.get("num_key_value_heads", 1)
    if heads % key_heads:
        raise ModelConfigError(
            f"num_key_value_heads must divide num_attention_heads, got {key_heads} and {heads}"
        )
    _check_padding(config, vocabulary=sizes.get("vocab_size"))
    _check_latent(sizes)
    _check_window(config)
    _check_experts(config)


def _check_padding(config: object, *, vocabulary: int | None) -> None:
    """Refuse a token of padding that the embedding has not, as a larger tokenizer may have."""
    token = getattr(config, "pad_token_id", None)
    if isinstance(token, int) and vocabulary is not None and not -vocabulary <= token < vocabulary:
        raise ModelConfigError(
            f"pad_token_id must be less than vocab_size, which is {vocabulary}, or left out, got "
            f"{token}"
        )


def _check_latent(sizes: Mapping[str, int]) -> None:
    """Refuse sizes of attention with latent keys that its first step would not take."""
    rotary = sizes.get("qk_rope_head_dim")
    if rotary is None:
        return
    if rotary % 2:
        raise ModelConfigError(f"qk_rope_head_dim must be even, got {rotary}: pairs turn")
    keys = sizes.get("qk_nope_head_dim", 0) + rotary
    if (values := sizes.get("v_head_dim", 0)) > keys:
        raise ModelConfigError(
            f"v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim, which is {keys}, got "
            f"{values}: attention has one head size"
        )
    # The family's class makes the angles of so many values, and turns qk_rope_head_dim of them.
    if sizes.get("head_dim", rotary) != rotary:
        raise ModelConfigError(
            f"head_dim must be qk_rope_head_dim, which is {rotary}, or left out, got "
            f"{sizes['head_dim']}"
        )


def _check_window(config: object) -> None:
    """Refuse layers with a window whose size is not given."""
    kinds = getattr(config, "layer_types", None) or ()
    # The class of gpt-oss asks for the window even if no layer has it.
    is_asked = "sliding_attention" in kinds or getattr(config, "model_type", "") == "gpt_oss"
    if is_asked and getattr(config, "sliding_window", 1) is None:
        raise ModelConfigError("sliding_window must be at least 1 with such layer_types, got None")


def _check_experts(config: object) -> None:
    names = [name for name in EXPERT_COUNTS if hasattr(config, name)]
    if not names or not hasattr(config, CHOSEN):
        return
    name, chosen = names[0], getattr(config, CHOSEN)
    experts = getattr(config, name) or 0
    if not isinstance(chosen, int) or not 1 <= chosen <= experts:
        raise ModelConfigError(f"{CHOSEN} must be 1 to {name}, which is {experts}, got {chosen}")
    if hasattr(config, "n_group") and hasattr(config, "topk_group"):
        _check_groups((name, experts), chosen=chosen, groups=config.n_group, kept=config.topk_group)


def _check_groups(
    named: tuple[str, int], *, chosen: int, groups: int | None, kept: int | None
) -> None:
    """Refuse groups of experts of which a router could not choose."""
    name, experts = named
    if groups is None or kept is None:
        raise ModelConfigError(
            f"n_group and topk_group must be at least 1, got {groups} and {kept}"
        )
    if groups < 1 or experts % groups:
        raise ModelConfigError(f"n_group must divide {name}, which is {experts}, got {groups}")
    if not 1 <= kept <= groups:
        raise ModelConfigError(f"topk_group must be 1 to n_group, which is {groups}, got {kept}")
    size = experts // groups
    if kept < groups and size < 2:
        raise ModelConfigError(
            f"n_group must be at most half of {name}, which is {experts}, got {groups}: a group is "
            "judged by its best two"
        )
    if chosen > kept * size:
        raise ModelConfigError(
            f"{CHOSEN} must be at most the {kept * size} experts of topk_group groups, got {chosen}"
        )
