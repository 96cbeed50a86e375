"""How many layers fit, how many bytes they take, and the attention of the baseline."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from scaled_model import Machine, causal_flash, trained_bytes

from forgemq_trainer.core.flops import flops
from tests.unit.loadtests.tiny import LARGE, shape_of


def whole_bytes_of(machine: Machine, layers: int, *, tokens: int) -> int:
    shape = shape_of(machine, layers)
    return trained_bytes(shape) + shape.block_bytes(tokens, chunk=1024, is_carried=False)


@pytest.mark.parametrize("layers", [2, 6, 17])
def test_the_last_byte_decides_how_many_layers_fit(layers: int) -> None:
    needed = whole_bytes_of(LARGE, layers, tokens=31_540)
    assert replace(LARGE, memory_bytes=needed).layers_that_fit(31_540) == layers
    assert replace(LARGE, memory_bytes=needed - 1).layers_that_fit(31_540) == layers - 1


@pytest.mark.parametrize("layers", [1, 2, 6, 17, 36])
def test_the_head_weighs_what_it_weighs_in_the_whole_model(layers: int) -> None:
    def share(count: int) -> float:
        work = flops(shape_of(LARGE, count), tokens=1, pairs=0, rows=1)
        return work.head / work.weights

    assert share(layers) == pytest.approx(share(36), rel=0.02)


def test_parameters_and_gradients_are_counted_as_the_8b_has_them() -> None:
    parameters = trained_bytes(shape_of(LARGE, 36)) / 4
    assert parameters == pytest.approx(8.19e9, rel=0.002)


def test_baseline_attention_is_causal_softmax_attention_with_shared_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 7, 8, generator=generator)
    key, value = (torch.randn(1, 2, 7, 8, generator=generator) for _ in range(2))
    output, _ = causal_flash(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    for head in range(4):
        scores = 0.3 * query[0, head] @ key[0, head // 2].T
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
        wanted = scores.softmax(-1) @ value[0, head // 2]
        torch.testing.assert_close(output[0, :, head], wanted, rtol=1e-5, atol=1e-6)


def test_baseline_attention_raises_where_flash_cannot_run() -> None:
    query, value = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 4)
    with warnings.catch_warnings(action="ignore"), pytest.raises(RuntimeError, match="kernel"):
        causal_flash(torch.nn.Identity(), query, query, value, None)
    mask = torch.zeros(1, 1, 5, 5)
    with pytest.raises(ValueError, match="no mask"):
        causal_flash(torch.nn.Identity(), query, query, query, mask)
    with pytest.raises(ValueError, match="no window"):
        causal_flash(torch.nn.Identity(), query, query, query, None, sliding_window=4)
