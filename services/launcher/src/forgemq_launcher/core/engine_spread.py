"""Whether SGLang can spread a model over the processes of an engine as a run's file says.

SGLang finds most of this when it builds the model, in each of the engine's processes and minutes
after the start; what `SPLITS_ATTENTION_OVER_ALL` is about it does not find at all.
"""

from collections.abc import Iterator

from msgspec import Struct

from forgemq_contracts.lane_engines import EngineShape

SPLITS_ATTENTION_OVER_ALL = ("llama", "qwen2")
"""Model types whose attention SGLang 0.5.23 splits over all processes of an engine, whatever groups
attend for requests of their own: each group would compute its requests with a part of the heads."""

_BLOCK = 128
"""Rows and columns of a block of 8-bit weights."""


class ModelSizes(Struct, frozen=True, kw_only=True):
    """What is read of a model's config.json; 0 and "" for what it does not name.

    Families name the number of experts differently, and those whose every layer has experts may
    name their size as others name that of an MLP.
    """

    model_type: str = ""
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None
    intermediate_size: int = 0
    num_experts: int = 0
    num_local_experts: int = 0
    n_routed_experts: int = 0
    moe_intermediate_size: int = 0

    @property
    def experts(self) -> tuple[str, int]:
        """Name and value of the field that counts the experts of a layer; 0 in a dense model."""
        named = ("num_local_experts", "n_routed_experts")
        field = next((name for name in named if getattr(self, name)), "num_experts")
        return field, getattr(self, field)

    @property
    def split_width(self) -> tuple[str, int]:
        """Name and value of the field with the intermediate size of an expert, or of the MLP."""
        has_own = self.experts[1] and self.moe_intermediate_size
        field = "moe_intermediate_size" if has_own else "intermediate_size"
        return field, getattr(self, field)


def check_spread(shape: EngineShape, sizes: ModelSizes, *, has_blocks: bool) -> None:
    """Refuse a shape that the model cannot have.

    Args:
        shape: Of the engine; its own fields fit one another.
        sizes: Of the model.
        has_blocks: The engine holds 8-bit weights in blocks.

    Raises:
        ValueError: names the field, both numbers and the rule.
    """
    _check_attention(shape, sizes)
    _check_experts(shape, sizes)
    name, width = sizes.split_width
    parts = shape.tensor_parallel
    if sizes.experts[1]:
        parts //= shape.expert_parallel
    if width % parts:
        raise ValueError(
            f"lanes.tensor_parallel: {parts} processes must divide the model's {name}, got {width}"
        )
    if not has_blocks:
        return
    for part, size, over in (("MLP", width, parts), *_projections(shape, sizes)):
        # A projection without whole blocks is not quantised, and may be split anywhere.
        if size % _BLOCK == 0 and size // over % _BLOCK:
            raise ValueError(
                f"lanes.tensor_parallel: {over} processes must split the {part} of {size} between "
                f"blocks of {_BLOCK}, because model.engine_quantization is fp8_blocks"
            )


def _check_attention(shape: EngineShape, sizes: ModelSizes) -> None:
    groups = shape.attention_data_parallel
    if groups > 1 and sizes.model_type in SPLITS_ATTENTION_OVER_ALL:
        raise ValueError(
            f"lanes.attention_data_parallel must be 1 for a model of type {sizes.model_type}, got "
            f"{groups}: SGLang splits its attention over all processes of an engine"
        )
    parts = shape.tensor_parallel // groups
    heads, key_heads = sizes.num_attention_heads, sizes.num_key_value_heads or 0
    if heads % parts:
        raise ValueError(
            f"lanes.tensor_parallel: the {parts} processes that attend together must divide the "
            f"model's num_attention_heads, got {heads}"
        )
    if key_heads and max(key_heads, parts) % min(key_heads, parts):
        raise ValueError(
            f"lanes.tensor_parallel: of the {parts} processes that attend together and the model's "
            f"num_key_value_heads, {key_heads}, one must divide the other"
        )


def _check_experts(shape: EngineShape, sizes: ModelSizes) -> None:
    parts = shape.expert_parallel
    field, count = sizes.experts
    if parts > 1 and not count:
        raise ValueError(
            f"lanes.expert_parallel must be 1 for a model without experts, got {parts}"
        )
    if count % parts:
        raise ValueError(
            f"lanes.expert_parallel must divide the model's {field}, got {parts} and {count}"
        )


def _projections(shape: EngineShape, sizes: ModelSizes) -> Iterator[tuple[str, int, int]]:
    """Name, size and processes of what is split of the attention."""
    parts = shape.tensor_parallel // shape.attention_data_parallel
    heads, key_heads = sizes.num_attention_heads, sizes.num_key_value_heads or 0
    if not heads:
        return
    head_size = sizes.head_dim or sizes.hidden_size // heads
    yield "query heads", heads * head_size, parts
    # Fewer key heads than processes are there several times.
    yield "key heads", key_heads * head_size, min(parts, max(1, key_heads))
