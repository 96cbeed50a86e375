"""Low-rank adapters: what a run trains in place of the model's own weights."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

AdapterTarget: TypeAlias = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]
"""A linear layer of each decoder layer, as transformers and SGLang name it."""

ATTENTION_TARGETS: tuple[AdapterTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS: tuple[AdapterTarget, ...] = ("gate_proj", "up_proj", "down_proj")


class Lora(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Low-rank adapters (arXiv 2106.09685): y = W x + (alpha / rank) B A x, and W stays.

    B begins as zeros, so that version 0 is the base model.
    """

    rank: Annotated[int, Meta(ge=1, le=512, description="Rows of A.")] = 16
    alpha: Annotated[float, Meta(gt=0, description="B A counts alpha / rank.")] = 32.0
    targets: Annotated[
        tuple[AdapterTarget, ...],
        Meta(
            min_length=1,
            description="Layers that get an adapter; in a mixture of experts those of attention.",
        ),
    ] = ATTENTION_TARGETS + MLP_TARGETS
    publish: Annotated[
        Literal["adapter", "merged"],
        Meta(
            description="adapter: engines load the adapter beside the base model. merged: the "
            "trainer adds B A to W and publishes all weights, as without adapters."
        ),
    ] = "adapter"

    @property
    def scale(self) -> float:
        """What B A counts."""
        return self.alpha / self.rank


def publishes_adapters(lora: Lora | None) -> bool:
    """Whether a version of a run with these adapters is one, which engines load beside the base."""
    return lora is not None and lora.publish == "adapter"
