"""Tree attention on a CPU: flash kernels over triangles and rectangles, exact forward and backward.

Each piece of the plan is one call of the native flash kernel on contiguous ranges: no mask, no
gather. Partial outputs of a query merge by their log-sum-exp; backward hands every piece the
global output and log-sum-exp, which makes softmax and its correction term globally right, as in
ring attention. Queries of a block may look back at keys of earlier blocks: those lie in a `Carry`,
which also collects the gradients they get, to be added when the earlier block runs backward.

Shapes: T queries of this run, N keys, K key/value heads, Q query heads for each of them, D head
size. The aten kernels are private to torch; the equivalence tests guard the pin.

Exactness and speed: docs/tree_training.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import BlockKeys, Carry, RunAttention
from forgemq_trainer.core.attention.plan import AttentionPlan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Makes the attention of runs on a CPU, of any dtype and head size."""

    slot_multiple: int = 1

    def of_run(
        self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
    ) -> RunAttention:
        """As `AttentionBackend`."""
        del dtype, device

        def attend_run(
            query_THD: Tensor,
            key_TKD: Tensor,
            value_TKD: Tensor,
            /,
            *,
            scale: float,
            carry: Carry | None,
        ) -> Tensor:
            count, heads, size = query_THD.shape
            key_heads = key_TKD.shape[1]
            output_KTQD = attend(
                query_THD.reshape(count, key_heads, heads // key_heads, size).transpose(0, 1),
                key_TKD.transpose(0, 1),
                value_TKD.transpose(0, 1),
                plan=keys.plan,
                scale=scale,
                carry=carry,
            )
            return output_KTQD.transpose(0, 1).flatten(1, 2)

        return attend_run


def attend(
    query_KTQD: Tensor,
    key_KTD: Tensor,
    value_KTD: Tensor,
    *,
    plan: AttentionPlan,
    scale: float,
    carry: Carry | None = None,
) -> Tensor:
    """Attention of every query over its ancestors and itself.

    Returns:
        [K, T, Q, D], of the queries' dtype.

    Raises:
        ValueError: the plan has another number of queries.
    """
    if query_KTQD.shape[1] != plan.end - plan.start:
        raise ValueError(f"plan of {plan.end - plan.start} queries, got {query_KTQD.shape[1]}")
    output = _TreeFlash.apply(query_KTQD, key_KTD, value_KTD, plan, scale, carry)
    assert isinstance(output, Tensor)
    return output


class _TreeFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        query_KTQD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        plan: AttentionPlan,
        scale: float,
        carry: Carry | None,
    ) -> Tensor:
        query_KTQD = query_KTQD.contiguous()
        keys, values = key_KTD.contiguous(), value_KTD.contiguous()
        key_start = plan.start
        if carry is not None:
            carry.key_KND[:, plan.start : plan.end] = keys
            carry.value_KND[:, plan.start : plan.end] = values
            keys, values, key_start = carry.key_KND, carry.value_KND, 0
        output_KTQD, lse_KTQ = _forward_pieces(
            query_KTQD, keys, values, plan=plan, key_start=key_start, scale=scale
        )
        ctx.save_for_backward(query_KTQD, keys, values, output_KTQD, lse_KTQ)
        ctx.plan, ctx.scale, ctx.carry, ctx.key_start = plan, scale, carry, key_start
        return output_KTQD

    @staticmethod
    def backward(ctx: Any, output_grad_KTQD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # as forward
        query_KTQD, keys, values, output_KTQD, lse_KTQ = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        carry: Carry | None = ctx.carry
        wide = torch.promote_types(query_KTQD.dtype, torch.float32)
        if carry is None:
            key_grad = torch.zeros_like(keys, dtype=wide)
            value_grad = torch.zeros_like(values, dtype=wide)
        else:
            key_grad, value_grad = carry.key_grad_KND, carry.value_grad_KND
        query_grad_KTQD = _backward_pieces(
            _Saved(query_KTQD, keys, values, output_KTQD, lse_KTQ),
            output_grad_KTQD.contiguous(),
            key_grad=key_grad,
            value_grad=value_grad,
            plan=plan,
            key_start=ctx.key_start,
            scale=ctx.scale,
        )
        own = slice(plan.start - ctx.key_start, plan.end - ctx.key_start)
        return (
            query_grad_KTQD.to(query_KTQD.dtype),
            key_grad[:, own].to(keys.dtype, copy=True),
            value_grad[:, own].to(values.dtype, copy=True),
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    query_KTQD: Tensor
    keys: Tensor
    values: Tensor
    output_KTQD: Tensor
    lse_KTQ: Tensor


def _forward_pieces(
    query_KTQD: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    plan: AttentionPlan,
    key_start: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query_KTQD.dtype, torch.float32)
    output_KTQD = torch.empty_like(query_KTQD, dtype=wide)
    lse_KTQ = torch.empty(query_KTQD.shape[:3], dtype=wide, device=query_KTQD.device)
    heads, _, group, size = query_KTQD.shape
    queries_QKTD, outputs_QKTD = query_KTQD.permute(2, 0, 1, 3), output_KTQD.permute(2, 0, 1, 3)
    lse_QKT = lse_KTQ.permute(2, 0, 1)
    keys_QKND, values_QKND = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
    for start, end in plan.triangles:
        q, k = (
            slice(start - plan.start, end - plan.start),
            slice(start - key_start, end - key_start),
        )
        piece, lse = _flash(
            queries_QKTD[:, :, q], keys_QKND[:, :, k], values_QKND[:, :, k], 0.0, True, scale=scale
        )
        outputs_QKTD[:, :, q] = piece
        lse_QKT[:, :, q] = lse
    for q0, q1, k0, k1 in plan.rectangles:
        q, k = slice(q0 - plan.start, q1 - plan.start), slice(k0 - key_start, k1 - key_start)
        # The query heads of one key head become rows: keys are read once for all of them.
        rows = query_KTQD[:, q].view(1, heads, (q1 - q0) * group, size)
        piece, lse = _flash(rows, keys[None, :, k], values[None, :, k], 0.0, False, scale=scale)
        old, new = lse_KTQ[:, q], lse.view(heads, q1 - q0, group)
        # w = sigmoid(new - old) is the piece's share of the merged softmax.
        share = torch.sigmoid(new - old)
        output_KTQD[:, q].lerp_(
            piece.reshape(heads, q1 - q0, group, size).to(wide), share[..., None]
        )
        lse_KTQ[:, q] = torch.logaddexp(old, new)
    return output_KTQD.to(query_KTQD.dtype), lse_KTQ


def _backward_pieces(
    saved: _Saved,
    output_grad_KTQD: Tensor,
    *,
    key_grad: Tensor,
    value_grad: Tensor,
    plan: AttentionPlan,
    key_start: int,
    scale: float,
) -> Tensor:
    query_KTQD, keys, values = saved.query_KTQD, saved.keys, saved.values
    heads, _, group, size = query_KTQD.shape
    query_grad_KTQD = torch.zeros_like(query_KTQD, dtype=key_grad.dtype)
    query_grad_QKTD = query_grad_KTQD.permute(2, 0, 1, 3)
    grads_QKTD = output_grad_KTQD.permute(2, 0, 1, 3)
    queries_QKTD = query_KTQD.permute(2, 0, 1, 3)
    outputs_QKTD = saved.output_KTQD.permute(2, 0, 1, 3)
    lse_QKT = saved.lse_KTQ.permute(2, 0, 1).contiguous()
    keys_QKND, values_QKND = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
    for start, end in plan.triangles:
        q, k = (
            slice(start - plan.start, end - plan.start),
            slice(start - key_start, end - key_start),
        )
        dq, dk, dv = _flash_backward(
            grads_QKTD[:, :, q],
            queries_QKTD[:, :, q],
            keys_QKND[:, :, k],
            values_QKND[:, :, k],
            outputs_QKTD[:, :, q],
            lse_QKT[:, :, q].contiguous(),
            0.0,
            True,
            scale=scale,
        )
        query_grad_QKTD[:, :, q] += dq
        key_grad[:, k] += dk.sum(0)
        value_grad[:, k] += dv.sum(0)
    for q0, q1, k0, k1 in plan.rectangles:
        q, k = slice(q0 - plan.start, q1 - plan.start), slice(k0 - key_start, k1 - key_start)
        shape = (1, heads, (q1 - q0) * group, size)
        dq, dk, dv = _flash_backward(
            output_grad_KTQD[:, q].view(shape),
            query_KTQD[:, q].view(shape),
            keys[None, :, k],
            values[None, :, k],
            saved.output_KTQD[:, q].view(shape),
            saved.lse_KTQ[:, q].reshape(shape[:3]),
            0.0,
            False,
            scale=scale,
        )
        query_grad_KTQD[:, q] += dq.reshape(heads, q1 - q0, group, size)
        key_grad[:, k] += dk[0]
        value_grad[:, k] += dv[0]
    return query_grad_KTQD
