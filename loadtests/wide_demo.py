"""The demo's model with as many key heads as query heads: equal, and all in whole blocks."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_DEMO = Path(__file__).parents[1] / "deploy" / "demo" / "model"


def wide_demo(folder: Path) -> Path:
    """Write it; each key and value head stands where the query heads that share it look."""
    shutil.copytree(_DEMO, folder)
    config = json.loads((folder / "config.json").read_bytes())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    config["num_key_value_heads"] = heads
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = load_file(_DEMO / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            grouped = tensor.view(key_heads, -1, tensor.shape[1])
            tensors[name] = grouped.repeat_interleave(heads // key_heads, 0).flatten(0, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
