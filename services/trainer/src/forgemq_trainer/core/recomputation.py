"""Decoder layers that keep little between forward and backward, and run forward again in between.

A layer that is recomputed keeps its input, its attention's output and the log-sum-exp of that; the
rest is computed again when backward reaches it. Attention itself need not run again: its backward
takes the output and the log-sum-exp that were kept. So a recomputed layer costs another forward of
its matrix products, less the last one, whose result no gradient needs.

The first layers of a decoder are recomputed, the others are kept. Backward frees the kept ones
before it reaches a recomputed one, which then has their room.
"""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


class LayerCall:
    """How one decoder layer is called; installed as its checkpointing function in transformers."""

    def __init__(self) -> None:
        """Keep the layer's activations."""
        self.is_recomputed = False
        """Set before each forward."""

    def __call__(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """The layer's output for this residual stream."""
        if not self.is_recomputed:
            return layer(hidden)
        # Nothing in a layer is random: dropout is refused.
        output = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(output, Tensor)
        return output
