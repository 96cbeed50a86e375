"""Chooses how a GPU computes a run's attention: flash over pieces, or a block mask.

Layers with a window always take the mask.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import (
    AttentionBackend,
    BlockKeys,
    RunAttention,
)
from forgemq_trainer.core.attention.cpu_attention import CpuAttention
from forgemq_trainer.core.attention.flash4_varlen import choose_kernel
from forgemq_trainer.core.attention.flash_varlen import FlashVarlen, VarlenKernel
from forgemq_trainer.core.attention.flex import (
    BLOCK,
    BLOCKS_MIN,
    CompiledFlex,
    FlexKernel,
    flex_attention_of,
)
from forgemq_trainer.core.attention.plan import AttentionPlan
from forgemq_trainer.core.attention.varlen import has_few_branches, varlen_attention_of

AttentionKind: TypeAlias = Literal["varlen", "flex"]


def attention_kind(
    plan: AttentionPlan,
    *,
    dtype: torch.dtype,
    head_size: int,
    kernel: VarlenKernel | None = None,
) -> AttentionKind:
    """Flash over pieces if branches are few and the kernel has the dtype and head size; else flex.

    Args:
        plan: The run's pieces, whose branches are counted.
        dtype: Dtype of queries and keys.
        head_size: Size of one head's keys.
        kernel: None is torch's for CUDA.
    """
    is_supported = (kernel or FlashVarlen()).is_supported(dtype, head_size=head_size)
    return "varlen" if is_supported and has_few_branches(plan) else "flex"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttention:
    """Makes the attention of runs on a GPU.

    Attributes:
        head_size: Size of one head's keys.
        flex: Kernel under a block mask; compiled when it is first needed.
        varlen: Kernel over pieces.
        slot_multiple: The block mask needs whole blocks of keys.
        kind: Fixes the way of every run, to compare the two; None chooses for each run.
    """

    head_size: int
    flex: FlexKernel = field(default_factory=CompiledFlex)
    varlen: VarlenKernel = field(default_factory=FlashVarlen)
    slot_multiple: int = BLOCKS_MIN * BLOCK
    kind: AttentionKind | None = None

    def of_run(
        self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
    ) -> RunAttention:
        """Attention of one run; with a fixed `kind`, its kernel may refuse the dtype."""
        kind = self.kind or attention_kind(
            keys.plan, dtype=dtype, head_size=self.head_size, kernel=self.varlen
        )

        @cache
        def masked() -> RunAttention:
            return flex_attention_of(keys, kernel=self.flex, device=device)

        if kind == "flex":
            return masked()
        by_pieces = varlen_attention_of(keys, kernel=self.varlen, device=device)

        def attend(*tensors: Tensor, window: int | None = None, **others: Any) -> Tensor:  # noqa: ANN401  # of `RunAttention`
            # The pieces' kernel has no bands; a layer with a window takes the mask.
            chosen = by_pieces if window is None else masked()
            return chosen(*tensors, window=window, **others)

        return attend


def attention_on(device: torch.device, *, head_size: int) -> AttentionBackend:
    """Tree attention on a device, by the fastest kernels that it has for heads of this size."""
    if device.type != "cuda":
        return CpuAttention()
    return GpuAttention(head_size=head_size, varlen=choose_kernel(head_size))
