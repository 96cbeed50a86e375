"""Tree attention on a CPU: flash kernels over triangles and rectangles, exact forward and backward.

Each piece of the plan is one call of the native flash kernel on contiguous ranges: no mask, no
gather. Partial outputs of a query merge by their log-sum-exp; backward hands every piece the
global output and log-sum-exp, which makes softmax and its correction term globally right, as in
ring attention. Queries of a block may look back at keys of earlier blocks: those lie in a `Carry`,
which also collects the gradients they get, to be added when the earlier block runs backward.

Shapes: T queries of this run, N tokens of the forest, K key/value heads, Q query heads for each of
them, D head size. The aten kernels are private to torch; the equivalence tests guard the pin.

Design: prefix_tree.md, B.1 and Recommendations/CPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgemq.trainer.core.plan import AttentionPlan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

UNSUPPORTED = ("sliding_window", "softcap", "s_aux")
"""What models of transformers may ask of attention, and would be wrong without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """Keys and values of one layer for a whole forest, and the gradients collected for them.

    Blocks run forward in layout order, each writing its range of `key_KND` and `value_KND`, and
    backward in reverse order: when a block runs backward, every later block has added what its
    queries owe to this block's keys.
    """

    key_KND: Tensor
    value_KND: Tensor
    key_grad_KND: Tensor
    value_grad_KND: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention:
    """What every layer's attention is told: the plan, and the carries of a forest in blocks.

    Attributes:
        plan: pieces of the queries of this run.
        carries: one for each layer; empty where the run is the whole forest.
        flex: attention of a GPU (query, key, value, scale) -> output; None on a CPU.
    """

    plan: AttentionPlan
    carries: tuple[Carry, ...] = ()
    flex: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None


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


def attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_attention: TreeAttention,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """Tree attention as transformers calls it; the plan arrives as the model's keyword argument.

    Args:
        module: the layer's attention; its `layer_idx` picks the carry.
        query: [1, heads, T, D] after rotary embedding; perhaps wider than `value`'s dtype.
        key: [1, key/value heads, T, D].
        value: [1, key/value heads, T, D].
        attention_mask: must be None; the plan says who sees whom.
        tree_attention: the plan and the carries of this run.
        scaling: of the scores; None is 1 / sqrt(D).
        dropout: must be 0.
        **others: what else a model passes; `UNSUPPORTED` must be None.

    Returns:
        [1, T, heads, D] and None.

    Raises:
        ValueError: a mask, dropout, a window, sinks or a cap of the scores was asked for, or the
            batch has several rows.
    """
    if attention_mask is not None or dropout:
        raise ValueError("tree attention takes neither a mask nor dropout")
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"tree attention takes no {name}, got {others[name]}")
    rows, heads, count, size = query.shape
    if rows != 1:
        raise ValueError(f"a forest is one row, got {rows}")
    scale = 1 / math.sqrt(size) if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key = query.to(value.dtype), key.to(value.dtype)
    carry = tree_attention.carries[layer] if tree_attention.carries else None
    if tree_attention.flex is not None:
        keys, values = _with_carry(key, value, carry, start=tree_attention.plan.start)
        return tree_attention.flex(query, keys, values, scale).transpose(1, 2), None
    key_heads = key.shape[1]
    output_KTQD = attend(
        query[0].reshape(key_heads, heads // key_heads, count, size).transpose(1, 2),
        key[0],
        value[0],
        plan=tree_attention.plan,
        scale=scale,
        carry=carry,
    )
    return output_KTQD.transpose(0, 1).reshape(1, count, heads, size), None


def _with_carry(
    key: Tensor, value: Tensor, carry: Carry | None, *, start: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of the live path and the block's own behind them; without carry its own."""
    if carry is None:
        return key, value
    keys = carried(key[0], carry.key_KND, carry.key_grad_KND, start=start)
    values = carried(value[0], carry.value_KND, carry.value_grad_KND, start=start)
    return keys[None], values[None]


def carried(own_KTD: Tensor, whole_KND: Tensor, grad_KND: Tensor, *, start: int) -> Tensor:
    """Keys (or values) up to the end of this block, for any attention that autograd can do.

    Forward writes the block's own into the carry; backward adds what the block owes to earlier
    keys into the carry's gradients, and returns its own together with what later blocks left.
    """
    output = _Carried.apply(own_KTD, whole_KND, grad_KND, start)
    assert isinstance(output, Tensor)
    return output


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        own_KTD: Tensor,
        whole_KND: Tensor,
        grad_KND: Tensor,
        start: int,
    ) -> Tensor:
        end = start + own_KTD.shape[1]
        whole_KND[:, start:end] = own_KTD
        ctx.grad_KND, ctx.start = grad_KND, start
        return whole_KND[:, :end].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        start, end = ctx.start, grad.shape[1]
        ctx.grad_KND[:, :end] += grad
        return ctx.grad_KND[:, start:end].to(grad.dtype, copy=True), None, None, None
