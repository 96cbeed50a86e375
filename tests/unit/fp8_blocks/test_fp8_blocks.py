"""A model's weights as 8-bit floats in blocks, against the format's definition and transformers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from forgemq_contracts.weight_buckets import header_bytes, tensor_specs
from forgemq_fp8_blocks import BLOCK, dequantised, quantise_model, quantised
from forgemq_fp8_blocks.folder import add_quantised
from forgemq_fp8_blocks.plan import NothingToQuantiseError, plan
from tests.float8 import codes
from tests.unit.trainer.scene import save_base

WHOLE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
"""Sizes of which every projection has whole blocks."""

FILE = "model.safetensors"


def weight(dtype: torch.dtype) -> torch.Tensor:
    """Blocks with an outlier, with zeros alone, with tiny numbers, and with ordinary ones."""
    values = torch.randn(2 * BLOCK, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[:BLOCK, :BLOCK][3, 4] = 3e4
    values[:BLOCK, BLOCK : 2 * BLOCK] = 0
    values[BLOCK:, :BLOCK] *= 1e-30
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_the_nearest_8_bit_float_of_its_block(dtype: torch.dtype) -> None:
    given = weight(dtype)
    values, scales = quantised(given)
    full = given.float().numpy()
    for row in range(2):
        for column in range(3):
            at = (
                slice(row * BLOCK, row * BLOCK + BLOCK),
                slice(column * BLOCK, column * BLOCK + BLOCK),
            )
            largest = np.abs(full[at]).max()
            scale = np.float32(largest) / np.float32(448) if largest else np.float32(1)
            assert scales[row, column].item() == scale
            assert values.view(torch.uint8).numpy()[at].tolist() == codes(full[at] / scale).tolist()
    error = (dequantised(values, scales) - given.float()).abs()
    spacing = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) * 2.0**-9
    # Half of the spacing: a sixteenth of the number, or of a subnormal half of the least one.
    assert bool((error <= torch.maximum(given.float().abs() / 16, spacing / 2) * 1.001).all())


def test_projections_of_layers_are_quantised_and_nothing_else() -> None:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (1024, 256),
        "lm_head.weight": (1024, 256),
        f"{layer}.input_layernorm.weight": (256,),
        f"{layer}.self_attn.q_proj.weight": (256, 256),
        f"{layer}.self_attn.q_proj.bias": (256,),
        f"{layer}.self_attn.k_proj.weight": (128, 256),
        f"{layer}.self_attn.v_proj.weight": (128, 256),
        f"{layer}.self_attn.o_proj.weight": (256, 256),
        f"{layer}.mlp.gate.weight": (128, 256),
        f"{layer}.mlp.experts.7.gate_proj.weight": (384, 256),
        f"{layer}.mlp.experts.7.up_proj.weight": (384, 256),
        f"{layer}.mlp.experts.7.down_proj.weight": (256, 384),
    }
    found = plan(shapes)
    assert found.quantised == {name for name in shapes if name.endswith("_proj.weight")}
    assert found.left == ("lm_head", "model.embed_tokens", f"{layer}.mlp.gate")


def test_what_an_engine_computes_as_one_product_has_one_format() -> None:
    place = "model.layers.3.self_attn"
    shapes = {f"{place}.{name}_proj.weight": (128, 128) for name in "qkvo"}
    found = plan({**shapes, f"{place}.k_proj.weight": (64, 128)})
    assert found.quantised == {f"{place}.o_proj.weight"}
    assert found.left == ("lm_head", *(f"{place}.{name}_proj" for name in "kqv"))


def test_a_model_without_a_whole_block_is_refused() -> None:
    with pytest.raises(
        NothingToQuantiseError, match=r"^none of 1 projections has rows and columns"
    ):
        plan({"model.layers.0.mlp.up_proj.weight": (96, 128), "lm_head.weight": (128, 128)})


def test_transformers_finds_the_same_numbers_in_the_folder(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", **WHOLE)
    quantise_model(base, tmp_path / "fp8")
    full, small = load_file(base / FILE), load_file(tmp_path / "fp8" / FILE)
    assert (tmp_path / "fp8" / "tokenizer_config.json").is_file()
    read = Fp8Dequantize(None)
    changed = 0
    for name, expected in full.items():
        scales = small.get(f"{name}_scale_inv")
        if scales is None:
            assert torch.equal(small[name], expected), name
            continue
        changed += 1
        assert small[name].dtype == torch.float8_e4m3fn
        found = read._dequantize_one(small[name], scales, torch.float32)
        assert torch.equal(found, dequantised(small[name], scales)), name
        assert 0 < (found - expected).abs().max() <= expected.abs().max() / 16, name
    assert changed == 2 * 7


def test_files_in_shards_and_small_slabs_give_the_same_bytes(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", **WHOLE, kind="qwen3_moe", moe_intermediate_size=128)
    quantise_model(base, tmp_path / "once")
    tensors = load_file(base / FILE)
    shards = tmp_path / "shards"
    shards.mkdir()
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, name in enumerate(tensors):
        files[("a.safetensors", "b.safetensors")[number % 2]][name] = tensors[name]
    for file, held in files.items():
        save_file(held, shards / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    add_quantised(shards, target, slab_values=BLOCK)
    assert (target / FILE).read_bytes() == (tmp_path / "once" / FILE).read_bytes()
    named = json.loads((target / "config.json").read_bytes())["quantization_config"]
    assert {name for name in named["modules_to_not_convert"] if name.endswith(".mlp.gate")} == {
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    }


def test_every_tensor_is_aligned_and_known_to_the_fast_path(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", **WHOLE)
    quantise_model(base, tmp_path / "fp8")
    data = (tmp_path / "fp8" / FILE).read_bytes()
    specs = tensor_specs(data[: header_bytes(data[:8])])
    assert {spec.dtype for spec in specs} == {"float32", "float8_e4m3fn"}
    assert header_bytes(data[:8]) % 8 == 0
    assert header_bytes(data[:8]) + sum(spec.size_bytes for spec in specs) == len(data)


@pytest.mark.slow
def test_the_command_says_in_one_line_what_cannot_be_written(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    command = [sys.executable, "-m", "forgemq_fp8_blocks", str(base), str(tmp_path / "fp8")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{base}: none of 14 projections has rows and columns")
    assert len(ended.stderr.splitlines()) == 1
