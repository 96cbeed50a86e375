"""Checksums of sampled parameters are those of what an engine holds."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from forgemq_fp8_blocks import BLOCK, dequantised, quantised
from forgemq_trainer.samples import sampled_parameters

LAYER = "model.layers.0.mlp"


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def checksums(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    save_file(tensors, path)
    found = sampled_parameters(path, key="r-1.1", count=100)
    return {each.name: each.sha256 for each in found}


def test_8_bit_blocks_have_the_checksum_of_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    """SGLang's checker hashes them so, in bfloat16. The matrices are larger than what is made
    numbers at once, and two of them are one parameter of an engine."""
    torch.manual_seed(0)
    tensors, expected = {}, []
    for name in ("gate", "up"):
        values, scales = quantised(torch.randn(9 * BLOCK, 2 * BLOCK))
        tensors[f"{LAYER}.{name}_proj.weight"] = values
        tensors[f"{LAYER}.{name}_proj.weight_scale_inv"] = scales
        expected.append(dequantised(values, scales).bfloat16())
    found = checksums(tmp_path / "fp8.safetensors", tensors)
    assert found == {f"{LAYER}.gate_up_proj.weight": sha256(torch.cat(expected))}


def test_an_embedding_has_the_checksum_with_its_rows_of_zeros(tmp_path: Path) -> None:
    rows = torch.randn(70, 8)
    found = checksums(tmp_path / "full.safetensors", {"model.embed_tokens.weight": rows})
    padded = torch.cat([rows, torch.zeros(58, 8)])
    assert found == {"model.embed_tokens.weight": sha256(padded)}
