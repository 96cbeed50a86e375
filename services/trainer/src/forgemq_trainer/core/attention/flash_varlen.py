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
class Lengths:
    """Where the pieces of a call lie in its packed queries and keys.

    Attributes:
        query_bounds: int32, 0 and the end of each piece.
        key_bounds: likewise.
        query_max: the longest piece.
        key_max: likewise.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    query_max: int
    key_max: int


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
        lengths: Lengths,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output [P, H, D] of the queries' dtype and log-sum-exp [H, P] in at least fp32."""
        ...

    def backward(
        self,
        output_grad_PHD: Tensor,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        output_PHD: Tensor,
        lse_HP: Tensor,
        lengths: Lengths,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, given the output and log-sum-exp of all pieces."""
        ...


QUERY_MAX_MIN = 2
"""With one query a piece the operator takes its decoding path, whose rows lie in another order."""


class FlashVarlen:
    """The kernel of torch for CUDA, compute capability 8.0 and up."""

    def is_supported(self, dtype: torch.dtype, /, *, head_size: int) -> bool:
        """As `VarlenKernel`: float16 and bfloat16, multiples of 8 up to 256."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return is_half and head_size % 8 == 0 and head_size <= 256

    def forward(
        self,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        lengths: Lengths,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """As `VarlenKernel`."""
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query_PHD,
            key_CKD,
            value_CKD,
            lengths.query_bounds,
            lengths.key_bounds,
            max_q=max(lengths.query_max, QUERY_MAX_MIN),
            max_k=lengths.key_max,
            dropout_p=0.0,
            is_causal=is_causal,
            return_debug_mask=False,
            scale=scale,
        )
        return output, lse

    def backward(
        self,
        output_grad_PHD: Tensor,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        output_PHD: Tensor,
        lse_HP: Tensor,
        lengths: Lengths,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `VarlenKernel`."""
        # Only dropout, of which there is none, would read the state of the random generator.
        no_state = torch.empty(2, dtype=torch.uint64, device=query_PHD.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            output_grad_PHD,
            query_PHD,
            key_CKD,
            value_CKD,
            output_PHD,
            lse_HP,
            lengths.query_bounds,
            lengths.key_bounds,
            max_q=max(lengths.query_max, QUERY_MAX_MIN),
            max_k=lengths.key_max,
            dropout_p=0.0,
            is_causal=is_causal,
            rng_state=no_state,
            unused=no_state,
            scale=scale,
        )
        return gradients
