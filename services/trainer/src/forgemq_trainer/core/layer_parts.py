"""Sizes of what only some families' layers have, and how much of it autograd keeps."""

from dataclasses import dataclass

NORMS_KEPT = 4
"""Rows of the residual stream's size that autograd keeps of a layer's two norms: in and out."""

MLP_KEPT = 3
"""Values that autograd keeps for each of the width of a common MLP: gate, up and product."""

EXPERT_KEPT = 4
"""Values that it keeps for each of an expert's width: also the gate's activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Attention whose keys and values are computed from one narrow vector for each token (MLA).

    Keys and values are expanded before attention, so carries hold them for every head; values are
    padded to the size of keys.

    Attributes:
        heads: Of queries, keys and values.
        query_rank: Size of the narrow vector of queries; 0 if they are computed from the stream.
        key_rank: Size of the narrow vector of keys and values.
        plain_size: Of one head's queries and keys, the part that does not turn with position.
        rotary_size: The part that does; its keys are the same in all heads.
        value_size: Size of one head's values.
    """

    heads: int
    query_rank: int
    key_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def kept(self) -> int:
        """Values that autograd keeps of a token in a layer besides queries, keys and values.

        Inputs and outputs of the norms of both narrow vectors, and attention's output.
        """
        narrow = 2 * self.query_rank + 2 * self.key_rank + self.rotary_size
        return narrow + self.heads * self.value_size

    def projection_size(self, hidden: int) -> int:
        """Multiplications of one token's projections in a layer."""
        query_size = self.heads * (self.plain_size + self.rotary_size)
        queries = (
            self.query_rank * (hidden + query_size) if self.query_rank else hidden * query_size
        )
        keys = hidden * (self.key_rank + self.rotary_size)
        expanded = self.key_rank * self.heads * (self.plain_size + self.value_size)
        return queries + keys + expanded + self.heads * self.value_size * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Layers in which a query sees only its nearest ancestors.

    Attributes:
        size: Tokens that it sees at most, itself among them.
        layers: So many of the model's layers.
    """

    size: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What layers have besides, or in place of, the common parts; the defaults are the common ones.

    Attributes:
        norms_kept: Rows of the residual stream's size that autograd keeps of a layer's norms.
        mlp_kept: Values that it keeps for each of an MLP's width, or of an expert's, if they are
            others than those of a common one.
        dense_layers: The first so many layers have an MLP instead of experts.
        dense_mlp_size: Its intermediate size.
        shared_mlp_size: Intermediate size of an MLP that every token uses beside its experts.
        is_router_wide: True if routers multiply in at least fp32.
        latent: Sizes of latent keys and values; None without.
        windows: None if every layer sees all ancestors.
    """

    norms_kept: int = NORMS_KEPT
    mlp_kept: int | None = None
    dense_layers: int = 0
    dense_mlp_size: int = 0
    shared_mlp_size: int = 0
    is_router_wide: bool = False
    latent: LatentShape | None = None
    windows: Windows | None = None

    @property
    def dense_mlp_kept(self) -> int:
        """Values of one token of an MLP in a dense layer."""
        return MLP_KEPT * self.dense_mlp_size

    @property
    def shared_mlp_kept(self) -> int:
        """Values of one token of the MLP beside the experts."""
        return MLP_KEPT * self.shared_mlp_size


COMMON_PARTS = LayerParts()
"""Of a layer with two norms, attention and a gated MLP, all of whose queries see all ancestors."""
