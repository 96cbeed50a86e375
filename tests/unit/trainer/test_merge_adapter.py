"""What `forgemq merge` refuses; what it writes is compared in `test_adapter_runs.py`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forgemq_contracts.lora import Lora
from forgemq_trainer.core.low_rank import factor_names
from forgemq_trainer.merge_adapter import MergeError, merge_adapter
from forgemq_trainer.storage.adapters import ADAPTER_FILE, model_sha256, write_adapter
from tests.unit.trainer.scene import make_model, save_base

LAYER = "model.layers.0.self_attn.q_proj"
"""[32, 32] in the tiny model."""


def _adapter(folder: Path, *, a: tuple[int, ...] = (2, 32), b: tuple[int, ...] = (32, 2)) -> Path:
    """An adapter of one layer of a tiny base model."""
    base = save_base(folder / "base")
    names = factor_names(LAYER)
    write_adapter(
        dict(zip(names, (torch.ones(a), torch.ones(b)), strict=True)),
        lora=Lora(rank=2, alpha=4.0, targets=("q_proj",)),
        base=base,
        base_sha256=model_sha256(base),
        folder=folder / "adapter",
    )
    return folder / "adapter"


def _as_of_peft(adapter: Path) -> Path:
    """The adapter without its base model's checksum."""
    save_file(load_file(adapter / ADAPTER_FILE), adapter / ADAPTER_FILE, metadata={"format": "pt"})
    return adapter


def _set(adapter: Path, **settings: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | settings))


def test_settings_of_peft_that_change_nothing_are_merged(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path)
    off = {"use_rslora": False, "rank_pattern": {}, "modules_to_save": None, "revision": None}
    off |= {"init_lora_weights": "gaussian", "target_modules": r".*\.q_proj"}
    _set(adapter, **off)
    assert merge_adapter(adapter, tmp_path / "merged") == 1
    found, base = (load_file(tmp_path / each / "model.safetensors") for each in ("merged", "base"))
    # alpha / rank = 2, and each value of B A is 2.
    torch.testing.assert_close(found[f"{LAYER}.weight"], base[f"{LAYER}.weight"] + 4)


def test_another_base_model_of_the_same_shapes_is_refused_with_both_checksums(
    tmp_path: Path,
) -> None:
    adapter = _adapter(tmp_path)
    trained_on = model_sha256(tmp_path / "base")
    weights = load_file(tmp_path / "base/model.safetensors")
    weights[f"{LAYER}.weight"][0, 0] += 1
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    found = model_sha256(tmp_path / "base")
    with pytest.raises(MergeError, match=rf"base has sha256 {found}, .* with sha256 {trained_on}"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_base_model_that_was_moved_is_known_by_its_weights(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path)
    moved = (tmp_path / "base").rename(tmp_path / "elsewhere")
    _set(adapter, base_model_name_or_path=str(moved))
    assert merge_adapter(adapter, tmp_path / "merged") == 1


def test_an_adapter_that_names_no_checksum_is_merged_as_one_of_peft(tmp_path: Path) -> None:
    adapter = _as_of_peft(_adapter(tmp_path))
    weights = load_file(tmp_path / "base/model.safetensors")
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"other": "bytes"})
    assert merge_adapter(adapter, tmp_path / "merged") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"r": 0},
        {"alora_invocation_tokens": [5, 7]},
        {"use_qalora": True},
        {"peft_type": "ADALORA"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
    ],
)
def test_an_adapter_that_is_more_than_a_product_of_two_factors_is_refused_by_name(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    adapter = _adapter(tmp_path)
    _set(adapter, **settings)
    ((name, value),) = settings.items()
    with pytest.raises(MergeError, match=rf"adapter_config.json: {name} is ") as raised:
        merge_adapter(adapter, tmp_path / "merged")
    assert repr(value) in str(raised.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("a", "b"), [((2, 31), (32, 2)), ((2, 32), (31, 2)), ((3, 32), (32, 2)), ((2,), (32, 2))]
)
def test_factors_of_another_shape_than_the_layer_are_refused(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    adapter = _adapter(tmp_path, a=a, b=b)
    with pytest.raises(MergeError, match=rf"{LAYER}.weight of the base model has shape \(32, 32\)"):
        merge_adapter(adapter, tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "base"}


def test_factors_of_another_rank_than_the_settings_say_are_refused(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path)
    _set(adapter, r=4)
    with pytest.raises(MergeError, match=rf"{LAYER}.lora_A.weight has 2 rows, .* has r 4"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("left", ["lm_head.weight", f"{LAYER}.lora_E", LAYER.replace("0", "9")])
def test_a_tensor_that_is_no_factor_of_a_layer_is_refused_by_name(
    tmp_path: Path, left: str
) -> None:
    adapter = _as_of_peft(_adapter(tmp_path))
    tensors = load_file(adapter / ADAPTER_FILE)
    save_file({**tensors, left: torch.zeros(2, 2)}, adapter / ADAPTER_FILE)
    with pytest.raises(MergeError, match=rf"has {left}, which with another is no pair of factors"):
        merge_adapter(adapter, tmp_path / "merged")
    save_file({}, adapter / ADAPTER_FILE)
    with pytest.raises(MergeError, match=r"adapter_model\.safetensors has no tensors"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_weights_in_another_form_are_neither_merged_nor_copied(tmp_path: Path) -> None:
    """As Mistral's folders hold them, and as a base model in shards lies beside others."""
    adapter = _as_of_peft(_adapter(tmp_path))
    base = tmp_path / "base"
    make_model("qwen3", torch.float32).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").rename(base / "consolidated.safetensors")
    (base / "consolidated.00.pth").write_bytes(b"others")
    for file in (tmp_path / "shards").glob("model*"):
        file.rename(base / file.name)
    assert merge_adapter(adapter, tmp_path / "merged") == 1
    merged = tmp_path / "merged"
    left_out = {"consolidated.safetensors", "consolidated.00.pth"}
    assert {file.name for file in base.iterdir()} - left_out == {f.name for f in merged.iterdir()}
    found = {}
    for file in merged.glob("*.safetensors"):
        found |= load_file(file)
    torch.testing.assert_close(found[f"{LAYER}.weight"], weights[f"{LAYER}.weight"] + 4)
    next(base.glob("model-00002*")).unlink()
    with pytest.raises(MergeError, match=r"base has no weights: .* names model-00002"):
        merge_adapter(adapter, tmp_path / "again")


def test_a_damaged_file_of_adapter_or_base_is_refused(tmp_path: Path) -> None:
    adapter = _as_of_peft(_adapter(tmp_path))
    base = tmp_path / "base" / "model.safetensors"
    whole = base.read_bytes()
    base.write_bytes(whole[:-1])
    with pytest.raises(MergeError, match=r"base/model\.safetensors: "):
        merge_adapter(adapter, tmp_path / "merged")
    base.write_bytes(whole)
    file = adapter / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MergeError, match="has no adapter: "):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
