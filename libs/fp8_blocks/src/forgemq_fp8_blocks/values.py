"""The numbers of one matrix: to 8-bit floats with a scale for each block, and back."""

import torch
from torch import Tensor

BLOCK = 128
"""Rows, and columns, that share a scale."""

FP8_MAX = 448.0
"""The largest float8_e4m3fn."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 8-bit floats, and the scales they are multiplied with.

    A block's scale is its largest magnitude over 448, so that this one is exact within rounding;
    a block of zeros has scale 1. Equal weights give equal bytes.

    Args:
        weight: [rows, columns], of any floating dtype; both are multiples of `BLOCK`.

    Returns:
        float8_e4m3fn [rows, columns] and float32 [rows / BLOCK, columns / BLOCK].
    """
    blocks = _in_blocks(weight.float())
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    # A quotient may be above 448 by the rounding of the scale; conversion rounds to nearest.
    nearest = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return nearest.reshape(weight.shape), scales


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The matrix that they stand for, in float32."""
    blocks = _in_blocks(values.float())
    return (blocks * scales[:, None, :, None]).reshape(values.shape)


def _in_blocks(matrix: Tensor) -> Tensor:
    """[rows / BLOCK, BLOCK, columns / BLOCK, BLOCK]."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
