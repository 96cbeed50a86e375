"""Linear layers of 8-bit floats in blocks, in plain PyTorch.

SGLang computes them on GPUs, and on CPUs with AMX. Here the inputs become 8-bit floats as there,
128 of a token at a time with a scale of their own, and the products are summed in float32. So an
engine on any CPU has the rounding of a GPU's, and none of its speed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_FP8_MAX = 448.0
"""The largest float8_e4m3fn."""

_AMAX_MIN = 1e-10
"""Below it SGLang's kernels take this for a group's largest magnitude."""


def choose(*_: object, **__: object) -> Callable[..., Tensor]:
    """The function that computes such layers, in place of SGLang's choice of a kernel."""
    return linear


def with_float32(dtypes: list[torch.dtype], *_: object, **__: object) -> list[torch.dtype]:
    """The dtypes that the model may have besides, and that of engines on a CPU."""
    return [*dtypes, torch.float32]


def linear(
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The layer's output, in the dtype of its input.

    Args:
        input: [tokens, columns].
        weight: float8_e4m3fn [rows, columns].
        block_size: Rows and columns that share a scale; the input is grouped as the columns.
        weight_scale: What each block is multiplied with.
        input_scale: Of an input that is quantised already, which no layer on a CPU has.
        bias: [rows].
    """
    assert input_scale is None
    rows, columns = block_size
    scales = weight_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    full = weight.float() * scales[: weight.shape[0], : weight.shape[1]]
    output = torch.nn.functional.linear(rounded(input.float(), columns), full)
    if bias is not None:
        output = output + bias.float()
    return output.to(input.dtype)


def rounded(input_: Tensor, group: int) -> Tensor:
    """The input as 8-bit floats with a scale for each `group` values can say it, in float32."""
    groups = input_.reshape(*input_.shape[:-1], -1, group)
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp(min=_AMAX_MIN) / _FP8_MAX
    nearest = (groups / scales).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return (nearest.float() * scales).reshape(input_.shape)
