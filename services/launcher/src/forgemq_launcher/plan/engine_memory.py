"""Memory of the engines: weights on each GPU, and how many tokens of K/V fit beside them.

What SGLang keeps free is by its own rule (0.5.23, arg_groups/memory_hook.py): activations of a
chunk of prefill, slack for the number of GPUs, and graphs.
"""

from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.lane_engines import EngineShape, LaneEngines, shapes_of
from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trainer_plan import PlannedModel
from forgemq_launcher.plan.machines import Gpu

MIB = 1 << 20
VALUE_BYTES = 2
"""Engines on GPUs compute in bfloat16, whatever the trainer does."""
ADAPTERS_HELD = 2
"""Places for adapters in an engine: it loads a version beside the one that it serves."""
FP8_BLOCK_BYTES = 1 + 4 / (128 * 128)
"""Of a weight in 8 bits with a float32 scale for each block of 128 x 128."""


class EngineMemory(Struct, frozen=True, kw_only=True):
    """One kind of lane.

    Attributes:
        lanes: Of this kind.
        gpus: Of one lane.
        attention_groups: Of its serving engine; each holds the K/V of requests of its own.
        weight_bytes: On each GPU of the lane's serving engine.
        reserved_bytes: On each GPU, for activations and graphs.
        key_bytes_per_token: On each GPU that holds the token.
        cached_tokens: Of K/V that fit into the engine; 0 if its weights do not fit.
        episodes: That fill their context and fit side by side.
    """

    lanes: int
    gpus: int
    attention_groups: int
    weight_bytes: int
    reserved_bytes: int
    key_bytes_per_token: int
    cached_tokens: int
    episodes: int


def engine_memory(
    configuration: RunConfiguration, model: PlannedModel, gpu: Gpu
) -> tuple[EngineMemory, ...]:
    """Each kind of lane of the run, in the file's order."""
    lanes: Sequence[LaneEngines] = configuration.lanes or (
        LaneEngines(count=configuration.log.lanes),
    )
    return tuple(_of_lane(lane, configuration, model, gpu) for lane in lanes)


def _of_lane(
    lane: LaneEngines, configuration: RunConfiguration, model: PlannedModel, gpu: Gpu
) -> EngineMemory:
    shapes = shapes_of(lane)
    shape = shapes[-1]  # Of a pair the decode engine, which holds the context to its end.
    is_quantised = configuration.model.engine_quantization != "none"
    weights = weight_bytes(model, shape, is_quantised=is_quantised)
    if publishes_adapters(configuration.lora):
        # At most: of some factors each GPU of an engine holds a part.
        weights += ADAPTERS_HELD * model.adapters * VALUE_BYTES
    reserved = reserved_bytes(gpu.memory_bytes, shape)
    key_bytes = key_bytes_per_token(model, shape)
    free = max(0, gpu.memory_bytes - reserved - weights)
    tokens = free // key_bytes * shape.attention_data_parallel
    return EngineMemory(
        lanes=lane.count,
        gpus=sum(each.tensor_parallel for each in shapes),
        attention_groups=shape.attention_data_parallel,
        weight_bytes=weights,
        reserved_bytes=reserved,
        key_bytes_per_token=key_bytes,
        cached_tokens=tokens,
        episodes=tokens // configuration.model.context_tokens_max,
    )


def key_bytes_per_token(model: PlannedModel, shape: EngineShape) -> int:
    """K/V of a token on each GPU that holds it."""
    if model.latent_size:  # Each GPU has it whole, whatever number attend together.
        return model.layers * model.latent_size * VALUE_BYTES
    attending = shape.tensor_parallel // shape.attention_data_parallel
    # Fewer key heads than GPUs are there several times.
    heads = max(1, model.key_heads // attending)
    return 2 * model.layers * heads * model.head_size * VALUE_BYTES


def weight_bytes(model: PlannedModel, shape: EngineShape, *, is_quantised: bool) -> int:
    """Weights on each GPU of an engine of this shape.

    Experts are split over all GPUs, however they are grouped; attention, embedding and head over
    those that attend together. Norms and routers are on each.
    """
    projection = FP8_BLOCK_BYTES if is_quantised else VALUE_BYTES
    attending = shape.tensor_parallel // shape.attention_data_parallel
    split = (model.embedding + model.head) * VALUE_BYTES / attending
    split += model.attention * projection / attending
    split += (model.mlp + model.experts) * projection / shape.tensor_parallel
    return int(split + model.other * VALUE_BYTES)


def reserved_bytes(memory_bytes: int, shape: EngineShape) -> int:
    """What SGLang leaves free on a GPU of this size, unless a flag says otherwise."""
    memory_mib = memory_bytes // MIB
    is_large = memory_mib >= 160 * 1024
    chunk = 16_384 if is_large else 8192
    batch_max = 512 if is_large or shape.tensor_parallel >= 4 else 256
    reserved = 512 + 1.5 * chunk + shape.tensor_parallel / 8 * 1024 + 2 * batch_max
    reserved += 8 * len(_prefill_graphs(chunk))
    if shape.attention_data_parallel > 1:
        added = 3.0 if batch_max <= 300 else 4.5
        reserved += added * batch_max * shape.attention_data_parallel
    return int(max(reserved, 10 * 1024) * MIB)


def _prefill_graphs(chunk: int) -> list[int]:
    """Token counts for which SGLang captures a graph of prefill."""
    steps = [(4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256)]
    sizes = [size for first, end, step in steps for size in range(first, end, step)]
    return [*sizes, *range(4608, chunk + 1, 512)]
