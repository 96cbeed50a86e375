"""Expert route replay: a token runs through the experts that the engine chose for it.

An entry's expert route is that of the forward pass that sampled it, which is the pass of the token
it continues. A tree's token has one expert route: that of the first entry that continues it. An
entry may have recorded another one, because a later request prefilled the same history again; such
entries are counted. The trainer's own routers choose for tokens that no entry continues, and for
groups without recorded expert routes.

N tokens, E entries, L layers with a router, K experts for each token, R = L * K.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forgemq_trainer.core.tree import Forest, InvalidTreeError

ROUTED_HERE = -1
"""Stands for an expert that the trainer's router chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExpertRoutes:
    """Expert routes by token.

    Attributes:
        expert_NLK: The experts to run, or K times `ROUTED_HERE`.
        disagreements: Entries whose recorded experts are not those of the token they continue.
    """

    expert_NLK: NDArray[np.int64]
    disagreements: int


def token_expert_routes(forest: Forest, *, layers: int, top_k: int) -> TokenExpertRoutes | None:
    """The forest's expert routes, checked by `check_expert_routes`; None if no entry has any."""
    if forest.entry_route_ER.shape[1] == 0:
        return None
    route_ER = forest.entry_route_ER.astype(np.int64)
    source_E = forest.parent_N[forest.entry_token_E]
    has_route = (route_ER >= 0).all(axis=1)
    chosen_NR = np.full((forest.token_count, layers * top_k), ROUTED_HERE, dtype=np.int64)
    entries = np.flatnonzero(has_route)[::-1]  # In reverse, so that the first entry writes last.
    chosen_NR[source_E[entries]] = route_ER[entries]
    # Experts of one layer are a set: the engine may list them in another order.
    of_token = np.sort(chosen_NR[source_E].reshape(-1, layers, top_k), axis=2)
    of_entry = np.sort(route_ER.reshape(-1, layers, top_k), axis=2)
    differs_E = (of_token != of_entry).any(axis=(1, 2)) & has_route
    return TokenExpertRoutes(
        expert_NLK=chosen_NR.reshape(-1, layers, top_k), disagreements=int(differs_E.sum())
    )


def check_expert_routes(forest: Forest, *, layers: int, top_k: int, experts: int) -> None:
    """Refuse expert routes that the model cannot run.

    Raises:
        InvalidTreeError: a wrong size, an unknown expert, or one expert twice in a layer.
    """
    recorded = forest.entry_route_ER
    if recorded.shape[1] == 0:
        return
    if recorded.shape[1] != layers * top_k:
        raise InvalidTreeError(
            f"entry_route: {recorded.shape[1]} values an entry, but the model has {layers} layers "
            f"with {top_k} experts for each token"
        )
    if recorded.size and (recorded.min() < 0 or recorded.max() >= experts):
        raise InvalidTreeError(f"entry_route: experts must be in 0..{experts - 1}")
    ordered = np.sort(recorded.reshape(-1, layers, top_k), axis=2)
    if (np.diff(ordered, axis=2) == 0).any():
        raise InvalidTreeError("entry_route: one expert twice for one token and layer")
