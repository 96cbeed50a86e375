"""The recipes' run files, and Qwen3 models: published configurations, and the same scaled down."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import configuration, document
from tests.unit.rendering.folders import write_model_folder

RECIPES = Path(__file__).parents[3] / "deploy" / "recipes" / "qwen3-4b"

EOS, PAD = "<|im_end|>", "<|endoftext|>"

_OF_4B: dict[str, Any] = json.loads((RECIPES / "config.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = {
    "4B": _OF_4B,
    "8B": {
        **_OF_4B,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
}
"""config.json of Qwen3-4B and Qwen3-8B."""

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
    return configuration(values, run="r", folder=RECIPES.parents[2])


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
