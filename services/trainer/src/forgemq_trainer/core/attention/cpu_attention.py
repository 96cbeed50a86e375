"""Tree attention on a CPU: flash kernels over triangles and rectangles, exact forward and backward.

Each piece of the plan is one call of the native flash kernel on contiguous ranges: no mask, no
gather. Partial outputs of a query merge by their log-sum-exp; backward gives every piece the
global output and log-sum-exp, which makes softmax and its correction term globally right, as in
ring attention (arXiv 2310.01889). Queries of a block may look back at keys of earlier blocks: those
lie in a `Carry`, which also collects their gradients, to be added when the earlier block runs
backward.

Under a window some pieces are bands (`windows.py`), which are calls with a mask. A sink joins the
log-sum-exp of its query when all pieces have: as its value is 0, it scales the output down and adds
nothing to it, and the pieces' backward is right once the global log-sum-exp has it.

Shapes: T queries of this run, N keys, K key/value heads, Q query heads for each of them, D head
size. The aten kernels are private to torch; the equivalence tests guard the pin.

Exactness and speed: docs/tree_training.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import (
    BlockKeys,
    Carry,
    KeptOutput,
    RunAttention,
)
from forgemq_trainer.core.attention.plan import AttentionPlan, Range
from forgemq_trainer.core.attention.windows import Band, WindowedPlan, band_mask, windowed

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Makes the attention of runs on a CPU, of any dtype and head size."""

    slot_multiple: int = 1

    def of_run(
        self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
    ) -> RunAttention:
        """Attention of one run, as `AttentionBackend` declares it."""
        del dtype, device  # The kernel takes every dtype, on the one device there is.

        @cache
        def plan_under(window: int) -> WindowedPlan:
            return windowed(keys.plan, keys.position_S, window=window)

        def attend_run(
            query_THD: Tensor,
            key_TKD: Tensor,
            value_TKD: Tensor,
            /,
            *,
            scale: float,
            carry: Carry | None,
            kept: KeptOutput | None = None,
            window: int | None = None,
            sinks_H: Tensor | None = None,
        ) -> Tensor:
            count, heads, size = query_THD.shape
            key_heads = key_TKD.shape[1]
            under = None if window is None else plan_under(window)
            output_KTQD = attend(
                query_THD.reshape(count, key_heads, heads // key_heads, size).transpose(0, 1),
                key_TKD.transpose(0, 1),
                value_TKD.transpose(0, 1),
                AttentionRun(plan=keys.plan, scale=scale, carry=carry, windowed=under, kept=kept),
                sinks_KQ=None if sinks_H is None else sinks_H.view(key_heads, -1),
            )
            return output_KTQD.transpose(0, 1).flatten(1, 2)

        return attend_run


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRun:
    """What one layer's attention over a run of queries depends on, besides its tensors.

    Attributes:
        plan: Pieces of the run.
        scale: Multiplies the scores.
        carry: Keys of earlier blocks; None if the run is the whole forest.
        kept: Of a layer that runs forward twice.
        windowed: The plan under the layer's window; None without one.
    """

    plan: AttentionPlan
    scale: float
    carry: Carry | None = None
    kept: KeptOutput | None = None
    windowed: WindowedPlan | None = None

    @property
    def triangles(self) -> tuple[Range, ...]:
        """Causal pieces; together they have every query once."""
        return (self.windowed.plan if self.windowed else self.plan).triangles

    def later_pieces(self) -> Iterator[tuple[Range, Range, Band | None]]:
        """(queries, keys, band) of all other pieces; the band is None if all pairs are visible."""
        for q0, q1, k0, k1 in (self.windowed.plan if self.windowed else self.plan).rectangles:
            yield (q0, q1), (k0, k1), None
        for band in self.windowed.bands if self.windowed else ():
            yield band.queries, band.keys, band

    def mask(self, band: Band | None, query_KTQD: Tensor) -> Tensor | None:
        """Of a piece's scores; None if all are visible."""
        if band is None or self.windowed is None:
            return None
        return band_mask(
            band,
            window=self.windowed.window,
            rows_per_query=query_KTQD.shape[2],
            dtype=query_KTQD.dtype,
        )

    @property
    def key_start(self) -> int:
        """Plan coordinate of the first key: 0 in a carry, which holds all, else the run's start."""
        return self.plan.start if self.carry is None else 0

    def slices(self, queries: Range, keys: Range) -> tuple[slice, slice]:
        """A piece's queries and keys as slices of the query and key tensors."""
        return (
            slice(queries[0] - self.plan.start, queries[1] - self.plan.start),
            slice(keys[0] - self.key_start, keys[1] - self.key_start),
        )


def attend(
    query_KTQD: Tensor,
    key_KTD: Tensor,
    value_KTD: Tensor,
    run: AttentionRun,
    *,
    sinks_KQ: Tensor | None = None,
) -> Tensor:
    """Attention of every query over its ancestors and itself.

    Args:
        query_KTQD: Of the run.
        key_KTD: Of the run.
        value_KTD: Of the run.
        run: Its pieces, and the keys of earlier blocks.
        sinks_KQ: One more score for every query of a head, whose value is 0; None without.

    Returns:
        [K, T, Q, D], of the queries' dtype.

    Raises:
        ValueError: the plan has another number of queries.
    """
    count = run.plan.end - run.plan.start
    if query_KTQD.shape[1] != count:
        raise ValueError(f"plan of {count} queries, got {query_KTQD.shape[1]}")
    output = _TreeFlash.apply(query_KTQD, key_KTD, value_KTD, sinks_KQ, run)
    assert isinstance(output, Tensor)
    return output


class _TreeFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        query_KTQD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        sinks_KQ: Tensor | None,
        run: AttentionRun,
    ) -> Tensor:
        plan, carry = run.plan, run.carry
        query_KTQD = query_KTQD.contiguous()
        keys, values = key_KTD.contiguous(), value_KTD.contiguous()
        # Into the carry first: this block's queries then read earlier blocks' keys and their own in
        # one tensor.
        if carry is not None:
            carry.key_KND[:, plan.start : plan.end] = keys
            carry.value_KND[:, plan.start : plan.end] = values
            keys, values = carry.key_KND, carry.value_KND

        def attended() -> tuple[Tensor, Tensor]:
            wide_KTQD, lse_KTQ = _forward_pieces(query_KTQD, keys, values, run)
            if sinks_KQ is not None:
                # The share of the softmax that the sink leaves to the keys.
                wide_KTQD.mul_(torch.sigmoid(lse_KTQ - sinks_KQ[:, None])[..., None])
                lse_KTQ = torch.logaddexp(lse_KTQ, sinks_KQ[:, None].to(lse_KTQ.dtype))
            return wide_KTQD.to(query_KTQD.dtype), lse_KTQ

        output_KTQD, lse_KTQ = attended() if run.kept is None else run.kept.of(attended)
        ctx.save_for_backward(query_KTQD, keys, values, output_KTQD, lse_KTQ, sinks_KQ)
        ctx.run = run
        return output_KTQD

    @staticmethod
    def backward(ctx: Any, output_grad_KTQD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # as forward
        query_KTQD, keys, values, output_KTQD, lse_KTQ, sinks_KQ = ctx.saved_tensors
        run: AttentionRun = ctx.run
        plan, carry = run.plan, run.carry
        wide = torch.promote_types(query_KTQD.dtype, torch.float32)
        if carry is None:
            key_grad = torch.zeros_like(keys, dtype=wide)
            value_grad = torch.zeros_like(values, dtype=wide)
        else:
            key_grad, value_grad = carry.key_grad_KND, carry.value_grad_KND
        query_grad_KTQD = _backward_pieces(
            _Saved(query_KTQD, keys, values, output_KTQD, lse_KTQ),
            output_grad_KTQD.contiguous(),
            key_grad,
            value_grad,
            run,
        )
        # A carry's gradients of this block include what later blocks have added. Keys of earlier
        # blocks get their sums when those blocks run backward.
        own = slice(plan.start - run.key_start, plan.end - run.key_start)
        return (
            query_grad_KTQD.to(query_KTQD.dtype),
            key_grad[:, own].to(keys.dtype, copy=True),
            value_grad[:, own].to(values.dtype, copy=True),
            _sinks_gradient(output_grad_KTQD, output_KTQD, lse_KTQ, sinks_KQ),
            None,
        )


def _sinks_gradient(
    output_grad_KTQD: Tensor, output_KTQD: Tensor, lse_KTQ: Tensor, sinks_KQ: Tensor | None
) -> Tensor | None:
    """Of softmax: probability times (gradient of it, 0, less the probabilities' mean gradient)."""
    if sinks_KQ is None:
        return None
    mean_KTQ = (output_grad_KTQD.to(lse_KTQ.dtype) * output_KTQD).sum(-1)
    return -((sinks_KQ[:, None] - lse_KTQ).exp() * mean_KTQ).sum(1).to(sinks_KQ.dtype)


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
    run: AttentionRun,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all pieces, merged by query, in at least fp32."""
    wide = torch.promote_types(query_KTQD.dtype, torch.float32)
    output_KTQD = torch.empty_like(query_KTQD, dtype=wide)
    lse_KTQ = torch.empty(query_KTQD.shape[:3], dtype=wide, device=query_KTQD.device)
    if run.windowed is not None:  # A query that is in no triangle begins with nothing.
        output_KTQD.zero_()
        lse_KTQ.fill_(-torch.inf)
    heads, _, group, size = query_KTQD.shape
    queries_QKTD, outputs_QKTD = query_KTQD.permute(2, 0, 1, 3), output_KTQD.permute(2, 0, 1, 3)
    lse_QKT = lse_KTQ.permute(2, 0, 1)
    keys_QKND, values_QKND = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
    for chain in run.triangles:
        q, k = run.slices(chain, chain)
        piece, lse = _flash(
            queries_QKTD[:, :, q],
            keys_QKND[:, :, k],
            values_QKND[:, :, k],
            0.0,
            True,
            scale=run.scale,
        )
        outputs_QKTD[:, :, q] = piece
        lse_QKT[:, :, q] = lse
    for own, seen, band in run.later_pieces():
        q, k = run.slices(own, seen)
        count = own[1] - own[0]
        # The query heads of one key head become rows: keys are read once for all of them.
        piece, lse = _flash(
            query_KTQD[:, q].view(1, heads, count * group, size),
            keys[None, :, k],
            values[None, :, k],
            0.0,
            False,
            attn_mask=run.mask(band, query_KTQD),
            scale=run.scale,
        )
        old, new = lse_KTQ[:, q], lse.view(heads, count, group)
        # exp(new) / (exp(old) + exp(new)) is the piece's share of the merged softmax.
        share = torch.sigmoid(new - old)
        output_KTQD[:, q].lerp_(piece.reshape(heads, count, group, size).to(wide), share[..., None])
        lse_KTQ[:, q] = torch.logaddexp(old, new)
    return output_KTQD, lse_KTQ


def _backward_pieces(
    saved: _Saved,
    output_grad_KTQD: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    run: AttentionRun,
) -> Tensor:
    """Add the gradients of keys and values to the given tensors; returns those of the queries."""
    query_KTQD, keys, values = saved.query_KTQD, saved.keys, saved.values
    heads, _, group, size = query_KTQD.shape
    query_grad_KTQD = torch.zeros_like(query_KTQD, dtype=key_grad.dtype)
    query_grad_QKTD = query_grad_KTQD.permute(2, 0, 1, 3)
    grads_QKTD = output_grad_KTQD.permute(2, 0, 1, 3)
    queries_QKTD = query_KTQD.permute(2, 0, 1, 3)
    outputs_QKTD = saved.output_KTQD.permute(2, 0, 1, 3)
    lse_QKT = saved.lse_KTQ.permute(2, 0, 1).contiguous()
    keys_QKND, values_QKND = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
    for chain in run.triangles:
        q, k = run.slices(chain, chain)
        dq, dk, dv = _flash_backward(
            grads_QKTD[:, :, q],
            queries_QKTD[:, :, q],
            keys_QKND[:, :, k],
            values_QKND[:, :, k],
            outputs_QKTD[:, :, q],
            lse_QKT[:, :, q].contiguous(),
            0.0,
            True,
            scale=run.scale,
        )
        query_grad_QKTD[:, :, q] += dq
        key_grad[:, k] += dk.sum(0)
        value_grad[:, k] += dv.sum(0)
        del dq, dk, dv  # Else the next piece would get its own beside these.
    for own, seen, band in run.later_pieces():
        q, k = run.slices(own, seen)
        count = own[1] - own[0]
        shape = (1, heads, count * group, size)
        dq, dk, dv = _flash_backward(
            output_grad_KTQD[:, q].view(shape),
            query_KTQD[:, q].view(shape),
            keys[None, :, k],
            values[None, :, k],
            saved.output_KTQD[:, q].view(shape),
            saved.lse_KTQ[:, q].reshape(shape[:3]),
            0.0,
            False,
            attn_mask=run.mask(band, query_KTQD),
            scale=run.scale,
        )
        query_grad_KTQD[:, q] += dq.reshape(heads, count, group, size)
        key_grad[:, k] += dk[0]
        value_grad[:, k] += dv[0]
        del dq, dk, dv
    return query_grad_KTQD
