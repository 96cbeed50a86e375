"""The demo's model with 56 million parameters: large enough that its bytes take time on a CPU."""

import shutil
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

_DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "layer_types": ["full_attention"] * 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
"""What differs from the demo's configuration."""


def larger_model(folder: Path, **changes: int) -> Path:
    """Write the model with random weights; its other files are the demo's.

    Args:
        folder: Made by this.
        changes: More fields of its configuration, as `vocab_size`.
    """
    shutil.copytree(_DEMO, folder)
    config = AutoConfig.from_pretrained(_DEMO, **LARGER, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
