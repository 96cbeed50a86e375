"""A CPU's versions of a GPU's two kernels: the same arguments, in every dtype, with gradients."""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention

from forgemq_trainer.core.attention.flash_varlen import ForwardTensors, PackedPieces
from forgemq_trainer.core.attention.flex import TreeMask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_KERNEL_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def eager_flex(
    query_HTD: Tensor,
    key_KSD: Tensor,
    value_KSD: Tensor,
    /,
    *,
    mask: TreeMask,
    scale: float,
    has_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run FlexAttention's operator without a compiler: with dense scores it has a CPU backward.

    It reads the mask's function, not its lists of blocks.
    """
    output, lse, *_ = flex_attention(
        query_HTD[None],
        key_KSD[None],
        value_KSD[None],
        _unchanged,
        mask.block_mask().as_tuple(),
        scale,
        _KERNEL_OPTIONS,
    )
    return output[0], lse[0] * math.log(2) if has_lse else None  # The operator's is of base 2.


def _unchanged(score: Tensor, *_indices: Tensor) -> Tensor:
    return score


class PieceByPiece:
    """A variable-length kernel: torch's flash attention of a CPU, one piece after another."""

    def __init__(self) -> None:
        self.calls = 0

    def is_supported(self, _dtype: torch.dtype, /, *, head_size: int) -> bool:
        """True: a CPU computes every dtype and head size."""
        return head_size > 0

    def forward(
        self,
        query_PHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, piece by piece."""
        self.calls += 1
        output_PHD = torch.empty_like(query_PHD)
        wide = torch.promote_types(query_PHD.dtype, torch.float32)
        lse_HP = torch.empty(query_PHD.shape[1::-1], dtype=wide)
        for queries, keys in _slices(pieces):
            output, lse = _flash(
                _rows(query_PHD[queries]),
                _repeated(key_CKD[keys], query_PHD),
                _repeated(value_CKD[keys], query_PHD),
                0.0,
                pieces.is_causal,
                scale=scale,
            )
            output_PHD[queries], lse_HP[:, queries] = output[0].transpose(0, 1), lse[0]
        return output_PHD, lse_HP

    def backward(
        self,
        output_grad_PHD: Tensor,
        of: ForwardTensors,
        pieces: PackedPieces,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, piece by piece."""
        assert output_grad_PHD.is_contiguous()
        query_PHD, key_CKD, value_CKD = of.query_PHD, of.key_CKD, of.value_CKD
        gradients = [torch.empty_like(tensor) for tensor in (query_PHD, key_CKD, value_CKD)]
        for queries, keys in _slices(pieces):
            parts = _flash_backward(
                _rows(output_grad_PHD[queries]),
                _rows(query_PHD[queries]),
                _repeated(key_CKD[keys], query_PHD),
                _repeated(value_CKD[keys], query_PHD),
                _rows(of.output_PHD[queries]),
                of.lse_HP[None, :, queries].contiguous(),
                0.0,
                pieces.is_causal,
                scale=scale,
            )
            gradients[0][queries] = parts[0][0].transpose(0, 1)
            for owed, part in zip(gradients[1:], parts[1:], strict=True):
                heads = owed.shape[1]
                owed[keys] = part[0].unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
        return gradients[0], gradients[1], gradients[2]


def _slices(pieces: PackedPieces) -> list[tuple[slice, slice]]:
    queries = [slice(*bounds) for bounds in pairwise(pieces.query_bounds.tolist())]
    keys = [slice(*bounds) for bounds in pairwise(pieces.key_bounds.tolist())]
    assert max(piece.stop - piece.start for piece in queries) == pieces.query_max
    assert max(piece.stop - piece.start for piece in keys) == pieces.key_max
    return list(zip(queries, keys, strict=True))


def _rows(values_PHD: Tensor) -> Tensor:
    return values_PHD.transpose(0, 1)[None].contiguous()


def _repeated(values_CKD: Tensor, query_PHD: Tensor) -> Tensor:
    group = query_PHD.shape[1] // values_CKD.shape[1]
    return values_CKD.repeat_interleave(group, dim=1).transpose(0, 1)[None].contiguous()
