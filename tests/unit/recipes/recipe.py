"""The recipes' run files, and Qwen3 models: published configurations, and the same scaled down."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import configuration, document
from tests.unit.rendering.folders import write_model_folder

RECIPES = Path(__file__).parents[3] / "deploy" / "qwen3"

EOS, PAD = "<|im_end|>", "<|endoftext|>"

PUBLISHED: dict[str, dict[str, Any]] = {
    size: {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40_960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151_936,
        **own,
    }
    for size, own in {
        "4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
        "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    }.items()
}
"""config.json of Qwen3-4B and Qwen3-8B, as far as it decides what a model computes."""

SCALED = {
    "head_dim": 16,
    "hidden_size": 80,
    "intermediate_size": 304,
    "max_window_layers": 2,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
"""Of Qwen3-4B: a 32nd of its width, its ratio of query to key heads, a 18th of its layers."""


def run_of(name: str, *overrides: str) -> RunConfiguration:
    """The run file of a recipe with these overrides, its paths from the root of the repository."""
    values = document((RECIPES / name).read_text(), overrides=overrides)
    return configuration(values, run="r", folder=RECIPES.parents[1])


def config_of(size: str) -> Any:
    """The configuration of the published model in transformers."""
    return AutoConfig.for_model(**PUBLISHED[size])


def parameters_of(size: str) -> int:
    """Parameters of the published model, without their memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(size))
    return sum(each.numel() for each in model.parameters())


def write_scaled_model(folder: Path) -> Path:
    """Qwen3-4B scaled down, random weights, with Qwen3's special tokens and no chat template."""
    write_model_folder(folder)
    # The recipes name the renderer, so nothing may depend on the template of this folder.
    (folder / "chat_template.jinja").unlink()
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    names = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    config = AutoConfig.for_model(
        **{
            **PUBLISHED["4B"],
            **SCALED,
            "vocab_size": max(names.values()) + 1,
            "bos_token_id": names[PAD],
            "eos_token_id": names[EOS],
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
