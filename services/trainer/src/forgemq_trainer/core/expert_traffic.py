"""Bytes that tokens' rows take on their way to the ranks of their experts, and back.

A row is a token's values of the residual stream, for one of its experts. It goes there and back in
each forward of a layer, also in the one that a recomputed layer repeats; in backward its gradients
go the same way. If routers spread tokens evenly, of the rows of a rank (X - 1) / X leave it, X
being the ranks of an expert group; otherwise some ranks receive more, and others less.
"""

from forgemq_trainer.core.memory import ModelShape


def row_bytes(
    shape: ModelShape, *, tokens: int, forwards: int, backwards: int, recomputed_layers: int = 0
) -> int:
    """Bytes of all rows that a rank sends, those to its own experts among them.

    Each expert's output comes back as a row of the same size, and counts as sent by its rank.

    Args:
        shape: The model's sizes.
        tokens: Of the rank, in each pass.
        forwards: Passes over all layers.
        backwards: The same.
        recomputed_layers: So many of the first layers run forward again in each backward.
    """
    routed = shape.layers - shape.parts.dense_layers
    again = max(0, recomputed_layers - shape.parts.dense_layers)
    ways = 2 * (routed * (forwards + backwards) + again * backwards)
    return ways * tokens * shape.experts_per_token * shape.hidden * shape.value_bytes


def leaving_bytes(shape: ModelShape, sent: int) -> int:
    """Of so many bytes of rows those that leave the rank, if routers spread tokens evenly."""
    return sent * (shape.expert_ranks - 1) // shape.expert_ranks
