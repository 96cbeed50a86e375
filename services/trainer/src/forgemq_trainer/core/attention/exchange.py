"""Hands keys and values over between ranks that run one forest together (context parallelism).

Each rank computes the queries, keys and values of its own range of tokens. Forward hands other
ranks the keys and values that their queries see; backward hands their gradients back, and adds them
up. The result is exact: the pieces of attention are those of one rank, each computed on one of the
ranks. Which tokens are handed over is planned in `path_trade`.

Shapes: T tokens of this rank's range, S slots, C tokens handed over, K key/value heads, D head
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from forgemq_trainer.core.attention.attention import Carry, attention_interface


class Peers(Protocol):
    """The ranks of a team, as the computation uses them; all make the same calls in one order."""

    @property
    def rank(self) -> int:
        """This rank's number in the team, from 0."""
        ...

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Give each rank its part of `own`, and take this rank's part of each rank's.

        Args:
            own: For rank 0 the first `given[0]` rows, for rank 1 the next `given[1]`, and so on.
            given: Rows for each rank.
            taken: Rows from each rank.

        Returns:
            The rows from rank 0, then those from rank 1, and so on.
        """
        ...

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over the ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTrade:
    """Which slots of a carry are handed over, between this rank and each rank of the team.

    Attributes:
        peers: The ranks.
        given: For each rank the slots of own keys that it gets.
        taken: For each rank the slots that its keys come to.
    """

    peers: Peers
    given: tuple[Tensor, ...]
    taken: tuple[Tensor, ...]

    def fetched(self, key_KSD: Tensor, value_KSD: Tensor) -> Tensor:
        """The keys and values that other ranks hand over, [C, 2, K, D]; hands over this rank's."""
        return self.swapped(_picked(key_KSD, value_KSD, torch.cat(self.given)))

    def swapped(self, own_C2KD: Tensor) -> Tensor:
        """The same, with own keys and values that were picked already."""
        given, taken = ([len(slots) for slots in each] for each in (self.given, self.taken))
        return self.peers.swap(own_C2KD.contiguous(), given=given, taken=taken)

    def place(self, fetched_C2KD: Tensor, key_KSD: Tensor, value_KSD: Tensor) -> None:
        """Write what was fetched to its slots."""
        slots = torch.cat(self.taken)
        key_KSD[:, slots] = fetched_C2KD[:, 0].transpose(0, 1)
        value_KSD[:, slots] = fetched_C2KD[:, 1].transpose(0, 1)

    def returned(self, key_grad_KSD: Tensor, value_grad_KSD: Tensor) -> Tensor:
        """The gradients that other ranks collected for own keys; hands back those of theirs."""
        slots = torch.cat(self.taken)
        given, taken = ([len(slots) for slots in each] for each in (self.given, self.taken))
        own_C2KD = _picked(key_grad_KSD, value_grad_KSD, slots)
        key_grad_KSD[:, slots] = 0
        value_grad_KSD[:, slots] = 0
        return self.peers.swap(own_C2KD, given=taken, taken=given)

    def add(self, returned_C2KD: Tensor, key_grad_KSD: Tensor, value_grad_KSD: Tensor) -> None:
        """Add gradients that came back to those of own keys, rank by rank: one order of sums."""
        counts = [len(slots) for slots in self.given]
        for slots, part_C2KD in zip(self.given, torch.split(returned_C2KD, counts), strict=True):
            key_grad_KSD[:, slots] += part_C2KD[:, 0].transpose(0, 1)
            value_grad_KSD[:, slots] += part_C2KD[:, 1].transpose(0, 1)


def _picked(key_KSD: Tensor, value_KSD: Tensor, slots: Tensor) -> Tensor:
    """Keys and values of some slots, [C, 2, K, D]."""
    both_2KCD = torch.stack([key_KSD[:, slots], value_KSD[:, slots]])
    return both_2KCD.permute(2, 0, 1, 3).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyExchange:
    """How one block's keys and values get to the ranks whose queries see them, layer by layer.

    Attributes:
        trade: Which of them.
        own: Slots of this rank's keys.
        are_known: True if the other ranks' keys are live already, so that only gradients move.
    """

    trade: KeyTrade
    own: slice
    are_known: bool

    def exchange(self, key_KTD: Tensor, value_KTD: Tensor, carry: Carry) -> tuple[Tensor, Tensor]:
        """Make the keys that this rank's queries see live in the carry; returns this rank's own.

        Attention of this block then adds to the carry's gradients; backward of this function hands
        those of other ranks' keys back, and returns the sums for this rank's.
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
        if not exchange.are_known:
            carry.key_KND[:, exchange.own] = key_KTD
            carry.value_KND[:, exchange.own] = value_KTD
            fetched = exchange.trade.fetched(carry.key_KND, carry.value_KND)
            exchange.trade.place(fetched, carry.key_KND, carry.value_KND)
        return key_KTD.view_as(key_KTD), value_KTD.view_as(value_KTD)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        key_grad_KTD: Tensor,
        value_grad_KTD: Tensor,
    ) -> tuple[Tensor | None, ...]:
        # The incoming gradients are what the carry had before those of other ranks were added, so
        # they give only the dtype.
        carry: Carry = ctx.carry
        exchange: KeyExchange = ctx.exchange
        owed = (carry.key_grad_KND, carry.value_grad_KND)
        exchange.trade.add(exchange.trade.returned(*owed), *owed)
        key, value = (gradients[:, exchange.own] for gradients in owed)
        return (
            key.to(key_grad_KTD.dtype, copy=True),
            value.to(value_grad_KTD.dtype, copy=True),
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
    """`attention_interface` after an exchange of keys and values, if ranks run the forest together.

    Values narrower than keys are padded with zeros, and the output is cut: the kernels have one
    head size.

    Args:
        module: The layer's attention.
        query: As in `attention_interface`.
        key: As in `attention_interface`; of this rank's range.
        value: As in `attention_interface`; of this rank's range.
        attention_mask: Must be None.
        key_exchange: None if no other rank needs this block's keys.
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
