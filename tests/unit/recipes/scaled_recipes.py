"""The recipes' models with fewer and narrower layers: their config.json in all else."""

import json
from typing import Any

from tests.unit.recipes.planned_recipes import RECIPES

SCALED_FILES = {
    "qwen3-4b": "qwen3-4b/maths.toml",
    "qwen3-30b-a3b": "qwen3-30b-a3b/maths.toml",
    "minimax-m2": "minimax-m2/coding.toml",
}
"""A run file of each recipe."""

_OF_ALL: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 512,
}

_OF_RECIPE: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"intermediate_size": 304, "max_window_layers": 2},
    "qwen3-30b-a3b": {
        "moe_intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "max_window_layers": 2,
    },
    "minimax-m2": {
        "intermediate_size": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "rotary_dim": 8,
    },
}


def scaled_config(recipe: str, *, dtype: str = "float32") -> dict[str, Any]:
    """config.json of a recipe's model, scaled down to these sizes."""
    published = json.loads((RECIPES / recipe / "config.json").read_text())
    return {**published, **_OF_ALL, **_OF_RECIPE[recipe], "torch_dtype": dtype}
