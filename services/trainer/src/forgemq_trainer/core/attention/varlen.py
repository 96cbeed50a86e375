"""Tree attention on a GPU if branches are few: variable-length flash over the plan's pieces.

All triangles are one causal call of the kernel: the chains lie side by side and tile the run's
queries. Rectangles whose queries do not overlap share one further call; as rectangles nest no
deeper than the branches of the tree, a few calls suffice. Partial outputs merge by their
log-sum-exp, and backward gives every piece the global output and log-sum-exp, as on a CPU. A call
takes its queries and keys packed side by side, so keys that several rectangles read are copied for
each: "few branches" bounds these copies.

Shapes: T queries of this run, H query heads, N keys, K key/value heads, D head size; P and C are
the packed queries and keys of one call.

What was checked without a GPU: docs/tree_training.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from forgemq_trainer.core.attention.attention import (
    BlockKeys,
    Carry,
    KeptOutput,
    RunAttention,
)
from forgemq_trainer.core.attention.flash_varlen import ForwardTensors, PackedPieces, VarlenKernel
from forgemq_trainer.core.attention.plan import AttentionPlan, Range

PACKED_KEYS_MAX = 2.0
"""Keys packed for all rectangles, as a multiple of the run's keys. Packing reads and writes each
packed key once, so at this limit it costs about as much as reading every key four times. Chosen,
not measured: no GPU has run it."""

RECTANGLES_MAX = 64
"""Each rectangle is cut out and added back by about ten small kernels in every layer: at some 5 us
a launch, 64 of them cost 3 ms a layer. Estimated, not measured: no GPU has run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Pieces whose queries do not overlap: one call of the kernel.

    Attributes:
        is_causal: True for triangles; False if every query of a piece sees every key of it.
        queries: (start, end) of each piece, in layout order.
        keys: (start, end) of each piece.
    """

    is_causal: bool
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]


def passes(plan: AttentionPlan) -> tuple[Pass, ...]:
    """The plan as calls: the triangles, then the rectangles in as few calls as nesting allows."""
    calls = [Pass(is_causal=True, queries=plan.triangles, keys=plan.triangles)]
    levels: list[list[tuple[int, int, int, int]]] = []
    # Greedy interval colouring: in order of their start, each rectangle joins the first level whose
    # last rectangle has ended. That needs as many levels as rectangles overlap at most.
    for row in sorted(plan.rectangles, key=lambda row: (row[0], -row[1])):
        free = (level for level in levels if level[-1][1] <= row[0])
        level = next(free, None)
        if level is None:
            levels.append([row])
        else:
            level.append(row)
    for level in levels:
        queries = tuple((q0, q1) for q0, q1, _, _ in level)
        keys = tuple((k0, k1) for _, _, k0, k1 in level)
        calls.append(Pass(is_causal=False, queries=queries, keys=keys))
    return tuple(calls)


def has_few_branches(plan: AttentionPlan) -> bool:
    """True if packing the rectangles' keys is cheap."""
    packed = sum(k1 - k0 for _, _, k0, k1 in plan.rectangles)
    return len(plan.rectangles) <= RECTANGLES_MAX and packed <= PACKED_KEYS_MAX * plan.end


@dataclass(frozen=True, slots=True)
class _Call:
    """A pass as indices into the run's tensors: queries from 0, keys from the first that exists."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    pieces: PackedPieces


def varlen_attention_of(
    keys: BlockKeys, *, kernel: VarlenKernel, device: torch.device
) -> RunAttention:
    """Attention of one run of queries by calls of a variable-length kernel.

    Args:
        keys: The run's plan and carries.
        kernel: Runs a call on this device.
        device: Of queries and keys.
    """
    plan = keys.plan
    key_start = 0 if keys.carries else plan.start
    calls = tuple(
        _Call(
            queries=_shifted(call.queries, plan.start),
            keys=_shifted(call.keys, key_start),
            pieces=_packed_pieces(call, device=device),
        )
        for call in passes(plan)
    )
    own = slice(plan.start - key_start, plan.end - key_start)

    def attend(
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
        if window is not None:
            raise ValueError(f"flash over pieces takes no window, got {window}")
        output = _TreeVarlen.apply(
            query_THD, key_TKD, value_TKD, sinks_H, _Run(calls, kernel, own, scale, carry, kept)
        )
        assert isinstance(output, Tensor)
        return output

    return attend


@dataclass(frozen=True, slots=True)
class _Run:
    calls: tuple[_Call, ...]
    kernel: VarlenKernel
    own: slice
    scale: float
    carry: Carry | None
    kept: KeptOutput | None


class _TreeVarlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        run: _Run,
    ) -> Tensor:
        keys, values = key_TKD, value_TKD
        if run.carry is not None:
            keys, values = run.carry.key_KND.transpose(0, 1), run.carry.value_KND.transpose(0, 1)
            keys[run.own], values[run.own] = key_TKD, value_TKD

        def attended() -> tuple[Tensor, Tensor]:
            return _forward_calls(query_THD, keys, values, sinks_H, run)

        output, lse_HT = attended() if run.kept is None else run.kept.of(attended)
        ctx.save_for_backward(query_THD, keys, values, output, lse_HT, sinks_H)
        ctx.run = run
        return output

    @staticmethod
    def backward(ctx: Any, output_grad_THD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # as forward
        query_THD, keys, values, output_THD, lse_HT, sinks_H = ctx.saved_tensors
        run: _Run = ctx.run
        wide = lse_HT.dtype
        query_grad = torch.zeros_like(query_THD, dtype=wide)
        if run.carry is None:
            key_grad = torch.zeros_like(keys, dtype=wide)
            value_grad = torch.zeros_like(values, dtype=wide)
        else:
            key_grad = run.carry.key_grad_KND.transpose(0, 1)
            value_grad = run.carry.value_grad_KND.transpose(0, 1)
        for call in run.calls:
            parts = run.kernel.backward(
                _packed(output_grad_THD, call.queries).contiguous(),  # The kernel asks for it.
                ForwardTensors(
                    query_PHD=_packed(query_THD, call.queries),
                    key_CKD=_packed(keys, call.keys),
                    value_CKD=_packed(values, call.keys),
                    output_PHD=_packed(output_THD, call.queries),
                    lse_HP=torch.cat([lse_HT[:, queries] for queries in call.queries], dim=1),
                ),
                call.pieces,
                scale=run.scale,
            )
            for owed, part, ranges in zip(
                (query_grad, key_grad, value_grad),
                parts,
                (call.queries, call.keys, call.keys),
                strict=True,
            ):
                _add(owed, part, ranges)
        return (
            query_grad.to(query_THD.dtype),
            key_grad[run.own].to(keys.dtype, copy=True),
            value_grad[run.own].to(values.dtype, copy=True),
            _sinks_gradient(output_grad_THD, output_THD, lse_HT, sinks_H),
            None,
        )


def _forward_calls(
    query_THD: Tensor, keys: Tensor, values: Tensor, sinks_H: Tensor | None, run: _Run
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all calls, merged by query."""
    wide = torch.promote_types(query_THD.dtype, torch.float32)
    output_THD = torch.empty_like(query_THD, dtype=wide)
    lse_HT = output_THD.new_empty(output_THD.shape[1::-1])
    for call in run.calls:
        piece_PHD, lse_HP = run.kernel.forward(
            _packed(query_THD, call.queries),
            _packed(keys, call.keys),
            _packed(values, call.keys),
            call.pieces,
            scale=run.scale,
        )
        if call.pieces.is_causal:  # The first call: the chains are all queries, in order.
            output_THD.copy_(piece_PHD)
            lse_HT.copy_(lse_HP)
        else:
            _merge(output_THD, lse_HT, piece_PHD, lse_HP, queries=call.queries)
    if sinks_H is not None:  # As on a CPU: the sink scales the output down.
        output_THD.mul_(torch.sigmoid(lse_HT - sinks_H[:, None]).t()[..., None])
        lse_HT = torch.logaddexp(lse_HT, sinks_H[:, None].to(wide))
    return output_THD.to(query_THD.dtype), lse_HT


def _sinks_gradient(
    output_grad_THD: Tensor, output_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor | None
) -> Tensor | None:
    """Of softmax: probability times (gradient of it, 0, less the probabilities' mean gradient)."""
    if sinks_H is None:
        return None
    mean_HT = (output_grad_THD.to(lse_HT.dtype) * output_THD).sum(-1).t()
    return -((sinks_H[:, None] - lse_HT).exp() * mean_HT).sum(1).to(sinks_H.dtype)


def _merge(
    output_THD: Tensor,
    lse_HT: Tensor,
    piece_PHD: Tensor,
    lse_HP: Tensor,
    *,
    queries: Sequence[slice],
) -> None:
    """Merge a call's partial outputs into those of its queries, in place."""
    start = 0
    for own in queries:
        packed = slice(start, start + own.stop - own.start)
        old, new = lse_HT[:, own], lse_HP[:, packed]
        # exp(new) / (exp(old) + exp(new)) is the piece's share of the merged softmax.
        share_TH = torch.sigmoid(new - old).t()
        output_THD[own].lerp_(piece_PHD[packed].to(output_THD.dtype), share_TH[..., None])
        lse_HT[:, own] = torch.logaddexp(old, new)
        start = packed.stop


def _add(owed: Tensor, part: Tensor, ranges: Sequence[slice]) -> None:
    """Add packed gradients to the ranges they were packed from.

    One range after another: ranges of keys may overlap, and a single indexed addition would then
    keep only one of the summands.
    """
    start = 0
    for own in ranges:
        end = start + own.stop - own.start
        owed[own] += part[start:end]
        start = end


def _packed(values: Tensor, ranges: Sequence[slice]) -> Tensor:
    """The ranges side by side; a view, not a copy, if they already are."""
    if all(left.stop == right.start for left, right in pairwise(ranges)):
        return values[ranges[0].start : ranges[-1].stop]
    return torch.cat([values[own] for own in ranges])


def _shifted(ranges: Sequence[Range], by: int) -> tuple[slice, ...]:
    return tuple(slice(start - by, end - by) for start, end in ranges)


def _packed_pieces(call: Pass, *, device: torch.device) -> PackedPieces:
    query_sizes = [end - start for start, end in call.queries]
    key_sizes = [end - start for start, end in call.keys]

    def bounds(sizes: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)

    return PackedPieces(
        query_bounds=bounds(query_sizes),
        key_bounds=bounds(key_sizes),
        query_max=max(query_sizes),
        key_max=max(key_sizes),
        is_causal=call.is_causal,
    )
