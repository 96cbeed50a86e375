"""Attention of many pieces in one call: the variable-length flash kernel of torch for CUDA.

The aten operators are private to torch: their public form returns no gradients for a log-sum-exp
that several calls share. The equivalence tests and the pin of torch guard them.

Shapes: P packed queries, H query heads, C packed keys, K key/value heads, D head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPieces:
    """Where the pieces of a call lie in its packed queries and keys.

    Attributes:
        query_bounds: int32, 0 and the end of each piece in the packed queries.
        key_bounds: int32, 0 and the end of each piece in the packed keys.
        query_max: Queries of the piece with the most.
        key_max: Keys of the piece with the most.
        is_causal: True if each piece is a triangle; False if every query sees every key of it.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    query_max: int
    key_max: int
    is_causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTensors:
    """What backward needs of forward; output and log-sum-exp are those over all calls."""

    query_PHD: Tensor
    key_CKD: Tensor
    value_CKD: Tensor
    output_PHD: Tensor
    lse_HP: Tensor


class VarlenKernel(Protocol):
    """Attention of many pieces, each of its own queries over its own keys; tensors are packed."""

    def is_supported(self, dtype: torch.dtype, /, *, head_size: int) -> bool:
        """Whether the kernel has this dtype and head size."""
        ...

    def forward(
        self,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output [P, H, D] of the queries' dtype and log-sum-exp [H, P] in at least fp32."""
        ...

    def backward(
        self,
        output_grad_PHD: Tensor,
        of: ForwardTensors,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the packed queries, keys and values."""
        ...


QUERY_MAX_MIN = 2
"""Queries. Given 1, the operator takes its decoding path, which orders the log-sum-exp's rows
differently; a larger maximum than the pieces have is correct."""

HEAD_SIZE_MAX = 256
"""The largest head size of torch's flash kernels."""

HEAD_SIZE_MULTIPLE = 8
"""torch's flash kernels load 8 half-precision values, 16 bytes, at once."""


class FlashVarlen:
    """The kernel of torch for CUDA, compute capability 8.0 and up."""

    def is_supported(self, dtype: torch.dtype, /, *, head_size: int) -> bool:
        """True for float16 and bfloat16 with head sizes that are multiples of 8 up to 256."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        is_multiple = head_size % HEAD_SIZE_MULTIPLE == 0
        return is_half and is_multiple and head_size <= HEAD_SIZE_MAX

    def forward(
        self,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all pieces, by torch's operator."""
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query_PHD,
            key_CKD,
            value_CKD,
            pieces.query_bounds,
            pieces.key_bounds,
            max_q=max(pieces.query_max, QUERY_MAX_MIN),
            max_k=pieces.key_max,
            dropout_p=0.0,
            is_causal=pieces.is_causal,
            return_debug_mask=False,
            scale=scale,
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
        """Gradients of all pieces, by torch's operator."""
        # Only dropout would read the random generator's state, and there is no dropout.
        no_state = torch.empty(2, dtype=torch.uint64, device=output_grad_PHD.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            output_grad_PHD,
            of.query_PHD,
            of.key_CKD,
            of.value_CKD,
            of.output_PHD,
            of.lse_HP,
            pieces.query_bounds,
            pieces.key_bounds,
            max_q=max(pieces.query_max, QUERY_MAX_MIN),
            max_k=pieces.key_max,
            dropout_p=0.0,
            is_causal=pieces.is_causal,
            rng_state=no_state,
            unused=no_state,
            scale=scale,
        )
        return gradients
