"""Puts the chains of `speculation.py` in the place of SGLang's GPU kernels.

Imported only by an engine process that speculates, on the platform for CPUs. The names below are
those of sglang 0.5.23.
"""

import copy
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import eagle_utils, eagle_worker_common, eagle_worker_v2
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from forgemq_sglang_cpu import speculation

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor


class _Step(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang has no types
    """Attention of one drafted token, which sees those drafted before it."""

    def __init__(self, runner: "ModelRunner", step: int) -> None:
        super().__init__(runner)
        self._drafted = step + 1

    def forward_decode(
        self,
        q: "Tensor",
        k: "Tensor",
        v: "Tensor",
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
    ) -> "Tensor":
        """Attention over one new token of each request."""
        longer = copy.copy(forward_batch)
        longer.seq_lens = forward_batch.seq_lens + self._drafted
        attended: Tensor = super().forward_decode(q, k, v, layer, longer, save_kv_cache)
        return attended


class _Steps:
    """The attention of each drafted token but the last, which only the policy reads."""

    def __init__(self, runner: "ModelRunner", steps: int) -> None:
        self.attn_backends = [_Step(runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Prepare all of them for a batch."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


_plain_extend = TorchNativeAttnBackend.forward_extend


def install() -> None:
    """Replace SGLang's kernels in the modules that call them; idempotent."""
    allocation.assign_req_to_token_pool_func = speculation.assign_slots
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = (
        speculation.copy_draft_cache_locations
    )
    eagle_worker_common.fill_bonus_tokens_func = speculation.copy_last_accepted
    eagle_utils.build_tree_kernel_efficient_func = speculation.build_chain
    eagle_utils.verify_tree_greedy_func = speculation.verify_greedy
    eagle_utils.tree_speculative_sampling_target_only = speculation.verify_sampled
    eagle_utils.top_k_renorm_prob = speculation.top_k_renormalised
    eagle_utils.top_p_renorm_prob = speculation.top_p_renormalised
    # SGLang's is compiled by torch, which takes a C++ compiler and minutes.
    eagle_worker_v2.select_top_k_tokens = speculation.select_drafted
    # Of the class: policy and draft each make their own objects of it.
    TorchNativeAttnBackend.forward_extend = _extend
    DraftBackendFactory.create_decode_backend = _decode_backend
    DraftBackendFactory.create_draft_extend_backend = _draft_extend_backend


def _decode_backend(factory: DraftBackendFactory) -> _Steps | None:
    steps = factory.speculative_num_steps
    return _Steps(factory.draft_model_runner, steps) if steps > 1 else None


def _draft_extend_backend(factory: DraftBackendFactory) -> TorchNativeAttnBackend:
    return TorchNativeAttnBackend(factory.draft_model_runner)


def _extend(
    self: TorchNativeAttnBackend,
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    layer: "RadixAttention",
    forward_batch: "ForwardBatch",
    save_kv_cache: bool = True,
) -> "Tensor":
    """Attention over several new tokens of each request, drafted ones included."""
    if forward_batch.forward_mode.is_target_verify():
        forward_batch = _with_drafted(forward_batch)
    attended: Tensor = _plain_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
    return attended


def _with_drafted(forward_batch: "ForwardBatch") -> "ForwardBatch":
    """The batch as an extension of each request by what is drafted."""
    count = forward_batch.spec_info.draft_token_num
    extended = copy.copy(forward_batch)
    extended.extend_prefix_lens = forward_batch.seq_lens
    extended.extend_seq_lens = torch.full_like(forward_batch.seq_lens, count)
    extended.seq_lens = forward_batch.seq_lens + count
    return extended
