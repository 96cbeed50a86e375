"""Experts of a layer spread over ranks: tokens travel to the ranks of their experts, and back.

The ranks of an expert group hold all experts of a layer between them, each rank an equal share.
Forward sends each token to the ranks of its experts, runs on every rank its experts on what came,
and sends the outputs back; backward is the reverse. No token is dropped, and the experts compute by
transformers' own code. Routing weights are applied by the rank that a token came from, so only
rows travel.

Routers may choose one rank's experts for most tokens. What a rank holds is bounded all the same: if
a rank would get more than `ROWS_RATIO` times the rows of an even spread, the group goes through the
layer's experts in several parts, each of at most that many rows, and runs each part again in
backward. Every rank sees the counts of all, so all take the same number of parts.

T tokens of this rank, K experts for each token, E experts of a layer, L of them on each rank, X
ranks of the group, S rows sent, M rows received, P parts, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

ROWS_RATIO = 2
"""A rank computes up to so many times the rows of an even spread at once. The memory budget counts
them; with a larger ratio fewer tokens fit, with a smaller one more layers run in parts."""


class ExpertPeers(Protocol):
    """The ranks of an expert group; all call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank among them, from 0; it holds the experts from rank * E / X on."""
        ...

    @property
    def world_size(self) -> int:
        """Their number, X."""
        ...

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Gather `own` of every rank, by rank; all have one shape."""
        ...

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Give each rank its rows of `own`, in order; returns those given to this one, by rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TravelPart:
    """What travels at once.

    Attributes:
        sent_E: Rows that this rank sends, by expert.
        received_XL: Rows that it receives, by rank and by its own experts.
    """

    sent_E: NDArray[np.int64]
    received_XL: NDArray[np.int64]


def parts_of(count_XE: NDArray[np.int64], *, rank: int, rows_max: int) -> tuple[TravelPart, ...]:
    """The fewest even parts in which no rank receives more than `rows_max` rows.

    The rows that a rank receives in all parts are cut in the order of its experts.

    Example: two ranks with an expert each send it (3, 1) and (3, 1) rows. Rank 0 receives 6, so
    with 3 rows at most there are two parts: rank 0 receives (3, 0) rows, then (0, 3).

    Args:
        count_XE: Rows of each rank by expert.
        rank: This one.
        rows_max: At least 1.
    """
    ranks, experts = count_XE.shape
    own = experts // ranks
    # By receiving rank, then by its experts, then by sending rank.
    cell_XC = count_XE.T.reshape(ranks, own * ranks)
    end_XC = cell_XC.cumsum(axis=1)
    total_X = end_XC[:, -1]
    parts = max(1, -(-int(total_X.max()) // rows_max))
    found = []
    for part in range(parts):
        low_X1, high_X1 = ((total_X * n // parts)[:, None] for n in (part, part + 1))
        inside_XC = np.minimum(end_XC, high_X1) - np.maximum(end_XC - cell_XC, low_X1)
        row_XLX = inside_XC.clip(0).reshape(ranks, own, ranks)
        found.append(
            TravelPart(sent_E=row_XLX[:, :, rank].reshape(-1), received_XL=row_XLX[rank].T)
        )
    return tuple(found)


class SpreadExperts(nn.Module):
    """A layer's experts, of which this rank holds a share.

    The parameters have the names that they have in transformers' module. Each is a DTensor of all
    experts; its local tensor, while the layer runs, has this rank's share whole.
    """

    def __init__(self, stock: Any, *, peers: ExpertPeers) -> None:  # noqa: ANN401  # of transformers
        """Take over the stock module; its parameters are to be registered by the caller."""
        super().__init__()
        self.peers = peers
        self.experts = int(stock.num_experts)
        stock.num_experts = self.experts // peers.world_size
        stock.to("meta")
        # In a tuple, so that its empty parameters are no part of the model.
        self._stock = (stock,)

    def forward(self, hidden_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The sum of each token's experts by their weights, in the dtype of `hidden_TH`."""
        tokens, top_k = expert_TK.shape
        chosen_S = expert_TK.reshape(-1)
        order_S = chosen_S.argsort(stable=True)
        parts = self._parts(chosen_S, tokens=tokens)
        if len(parts) > 1:
            order_S = order_S[_part_of_row(parts, device=order_S.device).argsort(stable=True)]
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        rows_SH: Tensor = _Ordered.apply(hidden_TH, order_S, place_S, top_k)
        sizes = [int(part.sent_E.sum()) for part in parts]
        outputs = [
            # What a part received is too much to be kept beside that of the others.
            self._run(own_SH, part)
            if len(parts) == 1
            else checkpoint(self._run, own_SH, part, use_reentrant=False, preserve_rng_state=False)
            for own_SH, part in zip(torch.split(rows_SH, sizes), parts, strict=True)
        ]
        output_SH = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        output_TKH: Tensor = _Ordered.apply(output_SH, place_S, order_S, 1)
        del rows_SH, outputs, output_SH
        weighted_TKH = output_TKH.view(tokens, top_k, -1) * weight_TK[..., None]
        return weighted_TKH.sum(dim=1).to(hidden_TH.dtype)

    def _parts(self, chosen_S: Tensor, *, tokens: int) -> tuple[TravelPart, ...]:
        """The parts of this call, the same number on every rank of the group."""
        counts = torch.bincount(chosen_S, minlength=self.experts)
        own = torch.cat([counts, counts.new_tensor([tokens])])
        everyones = torch.stack(self.peers.all_gather(own)).cpu().numpy()
        # Every rank's memory holds what the rank with most tokens needs.
        even = len(chosen_S) // tokens * int(everyones[:, -1].max())
        return parts_of(everyones[:, :-1], rank=self.peers.rank, rows_max=ROWS_RATIO * even)

    def _run(self, own_SH: Tensor, part: TravelPart) -> Tensor:
        """The experts' outputs for rows in the order of the experts, in the same order."""
        ranks = self.peers.world_size
        sent = part.sent_E.reshape(ranks, -1).sum(axis=1).tolist()
        received = part.received_XL.sum(axis=1).tolist()
        rows_MH = _travelled(own_SH, sent, received, self.peers)
        own_experts = np.tile(np.arange(part.received_XL.shape[1]), ranks)
        expert_M = torch.from_numpy(np.repeat(own_experts, part.received_XL.reshape(-1)))
        output_MH = self._computed(rows_MH, expert_M.to(rows_MH.device))
        return _travelled(output_MH, received, sent, self.peers)

    def _computed(self, rows_MH: Tensor, expert_M: Tensor) -> Tensor:
        """Each row through its expert, of those that this rank holds."""
        if len(rows_MH) == 0:
            # The experts' weights need a gradient, of zeros, as other ranks that hold them wait to
            # add theirs.
            one_MH = torch.cat([rows_MH, rows_MH.new_zeros((1, rows_MH.shape[1]))])
            return self._computed(one_MH, expert_M.new_zeros(1))[:0]
        weights = {name: _own_share(each) for name, each in self.named_parameters()}
        ones_M1 = rows_MH.new_ones((len(rows_MH), 1))
        output_MH: Tensor = functional_call(
            self._stock[0], weights, (rows_MH, expert_M[:, None], ones_M1)
        )
        return output_MH


def _own_share(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _part_of_row(parts: tuple[TravelPart, ...], *, device: torch.device) -> Tensor:
    """The part in which each of this rank's rows travels, in the order of the experts."""
    sent_EP = np.stack([part.sent_E for part in parts], axis=1)
    numbers = np.tile(np.arange(len(parts)), len(sent_EP))
    return torch.from_numpy(np.repeat(numbers, sent_EP.reshape(-1))).to(device)


class _Ordered(torch.autograd.Function):
    """Rows in another order, each of them `times` in the result; backward adds up each row's.

    Row n of the input is row `place_S[n * times + k]` of the result for each k below `times`, and
    `order_S` is the inverse. Backward of torch's own indexing needs more memory, and on a GPU adds
    in no fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        rows: Tensor,
        order_S: Tensor,
        place_S: Tensor,
        times: int,
    ) -> Tensor:
        ctx.save_for_backward(place_S)
        ctx.times = times
        return rows.index_select(0, order_S // times if times > 1 else order_S)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        (place_S,) = ctx.saved_tensors
        rows = grad.index_select(0, place_S)
        if ctx.times > 1:
            rows = rows.view(-1, ctx.times, rows.shape[1]).sum(dim=1)
        return rows, None, None, None


def _travelled(rows: Tensor, sent: list[int], received: list[int], peers: ExpertPeers) -> Tensor:
    """Rows that arrive here, by sending rank; backward sends their gradients the way back."""
    arrived: Tensor = _Travelled.apply(rows, sent, received, peers)
    return arrived


class _Travelled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        rows: Tensor,
        sent: list[int],
        received: list[int],
        peers: ExpertPeers,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.peers = sent, received, peers
        return peers.swap(rows, given=sent, taken=received)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        peers: ExpertPeers = ctx.peers
        return peers.swap(grad, given=ctx.received, taken=ctx.sent), None, None, None
