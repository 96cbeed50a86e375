"""Expert route replay: a token runs through the experts that the engine chose for it.

An entry's expert route is that of the forward pass that sampled it, which is the pass of the token
it continues. A tree's token has one expert route: that of the first entry that continues it. An
entry may have recorded another one, because a later request prefilled the same history again; such
entries are counted. The trainer's own routers choose for tokens that no entry continues, and for
groups without recorded expert routes.

Between two weight versions within a completion the engine computes context and output so far again,
and reports the expert routes of that pass. It sampled the tokens of the newest version only. So the
routes of older tokens belong to no entry, and are not replayed.

A record has values for every layer; those of the first layers, if they have an MLP instead of
experts, are an engine's zeros, and nothing reads them.

N tokens, E entries, L layers with a router, K experts for each token, R values of all layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import Forest, InvalidTreeError

CHUNK_ROWS = 512
"""Entries handled at once: the int16 of 48 layers with 8 experts are 0.4 MB, which a core's cache
holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExpertRoutes:
    """Expert routes by token.

    Attributes:
        expert_NLK: The experts to run; K times the number of experts, which is one past the last of
            them, if the trainer's router chooses. Of the narrowest dtype that holds that number.
        disagreements: Entries whose recorded experts are not those of the token they continue.
    """

    expert_NLK: NDArray[np.integer[Any]]
    disagreements: int


def token_expert_routes(forest: Forest, shape: ModelShape) -> TokenExpertRoutes | None:
    """The forest's expert routes, checked by `check_expert_routes`; None if no entry has any."""
    route_ER = forest.entry_route_ER
    if route_ER.shape[1] == 0:
        return None
    source_E = forest.parent_N[forest.entry_token_E]
    routed_E = np.flatnonzero(forest.entry_is_routed_E)
    first_N = np.full(forest.token_count, -1, dtype=np.int64)
    first_N[source_E[routed_E[::-1]]] = routed_E[::-1]  # In reverse: the first entry writes last.
    dtype = np.uint8 if shape.expert_index_bytes == 1 else np.int16
    expert_NR: NDArray[np.integer[Any]] = np.full(
        (forest.token_count, route_ER.shape[1]), shape.experts, dtype=dtype
    )
    for tokens in _chunks(np.flatnonzero(first_N >= 0)):
        expert_NR[tokens] = route_ER[first_N[tokens]]
    # Few tokens have a second entry, so few rows are compared.
    others_E = routed_E[first_N[source_E[routed_E]] != routed_E]
    top_k = shape.experts_per_token
    return TokenExpertRoutes(
        expert_NLK=expert_NR.reshape(-1, shape.layers, top_k)[:, shape.parts.dense_layers :],
        disagreements=_differing(
            route_ER[others_E], route_ER[first_N[source_E[others_E]]], top_k=top_k
        ),
    )


def check_expert_routes(forest: Forest, shape: ModelShape) -> None:
    """Refuse expert routes that the model cannot run.

    Raises:
        InvalidTreeError: a wrong size, an unknown expert, or one expert twice in a layer.
    """
    recorded, layers, top_k = forest.entry_route_ER, shape.layers, shape.experts_per_token
    if recorded.shape[1] == 0:
        return
    if not shape.experts:
        raise InvalidTreeError("entry_route: the model has no experts")
    if recorded.shape[1] != layers * top_k:
        raise InvalidTreeError(
            f"entry_route: {recorded.shape[1]} values an entry, but the model has {layers} layers "
            f"with {top_k} experts for each token"
        )
    for rows in _chunks(recorded[:, shape.parts.dense_layers * top_k :]):
        if rows.min() < 0 or rows.max() >= shape.experts:
            raise InvalidTreeError(f"entry_route: experts must be in 0..{shape.experts - 1}")
        if _has_one_twice(rows, top_k=top_k):
            raise InvalidTreeError("entry_route: one expert twice for one token and layer")


def _differing(left: NDArray[np.int16], right: NDArray[np.int16], *, top_k: int) -> int:
    """Rows with other experts in some layer; experts of one layer are a set, in any order."""
    shape = (len(left), left.shape[1] // top_k, top_k)
    ordered = [np.sort(rows.reshape(shape), axis=2) for rows in (left, right)]
    return int((ordered[0] != ordered[1]).any(axis=(1, 2)).sum())


def _chunks(rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Few enough rows at a time that what is made of them stays in a core's cache."""
    for start in range(0, len(rows), CHUNK_ROWS):
        yield rows[start : start + CHUNK_ROWS]


def _has_one_twice(rows: NDArray[np.int16], *, top_k: int) -> bool:
    """Compare every pair of a layer's experts: a twentieth of the time of sorting them."""
    by_rank = np.ascontiguousarray(rows.reshape(-1, top_k).T)
    return any(
        bool((by_rank[distance:] == by_rank[:-distance]).any()) for distance in range(1, top_k)
    )
