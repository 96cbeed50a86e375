"""The variable-length call by the package flash-attn-4, made for Hopper and Blackwell GPUs.

The package compiles a kernel when a process first needs it: one forward and one backward for each
head size and for triangles and rectangles. `choose_kernel` takes it if it is installed and the GPU
is one of these, else torch's kernels, which are of an older generation.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from forgemq_trainer.core.attention.flash_varlen import (
    FlashVarlen,
    ForwardTensors,
    PackedPieces,
    VarlenKernel,
)

CAPABILITIES = (9, 10)
"""Major compute capabilities that the kernels are made for: Hopper and Blackwell."""

HEAD_SIZE_MIN, HEAD_SIZE_MAX = 16, 128
"""Larger heads need other kernels on Blackwell than on Hopper; torch's have them."""

HEAD_SIZE_MULTIPLE = 16
"""A smaller multiple would be padded."""


class Flash4Varlen:
    """The kernels of flash-attn-4."""

    def __init__(self) -> None:
        # Loading it takes seconds, and only a GPU needs it.
        from flash_attn.cute import interface

        self._interface: Any = interface

    def is_supported(self, dtype: torch.dtype, /, *, head_size: int) -> bool:
        """True for float16 and bfloat16 with head sizes that are multiples of 16 up to 128."""
        return dtype in (torch.float16, torch.bfloat16) and has_head_size(head_size)

    def forward(
        self,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all pieces."""
        output, lse, *_ = self._interface._flash_attn_fwd(
            query_PHD.contiguous(),
            key_CKD.contiguous(),
            value_CKD.contiguous(),
            return_lse=True,
            **_arguments(pieces, scale=scale),
        )
        return output, lse

    def backward(
        self,
        output_grad_PHD: Tensor,
        of: ForwardTensors,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of all pieces."""
        query_grad, key_grad, value_grad = self._interface._flash_attn_bwd(
            of.query_PHD.contiguous(),
            of.key_CKD.contiguous(),
            of.value_CKD.contiguous(),
            of.output_PHD.contiguous(),
            output_grad_PHD.contiguous(),
            of.lse_HP.contiguous(),
            **_arguments(pieces, scale=scale),
        )
        return query_grad, key_grad, value_grad


def _arguments(pieces: PackedPieces, *, scale: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": pieces.is_causal,
        "cu_seqlens_q": pieces.query_bounds,
        "cu_seqlens_k": pieces.key_bounds,
        "max_seqlen_q": pieces.query_max,
        "max_seqlen_k": pieces.key_max,
    }


def has_head_size(head_size: int) -> bool:
    """Whether the kernels take heads of this size on every GPU that they are made for."""
    is_multiple = head_size % HEAD_SIZE_MULTIPLE == 0
    return is_multiple and HEAD_SIZE_MIN <= head_size <= HEAD_SIZE_MAX


def is_flash4_here() -> bool:
    """Whether flash-attn-4 is installed and torch's first GPU is one that it is made for."""
    if not torch.cuda.is_available() or find_spec("flash_attn") is None:
        return False
    is_installed = find_spec("flash_attn.cute") is not None
    return is_installed and torch.cuda.get_device_capability()[0] in CAPABILITIES


def choose_kernel(head_size: int) -> VarlenKernel:
    """The fastest kernel of this machine for heads of this size."""
    is_flash4 = has_head_size(head_size) and is_flash4_here()
    return Flash4Varlen() if is_flash4 else FlashVarlen()
