"""Which of a GPU's two ways computes a run's attention: flash over pieces, or a block mask."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from forgemq_trainer.core.attention.attention import BlockKeys, RunAttention
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
    """Flash over pieces where branches are few and the kernel has the dtype and size; else flex.

    Args:
        plan: of the run.
        dtype: of queries and keys.
        head_size: of the model.
        kernel: None is that of CUDA.
    """
    is_supported = (kernel or FlashVarlen()).is_supported(dtype, head_size=head_size)
    return "varlen" if is_supported and has_few_branches(plan) else "flex"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttention:
    """Makes the attention of runs on a GPU.

    Attributes:
        head_size: of the model.
        flex: compiled when it is first needed.
        varlen: the other kernel.
        slot_multiple: the block mask is made of whole blocks of keys.
        kind: of every run, for who compares the two; None: what suits each run.
    """

    head_size: int
    flex: FlexKernel = field(default_factory=CompiledFlex)
    varlen: VarlenKernel = field(default_factory=FlashVarlen)
    slot_multiple: int = BLOCKS_MIN * BLOCK
    kind: AttentionKind | None = None

    def of_run(
        self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
    ) -> RunAttention:
        """As `AttentionBackend`; of a given kind, its kernel refuses a dtype that it lacks."""
        kind = self.kind or attention_kind(
            keys.plan, dtype=dtype, head_size=self.head_size, kernel=self.varlen
        )
        if kind == "varlen":
            return varlen_attention_of(keys, kernel=self.varlen, device=device)
        return flex_attention_of(keys, kernel=self.flex, device=device)
