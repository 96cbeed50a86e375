"""Draft heads for the trainer's tests, written as the engine's class reads them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from forgemq_trainer.draft_head import DraftLayer

SIZES: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def save_head(folder: Path, *, seed: int = 3, **changes: object) -> Path:
    """Save a random head for the tiny model of `scene.make_model`."""
    config = LlamaConfig(**(SIZES | changes))  # type: ignore[arg-type]
    torch.manual_seed(seed)
    layer = DraftLayer(config)
    with torch.no_grad():  # Larger than torch's: a layer that does next to nothing hides errors.
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {name: tensor.contiguous() for name, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
