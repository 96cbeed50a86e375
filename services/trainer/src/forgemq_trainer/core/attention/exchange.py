"""Exchanges keys and values of ranks that run one forest together (context parallelism).

Each rank computes the queries, keys and values of its own range of tokens. Forward copies the other
ranks' keys and values of the block into this rank's carry; backward sums each key's gradients over
the ranks, and gives every rank the sums for its own keys. The result is exact: the pieces of
attention are those of one rank, each computed on one of the ranks.

Shapes: T tokens of this rank's range, N tokens of the forest, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from forgemq_trainer.core.assignment import Range
from forgemq_trainer.core.attention.attention import Carry, attention_interface


class Peers(Protocol):
    """The ranks, as the computation uses them; all call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Gather `own` of every rank, by rank; all have one shape."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum over the ranks of their `parts[this rank]`; all have one shape."""
        ...

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over the ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExchange:
    """How one block's keys and values get to all ranks.

    Attributes:
        ranges: Of the block, one for each rank, in order.
        peers: The ranks.
    """

    ranges: tuple[Range, ...]
    peers: Peers

    def exchange(self, key_KTD: Tensor, value_KTD: Tensor, carry: Carry) -> tuple[Tensor, Tensor]:
        """Copy all ranks' keys and values into the carry; returns this rank's.

        Attention of this block then adds to the carry's gradients; backward of this function sums
        them over the ranks.
        """
        result: tuple[Tensor, Tensor] = _Exchanged.apply(key_KTD, value_KTD, carry, self)
        return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        key_KTD: Tensor,
        value_KTD: Tensor,
        carry: Carry,
        exchange: KeyExchange,
    ) -> tuple[Tensor, Tensor]:
        ctx.carry, ctx.exchange = carry, exchange
        # Padded to the longest range: a gather needs one shape on all ranks.
        longest = max(end - start for start, end in exchange.ranges)
        heads, count, size = key_KTD.shape
        own = key_KTD.new_zeros((2, heads, longest, size))
        own[0, :, :count], own[1, :, :count] = key_KTD, value_KTD
        everyones = exchange.peers.all_gather(own)
        for (start, end), both in zip(exchange.ranges, everyones, strict=True):
            carry.key_KND[:, start:end] = both[0, :, : end - start]
            carry.value_KND[:, start:end] = both[1, :, : end - start]
        return key_KTD.view_as(key_KTD), value_KTD.view_as(value_KTD)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        key_grad_KTD: Tensor,
        value_grad_KTD: Tensor,
    ) -> tuple[Tensor | None, ...]:
        # The incoming gradients are this rank's alone and from this block; the carry's include them
        # and those of later blocks, so the incoming ones give only the shape.
        carry: Carry = ctx.carry
        exchange: KeyExchange = ctx.exchange
        longest = max(end - start for start, end in exchange.ranges)
        parts = []
        for start, end in exchange.ranges:
            heads, _, size = carry.key_grad_KND.shape
            part = carry.key_grad_KND.new_zeros((2, heads, longest, size))
            part[0, :, : end - start] = carry.key_grad_KND[:, start:end]
            part[1, :, : end - start] = carry.value_grad_KND[:, start:end]
            parts.append(part)
        both = exchange.peers.reduce_scatter(parts)
        count = key_grad_KTD.shape[1]
        return (
            both[0, :, :count].to(key_grad_KTD.dtype),
            both[1, :, :count].to(value_grad_KTD.dtype),
            None,
            None,
        )


def shared_attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    key_exchange: KeyExchange | None = None,
    **others: Any,  # noqa: ANN401  # as transformers passes them on
) -> tuple[Tensor, None]:
    """`attention_interface` after an exchange of keys and values, if ranks share the forest.

    Values narrower than keys are padded with zeros, and the output is cut: the kernels have one
    head size.

    Args:
        module: The layer's attention.
        query: As in `attention_interface`.
        key: As in `attention_interface`; of this rank's range.
        value: As in `attention_interface`; of this rank's range.
        attention_mask: Must be None.
        key_exchange: None if this rank runs the forest alone.
        others: As in `attention_interface`.
    """
    width = value.shape[-1]
    value = functional.pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    if key_exchange is not None:
        layer = module.layer_idx
        assert isinstance(layer, int)
        carry = others["tree_attention"].carries[layer]
        shared = key_exchange.exchange(key[0].to(value.dtype), value[0], carry)
        key, value = shared[0][None], shared[1][None]
    output, _ = attention_interface(module, query, key, value, attention_mask, **others)
    return output[..., :width], None
