import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook


def write_model(folder: Path, *, seed: int) -> Path:
    """A model's folder with four small tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 704, "max_position_embeddings": 1024})
    )
    random = np.random.default_rng(seed)
    tensors = {f"layers.{i}.weight": random.normal(size=(8, 4)).astype("f4") for i in range(4)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", seed=0)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return write_model(tmp_path / "trained", seed=1)
