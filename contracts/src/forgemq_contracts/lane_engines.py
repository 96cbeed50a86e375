"""The engines of a run: how many lanes of each kind, and with which GPUs and flags of SGLang."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

_REASONS = {
    "--model-path": "model.path names the model",
    "--model": "model.path names the model",
    "--config": "a file of flags may set what ForgeMQ sets",
    "--host": "the launcher gives each engine its address",
    "--port": "the launcher gives each engine its address",
    "--weight-version": "ForgeMQ names the weights",
    "--load-format": "an engine begins with the weights of model.path",
    "--sleep-on-idle": "every engine has it",
    "--skip-server-warmup": "every engine has it",
    "--enable-metrics": "every engine has it",
    "--tensor-parallel-size": "tensor_parallel says it",
    "--tp-size": "tensor_parallel says it",
    "--pipeline-parallel-size": "new weights reach engines of one pipeline stage only",
    "--pp-size": "new weights reach engines of one pipeline stage only",
    "--expert-parallel-size": "expert_parallel says it",
    "--ep-size": "expert_parallel says it",
    "--data-parallel-size": "attention_data_parallel says it",
    "--dp-size": "attention_data_parallel says it",
    "--enable-dp-attention": "attention_data_parallel says it",
    "--attention-data-parallel-size": "attention_data_parallel says it",
    "--attn-dp-size": "attention_data_parallel says it",
    "--nnodes": "an engine is on one machine",
    "--node-rank": "an engine is on one machine",
    "--base-gpu-id": "the launcher gives each engine its GPUs",
    "--gpu-id-step": "the launcher gives each engine its GPUs",
    "--device": "the launcher looks for GPUs",
    "--enable-return-routed-experts": "the model decides it",
    "--moe-runner-backend": "ForgeMQ takes the one that records routes",
    "--quantization": "model.engine_quantization says it",
    "--quantize-and-serve": "model.engine_quantization says it",
    "--modelopt-quant": "model.engine_quantization says it",
    "--rl-quant-profile": "model.engine_quantization says it",
    "--enable-lora": "[lora] says it",
    "--max-lora-rank": "[lora] says it",
    "--max-loras-per-batch": "[lora] says it",
    "--lora-target-modules": "[lora] says it",
    "--lora-paths": "the trainer publishes adapters",
    "--page-size": "[pool] says it",
    "--enable-hierarchical-cache": "[pool] says it",
    "--enable-hicache": "[pool] says it",
    "--disable-radix-cache": "the gateway counts on it",
    "--disable-overlap-schedule": "the launcher sets it where it is needed",
    "--enable-fp32-lm-head": "every engine on GPUs has it",
    "--disaggregation-mode": "lanes.prefill and lanes.decode say it",
    "--disaggregation-bootstrap-port": "the launcher chooses it",
    "--disaggregation-decode-enable-radix-cache": "every decode engine has it",
}
"""Flags that ForgeMQ sets itself, and what says or decides each."""

_FAMILIES = {"--hicache-": "[pool] says it", "--speculative-": "[speculation] says it"}
"""Beginnings of more such flags."""


class EngineShape(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One SGLang server: its GPUs, on a CPU processes; how its model is spread over them; flags."""

    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="GPUs of the server, side by side on one machine; processes on a CPU.",
        ),
    ] = 1
    expert_parallel: Annotated[
        int,
        Meta(
            ge=1, le=1024, description="Parts that the experts are spread over; divides the GPUs."
        ),
    ] = 1
    attention_data_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Groups of GPUs that each attend for requests of their own; divides the "
            "GPUs.",
        ),
    ] = 1
    flags: Annotated[
        tuple[str, ...],
        Meta(description="Appended to SGLang's command line as they are; none that ForgeMQ sets."),
    ] = ()


class RoleEngines(
    EngineShape, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The prefill or the decode engines of one lane."""

    count: Annotated[int, Meta(ge=1, le=64, description="Engines of this role in each lane.")] = 1


class LaneEngines(
    EngineShape, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Lanes that have the same engines: one unified engine each, or one pair each."""

    count: Annotated[int, Meta(ge=1, le=4096, description="Lanes like this.")] = 1
    prefill: (
        Annotated[RoleEngines, Meta(description="Reads contexts and sends their K/V to `decode`.")]
        | None
    ) = None
    decode: (
        Annotated[RoleEngines, Meta(description="Samples; given if and only if `prefill` is.")]
        | None
    ) = None


def is_paired(lane: LaneEngines) -> bool:
    """Whether these lanes have their contexts read by an engine of its own."""
    return lane.prefill is not None


def every_lane(lanes: Sequence[LaneEngines]) -> tuple[LaneEngines, ...]:
    """The engines of each lane, lane 0 first."""
    return tuple(lane for lane in lanes for _ in range(lane.count))


def shapes_of(lane: LaneEngines) -> tuple[EngineShape, ...]:
    """The servers of one such lane; of a pair the prefill engine first."""
    if lane.prefill is None or lane.decode is None:
        return (lane,)
    return (lane.prefill, lane.decode)


def gpus_of(lane: LaneEngines) -> int:
    """GPUs of one such lane."""
    return sum(shape.tensor_parallel for shape in shapes_of(lane))


def check_lanes(lanes: Sequence[LaneEngines], *, partitions: int) -> None:
    """Refuse lanes that cannot work.

    Args:
        lanes: As in the run's file; not empty.
        partitions: `log.lanes`.

    Raises:
        ValueError: names the field and the rule.
    """
    total = sum(lane.count for lane in lanes)
    if total != partitions:
        raise ValueError(
            f"log.lanes must be the sum of lanes.count, got {partitions} and {total}: each lane "
            "has a partition of its own"
        )
    for index, lane in enumerate(lanes):
        _check_roles(lane, name=f"lanes.{index}")
        for name, shape in _named_shapes(lane, name=f"lanes.{index}"):
            _check_shape(shape, name=name)


def _named_shapes(lane: LaneEngines, *, name: str) -> Iterator[tuple[str, EngineShape]]:
    for suffix, shape in (("", lane), (".prefill", lane.prefill), (".decode", lane.decode)):
        if shape is not None:
            yield name + suffix, shape


def _check_roles(lane: LaneEngines, *, name: str) -> None:
    if (lane.prefill is None) != (lane.decode is None):
        given, missing = ("prefill", "decode") if lane.decode is None else ("decode", "prefill")
        raise ValueError(f"{name}.{missing} must be given if {name}.{given} is: they are a pair")
    if lane.prefill is None or lane.decode is None:
        return
    for field in EngineShape.__struct_fields__:
        if getattr(lane, field) not in (1, ()):
            raise ValueError(
                f"{name}.{field} must be left out if {name}.prefill is given: each of the two "
                f"engines has its own, got {getattr(lane, field)!r}"
            )
    for role in ("prefill", "decode"):
        engines: RoleEngines = getattr(lane, role)
        if engines.count != 1:
            raise ValueError(
                f"{name}.{role}.count must be 1, got {engines.count}: ForgeMQ sends a request to "
                "one engine of each role"
            )
        if engines.attention_data_parallel != 1:
            raise ValueError(
                f"{name}.{role}.attention_data_parallel must be 1, got "
                f"{engines.attention_data_parallel}: SGLang 0.5.23 computes a request that new "
                "weights interrupt on any of the groups, and not on the one that has its K/V"
            )


def _check_shape(shape: EngineShape, *, name: str) -> None:
    for field in ("expert_parallel", "attention_data_parallel"):
        parts = getattr(shape, field)
        if shape.tensor_parallel % parts:
            raise ValueError(
                f"{name}.{field} must divide {name}.tensor_parallel, got {parts} and "
                f"{shape.tensor_parallel}"
            )
    if shape.flags and not shape.flags[0].startswith("--"):
        raise ValueError(f"{name}.flags must begin with a flag, got {shape.flags[0]!r}")
    for text in shape.flags:
        flag = text.partition("=")[0]
        if reason := _reason_to_refuse(flag):
            raise ValueError(f"{name}.flags must be without {flag}: {reason}")


def _reason_to_refuse(flag: str) -> str:
    """Why ForgeMQ sets this flag itself; "" if it does not."""
    if not flag.startswith("--"):
        return ""
    for beginning, reason in _FAMILIES.items():
        if flag.startswith(beginning):
            return reason
    # SGLang takes a flag's beginning for the flag.
    return next((reason for name, reason in _REASONS.items() if name.startswith(flag)), "")
