"""Keys and values of all ranks, for ranks that run one forest together (context parallelism).

Each rank computes the queries, keys and values of its own range of tokens. Forward brings the other
ranks' keys and values of the block into this rank's carry; backward sums over the ranks what their
queries owe to each key, and hands every rank the sum for its own. Exact: the same pieces of
attention run, each on one of the ranks.

Shapes: T tokens of this rank's range, N tokens of the forest, K key/value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forgemq_trainer.core.assignment import Range
from forgemq_trainer.core.attention.attention import Carry, attention_interface


class Peers(Protocol):
    """The ranks, as computation needs them; every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    def gathered(self, own: Tensor) -> list[Tensor]:
        """`own` of every rank, by rank; all have one shape."""
        ...

    def scattered_sum(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over the ranks of their `parts[this rank]`; all have one shape."""
        ...

    def total(self, own: Tensor) -> Tensor:
        """The sum of `own` over the ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExchange:
    """How one block's keys and values get to all ranks.

    Attributes:
        ranges: of the block, one for each rank, in order.
        peers: the ranks.
    """

    ranges: tuple[Range, ...]
    peers: Peers

    def shared(self, key_KTD: Tensor, value_KTD: Tensor, carry: Carry) -> tuple[Tensor, Tensor]:
        """This rank's keys and values, once those of all ranks are in the carry.

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
        longest = max(end - start for start, end in exchange.ranges)
        heads, count, size = key_KTD.shape
        own = key_KTD.new_zeros((2, heads, longest, size))
        own[0, :, :count], own[1, :, :count] = key_KTD, value_KTD
        everyones = exchange.peers.gathered(own)
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
        # What comes in is this rank's part alone; the carry has the same, and later blocks' parts.
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
        both = exchange.peers.scattered_sum(parts)
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
    """`attention_interface`, whose keys and values may be shared between ranks.

    Args:
        module: the layer's attention.
        query: as `attention_interface`.
        key: as `attention_interface`; of this rank's range.
        value: as `attention_interface`; of this rank's range.
        attention_mask: must be None.
        key_exchange: None where this rank runs by itself.
        others: as `attention_interface`.
    """
    if key_exchange is not None:
        layer = module.layer_idx
        assert isinstance(layer, int)
        carry = others["tree_attention"].carries[layer]
        shared = key_exchange.shared(key[0].to(value.dtype), value[0], carry)
        key, value = shared[0][None], shared[1][None]
    return attention_interface(module, query, key, value, attention_mask, **others)
