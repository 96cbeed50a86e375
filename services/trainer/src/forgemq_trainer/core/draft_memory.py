"""The sizes of a draft head, and the bytes of its pass, which comes after the policy's."""

from dataclasses import dataclass

from forgemq_trainer.core.peak import Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a draft head: one decoder layer without an input norm, behind a projection.

    Attributes:
        hidden: Size of the policy's residual stream, and of the head's.
        query_size: Query heads times head size.
        key_size: Key/value heads times head size.
        mlp_size: Intermediate size.
        vocabulary: Rows of the policy's language-model head.
        value_bytes: Of one activation.
        wide_bytes: Of one logit.
        depths: How many tokens in a row the head learns to guess.
        gathered_matrices: Of the policy's embedding and head, those that each rank gathers for an
            update: 1 if they are tied, 0 if this rank holds the whole policy.
    """

    hidden: int
    query_size: int
    key_size: int
    mlp_size: int
    vocabulary: int
    value_bytes: int
    wide_bytes: int
    depths: int = 1
    gathered_matrices: int = 0

    @property
    def projection_weights(self) -> int:
        """Of the projection of embedding and state."""
        return 2 * self.hidden * self.hidden

    @property
    def layer_weights(self) -> int:
        """Of the layer's products."""
        return self.hidden * (2 * (self.query_size + self.key_size) + 3 * self.mlp_size)

    @property
    def parameters(self) -> int:
        """All of the head's own: also the projection's bias and the norm."""
        return self.projection_weights + self.layer_weights + 2 * self.hidden

    @property
    def key_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.key_size * self.value_bytes

    @property
    def carry_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, and of their gradients."""
        return self.key_bytes_per_token + 2 * self.key_size * self.wide_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the policy's embedding and head, which an update holds whole from its start."""
        return self.gathered_matrices * self.vocabulary * self.hidden * self.value_bytes

    def peaks(self, *, chunk: int, is_carried: bool) -> tuple[Peak, ...]:
        """The most bytes of the head's forward and backward, without carries.

        Autograd keeps of a token: the projection's input and output, the norm's input and output;
        queries, attention's output and its copy for the projection; keys and values, unless they
        lie in a carry; gate, its activation, up, product. Besides these there are the final state,
        its gradient, cosines, sines and indices (together about a row) and, unless they are
        offloaded, the states that the rows read. Then come

        - the loss: four times the logits of a chunk, and the widened weights in a narrow dtype;
        - the MLP: the gradients of its activation and of up, and those of a projection's weights.
        """
        row = self.hidden * self.value_bytes
        heads = 3 * self.query_size + (0 if is_carried else 2 * self.key_size)
        kept = (5 * self.hidden + heads + 4 * self.mlp_size) * self.value_bytes + 3 * row
        # The policy's, and at later depths the head's own of the depth before.
        kept += 0 if is_carried else min(2, self.depths) * row
        widened = self.hidden * self.vocabulary * self.wide_bytes
        logits = 4 * chunk * self.vocabulary * self.wide_bytes
        is_narrow = self.value_bytes < self.wide_bytes
        return (
            Peak(fixed_bytes=logits + (widened if is_narrow else 0), token_bytes=kept),
            Peak(
                fixed_bytes=self.mlp_size * row,
                token_bytes=kept + 2 * self.mlp_size * self.value_bytes,
            ),
        )
