"""What the launcher asks the trainer about a run that is only planned, and what it answers.

Neither is on the log. `python -m forgemq_trainer.plan` reads one question a line as JSON from its
standard input, and writes one answer a line.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_contracts.lora import Lora
from forgemq_contracts.run import RunConfiguration


class AskedModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """How large is the model of this config.json, and the adapters that a run trains of it?"""

    config: Annotated[bytes, Meta(description="config.json of the model.")]
    lora: Lora | None = None
    has_head: Annotated[bool, Meta(description="Whether the run trains a draft head.")] = False


class PlannedModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Numbers of parameters, by what they do; nothing of the model's files but config.json is read.

    A tied head counts as the embedding.
    """

    model_type: str
    layers: int
    embedding: int
    head: int
    attention: int
    mlp: Annotated[int, Meta(description="Of MLPs that every token runs through.")]
    experts: Annotated[int, Meta(description="All of them.")]
    other: Annotated[int, Meta(description="Norms, routers, biases of routers.")]
    layer_max: Annotated[int, Meta(description="Parameters of the largest layer.")]
    layer_experts_max: Annotated[int, Meta(description="Of its experts alone; 0: dense.")] = 0
    query_heads: int
    key_heads: int
    head_size: int
    latent_size: Annotated[
        int,
        Meta(description="Values that an engine keeps of a token in a layer, if latent (MLA)."),
    ] = 0
    experts_count: Annotated[int, Meta(description="To choose from in a layer; 0: dense.")]
    experts_per_token: int
    adapters: Annotated[
        int, Meta(description="Of the run's adapters, besides all others; 0: the model trains.")
    ] = 0

    draft_head: Annotated[
        int, Meta(description="Of the run's draft head, besides all others; 0: it trains none.")
    ] = 0

    @property
    def trained(self) -> int:
        """Those with gradients and moments."""
        return self.adapters or self.parameters

    @property
    def layer_trained(self) -> int:
        """Those of the largest layer."""
        return self.adapters // self.layers or self.layer_max

    @property
    def parameters(self) -> int:
        """All of the model's own."""
        return self.embedding + self.head + self.attention + self.mlp + self.experts + self.other

    @property
    def active_parameters(self) -> float:
        """Those that one token is multiplied with; the embedding only as a tied head."""
        chosen = self.experts_per_token / self.experts_count if self.experts_count else 0.0
        head = self.head or self.embedding
        return head + self.attention + self.mlp + self.experts * chosen + self.other


class GroupsOfTree(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tree and how many groups of a step are like it."""

    tree: Annotated[bytes, Meta(description="MergedTree in its wire form.")]
    groups: Annotated[int, Meta(ge=1)]


class AskedStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """How does the trainer of this run take a step over these trees?"""

    config: Annotated[bytes, Meta(description="config.json of the model.")]
    configuration: Annotated[
        RunConfiguration, Meta(description="Its memory budget is what a rank has.")
    ]
    device: Literal["cpu", "cuda"]
    step: Annotated[tuple[GroupsOfTree, ...], Meta(description="The groups of a usual step.")]
    largest: Annotated[
        tuple[bytes, ...], Meta(description="The largest group of each queue, as MergedTree.")
    ]


class PlannedGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one group trains.

    Attributes:
        tokens: Of its tree.
        way: Whole on one rank, in blocks on one rank, or shared by several ranks.
        ranks: That run it.
        blocks: How many follow one another.
        block_tokens: Most tokens of one, over all ranks.
        recomputed_layers: Layers that run forward again in backward.
        is_offloaded: Keys and values off the live path go to host memory.
        stored_bytes: At most so many of them.
        predicted_bytes: Most bytes on a rank at once, fixed part apart.
        refusal: Why there is no plan; "" if there is one.
    """

    tokens: int
    way: Literal["whole", "blocks", "shared", "none"]
    ranks: int = 1
    blocks: int = 0
    block_tokens: int = 0
    recomputed_layers: int = 0
    is_offloaded: bool = False
    stored_bytes: int = 0
    predicted_bytes: int = 0
    refusal: str = ""


class PlannedStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What a step costs, and what fits.

    Attributes:
        refusal: Why the trainer does not take this model or configuration; "" if it does. The other
            fields are 0 then.
        least_budget_bytes: For an episode that fills the context.
        whole_tokens: Of the largest group that one rank runs at once.
        key_bytes_per_token: Keys and values of one token.
        largest: How the largest group of each queue trains.
        tree_tokens: Of the step's trees.
        flops: Of a forward and a backward of the step's trees, once; with those of a draft head.
        slowest_flops: Of the rank that computes longest, summed over the rounds in which ranks wait
            for one another; with the second forward of blocks and of
            recomputed layers.
        idle_share: Share of all ranks' time in which they wait for the slowest, by FLOPs, 0..1.
        forwards: Passes over all layers.
        backwards: The same.
        kept: What ranks keep between passes: weights include the head, gradients the weights.
        gathered_bytes: Of shards of weights that a rank sends to others, as all of the following.
        reduced_bytes: Of gradients, which are summed into shards.
        replicated_bytes: Of summed shards, which are summed over the replicas of the model, and of
            gradients of a draft head, which are summed over all ranks.
        exchanged_bytes: Keys, values, their gradients, log-probabilities and what a draft head
            reads of groups that ranks share, of the rank that sends most.
        travelled_bytes: Rows of tokens that leave a rank for experts of others, outputs of its own
            experts that go back, and gradients of both; 0 if each rank runs all experts.
        predicted_bytes: Most bytes at once on a rank, fixed part apart.
        refused_step: Why the step's own trees have no plan; "" if they have.
    """

    refusal: str = ""
    least_budget_bytes: int = 0
    whole_tokens: int = 0
    key_bytes_per_token: int = 0
    largest: tuple[PlannedGroup, ...] = ()
    tree_tokens: int = 0
    flops: float = 0.0
    slowest_flops: float = 0.0
    idle_share: float = 0.0
    forwards: int = 0
    backwards: int = 0
    kept: Literal["nothing", "head", "weights", "gradients"] = "nothing"
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    replicated_bytes: int = 0
    exchanged_bytes: int = 0
    travelled_bytes: int = 0
    predicted_bytes: int = 0
    refused_step: str = ""


class RefusedPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The question cannot be answered."""

    reason: str


PlanQuestion: TypeAlias = AskedModel | AskedStep
PlanAnswer: TypeAlias = PlannedModel | PlannedStep | RefusedPlan
