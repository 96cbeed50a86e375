"""Attention over a prefix tree, as transformers calls it.

A backend computes it: `cpu_attention`, or on a GPU `varlen` or `flex`. All take the same arguments
and give the same output and gradients; keys of earlier blocks come from a `Carry`.

Shapes: T queries of this run, H query heads, N tokens, K key/value heads, S slots, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forgemq_trainer.core.attention.plan import AttentionPlan
from forgemq_trainer.core.tree import Integers

UNSUPPORTED = ("softcap",)
"""Arguments that a model may pass to its attention, and without which its result would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """Keys and values of one layer for a whole forest, and the gradients collected for them.

    Blocks run forward in layout order, each writing its range of `key_KND` and `value_KND`, and
    backward in reverse order: when a block runs backward, every later block has added its queries'
    gradients of this block's keys.
    """

    key_KND: Tensor
    value_KND: Tensor
    key_grad_KND: Tensor
    value_grad_KND: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKeys:
    """The keys of one run of queries, and which of them each query sees.

    Attributes:
        plan: Pieces of its queries, in the coordinates of the carries.
        carries: One for each layer; empty if the run is the whole forest.
        subtree_end_S: Of each key, in the same coordinates.
        position_S: Number of ancestors of each key, in the same coordinates.
    """

    plan: AttentionPlan
    carries: tuple[Carry, ...]
    subtree_end_S: Integers
    position_S: Integers


class KeptOutput:
    """Output and log-sum-exp of one layer's attention, for a layer that runs forward twice.

    The first forward fills it; the second, in backward, takes them out instead of attending again.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._tensors: tuple[Tensor, Tensor] | None = None

    def of(self, attend: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `attend` returned in the first forward."""
        if self._tensors is not None:
            kept, self._tensors = self._tensors, None
            return kept
        output, log_sum_exp = attend()
        # Autograd attaches the graph to the tensor that it gets; detached, the kept one holds none.
        self._tensors = output.detach(), log_sum_exp.detach()
        return output, log_sum_exp


class RunAttention(Protocol):
    """Attention of one run of queries, each over its ancestors and itself, for every layer."""

    def __call__(
        self,
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
        """[T, H, D], of the queries' dtype; query head h reads key head h // (H / K).

        A layer that runs forward twice passes `kept` both times. A backend may attend twice
        instead. With a window of W a query sees itself and its W - 1 nearest ancestors. Sinks are
        one more score for every query of a head, whose value is 0.
        """
        ...


class AttentionBackend(Protocol):
    """Makes the attention of runs on one kind of device."""

    @property
    def slot_multiple(self) -> int:
        """A carry's number of slots must be a multiple of this."""
        ...

    def of_run(
        self, keys: BlockKeys, /, *, dtype: torch.dtype, device: torch.device
    ) -> RunAttention:
        """The attention of one run; all layers share what it derives from the plan."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention:
    """The argument that every layer gets: attention, and the carries of a forest in blocks.

    Attributes:
        attend: Attention of this run of queries.
        carries: One for each layer; empty if the run is the whole forest.
        kept: One for each of the first layers, those that run forward again in backward.
    """

    attend: RunAttention
    carries: tuple[Carry, ...] = ()
    kept: tuple[KeptOutput, ...] = ()


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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Tree attention as transformers calls it; the plan arrives as the model's keyword argument.

    Args:
        module: The layer's attention; its `layer_idx` picks the carry.
        query: [1, H, T, D] after rotary embedding; perhaps wider than `value`'s dtype.
        key: [1, K, T, D].
        value: [1, K, T, D]; a narrower one has to be padded before (`exchange.py`).
        attention_mask: Must be None; the plan decides which keys a query sees.
        tree_attention: Attention and carries of this run.
        scaling: Multiplies the scores; None is 1 / sqrt(D).
        dropout: Must be 0.
        sliding_window: Tokens that a query sees at most, itself among them; None is all ancestors.
        s_aux: [H], the sinks.
        **others: Other arguments of the model; those of `UNSUPPORTED` must be None.

    Returns:
        [1, T, H, D] and None.

    Raises:
        ValueError: a mask, dropout or a cap of the scores was asked for, or the batch has several
            rows.
    """
    if attention_mask is not None or dropout:
        raise ValueError("tree attention takes neither a mask nor dropout")
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"tree attention takes no {name}, got {others[name]}")
    if len(query) != 1:
        raise ValueError(f"a forest is one row, got {len(query)}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    # Rotary embedding in fp32 widens queries and keys; the kernels want one dtype.
    output_THD = tree_attention.attend(
        query[0].transpose(0, 1).to(value.dtype),
        key[0].transpose(0, 1).to(value.dtype),
        value[0].transpose(0, 1),
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
        carry=tree_attention.carries[layer] if tree_attention.carries else None,
        kept=tree_attention.kept[layer] if layer < len(tree_attention.kept) else None,
        window=sliding_window,
        sinks_H=s_aux,
    )
    return output_THD[None], None


def write_into_carry(own_KTD: Tensor, whole_KSD: Tensor, grad_KSD: Tensor, *, start: int) -> Tensor:
    """Write a block's own keys (or values) into a carry; returns all slots, for autograd.

    Forward writes the block's own keys into the carry and returns the carry's memory: nothing is
    copied for backward. Backward adds the block's gradients of all keys to the carry's gradients,
    and returns those of the block's own keys, which then include what later blocks added.

    Returns:
        [K, S, D]: all slots; those beyond the block are unchanged.
    """
    output = _Carried.apply(own_KTD, whole_KSD, grad_KSD, start)
    assert isinstance(output, Tensor)
    return output


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        own_KTD: Tensor,
        whole_KSD: Tensor,
        grad_KSD: Tensor,
        start: int,
    ) -> Tensor:
        whole_KSD[:, start : start + own_KTD.shape[1]] = own_KTD
        ctx.grad_KSD, ctx.own = grad_KSD, slice(start, start + own_KTD.shape[1])
        return whole_KSD.detach()

    @staticmethod
    def backward(ctx: Any, grad_KSD: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # as forward
        ctx.grad_KSD += grad_KSD
        return ctx.grad_KSD[:, ctx.own].to(grad_KSD.dtype, copy=True), None, None, None
