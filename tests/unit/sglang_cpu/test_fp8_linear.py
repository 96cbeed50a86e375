"""Layers of 8-bit floats on a CPU, against the definition of the format in float64."""

import numpy as np
import pytest
import torch

from forgemq_fp8_blocks import dequantised, quantised
from forgemq_sglang_cpu.fp8_linear import linear, rounded, with_float32
from tests.float8 import nearest

TOKENS, COLUMNS, ROWS, BLOCK = 5, 256, 384, 128


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded_by_definition(inputs: np.ndarray) -> np.ndarray:
    groups = inputs.reshape(*inputs.shape[:-1], -1, BLOCK)
    largest = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(1e-10))
    scales = (largest / np.float32(448)).astype(np.float32)
    quotients = np.clip((groups / scales).astype(np.float32), -448, 448)
    return (nearest(quotients) * scales).reshape(inputs.shape)


@pytest.mark.parametrize("has_bias", [False, True])
def test_inputs_are_rounded_in_groups_and_the_products_are_exact(has_bias: bool) -> None:
    inputs = draw(TOKENS, COLUMNS, seed=0) * 10.0 ** torch.arange(-4, TOKENS - 4)[:, None]
    inputs[0, :BLOCK] = 0
    weight, scales = quantised(draw(ROWS, COLUMNS, seed=1))
    bias = draw(ROWS, seed=2) if has_bias else None
    found = linear(inputs, weight, [BLOCK, BLOCK], scales, bias=bias)
    full = dequantised(weight, scales).double().numpy()
    expected = rounded_by_definition(inputs.numpy()) @ full.T
    if bias is not None:
        expected = expected + bias.double().numpy()
    size = np.abs(inputs.double().numpy()) @ np.abs(full).T
    assert found.dtype == inputs.dtype
    assert float((np.abs(found.double().numpy() - expected) / (size + 1)).max()) < 1e-6


def test_a_rounded_input_is_off_by_at_most_a_sixteenth() -> None:
    inputs = draw(64, COLUMNS, seed=3)
    error = (rounded(inputs, BLOCK) - inputs).abs()
    assert error.max() > 0
    assert bool((error <= inputs.abs() / 16 + 1e-4).all())


def test_the_dtype_of_an_engine_on_a_cpu_is_one_that_the_format_may_have() -> None:
    assert with_float32([torch.bfloat16, torch.half]) == [torch.bfloat16, torch.half, torch.float32]
