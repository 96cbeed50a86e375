"""Engines over several GPUs that a model cannot be spread over are refused before they start."""

from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.lane_engines import EngineShape, LaneEngines, RoleEngines
from forgemq_contracts.run import LogLayout, Model
from forgemq_launcher.core.engine_spread import ModelSizes, check_spread
from forgemq_launcher.upkeep.engine_servers import servers
from forgemq_launcher.upkeep.machine import MachineError
from tests.unit.launcher.test_gpus import RUN

DENSE = ModelSizes(
    model_type="qwen3",
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=12288,
)
EXPERTS = ModelSizes(
    model_type="qwen3_moe",
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    num_experts=128,
    moe_intermediate_size=768,
)
OTHER_FIELD = msgspec.structs.replace(
    EXPERTS,
    model_type="minimax_m2",
    num_experts=0,
    num_local_experts=256,
    moe_intermediate_size=0,
    intermediate_size=1536,
)
LLAMA = msgspec.structs.replace(DENSE, model_type="llama")


def shape(tensor: int, *, experts: int = 1, attention: int = 1) -> EngineShape:
    return EngineShape(
        tensor_parallel=tensor, expert_parallel=experts, attention_data_parallel=attention
    )


@pytest.mark.parametrize(
    ("engine", "sizes", "has_blocks"),
    [
        (shape(8), DENSE, True),
        (shape(16), DENSE, False),
        (shape(8, attention=4), DENSE, True),
        (shape(8), LLAMA, False),
        (shape(8, experts=8, attention=4), EXPERTS, True),
        (shape(8, experts=4), EXPERTS, True),
        (shape(4, experts=4), OTHER_FIELD, True),
        (shape(3), ModelSizes(), True),
    ],
)
def test_shapes_that_a_model_can_have_are_taken(
    engine: EngineShape, sizes: ModelSizes, *, has_blocks: bool
) -> None:
    check_spread(engine, sizes, has_blocks=has_blocks)


@pytest.mark.parametrize(
    ("engine", "sizes", "has_blocks", "message"),
    [
        (shape(6), DENSE, False, r"the 6 processes .* num_attention_heads, got 32$"),
        (
            shape(32),
            msgspec.structs.replace(DENSE, num_key_value_heads=6),
            False,
            r"the 32 processes .* num_key_value_heads, 6, one must divide the other$",
        ),
        (
            shape(8, attention=2),
            LLAMA,
            False,
            r"^lanes.attention_data_parallel must be 1 for a model of type llama, got 2",
        ),
        (shape(8, experts=8), DENSE, False, r"^lanes.expert_parallel must be 1 .* got 8$"),
        (
            shape(16, experts=16),
            msgspec.structs.replace(EXPERTS, num_experts=60),
            False,
            r"^lanes.expert_parallel must divide the model's num_experts, got 16 and 60$",
        ),
        (
            shape(3, experts=3),
            msgspec.structs.replace(OTHER_FIELD, num_attention_heads=48, num_key_value_heads=3),
            False,
            r"^lanes.expert_parallel must divide the model's num_local_experts, got 3 and 256$",
        ),
        (
            shape(2),
            msgspec.structs.replace(DENSE, intermediate_size=999),
            False,
            r"2 processes must divide the model's intermediate_size, got 999$",
        ),
        (shape(4), EXPERTS, True, r"4 processes must split the MLP of 768 between blocks of 128"),
        (
            shape(16),
            msgspec.structs.replace(DENSE, head_dim=32),
            True,
            r"16 processes must split the query heads of 1024 between blocks",
        ),
    ],
)
def test_a_shape_that_a_model_cannot_have_is_refused_by_field_and_numbers(
    engine: EngineShape, sizes: ModelSizes, message: str, *, has_blocks: bool
) -> None:
    with pytest.raises(ValueError, match=message):
        check_spread(engine, sizes, has_blocks=has_blocks)


def test_no_engine_of_a_run_starts_if_one_half_of_a_pair_cannot_have_its_shape(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(DENSE))
    pair = LaneEngines(prefill=RoleEngines(), decode=RoleEngines(tensor_parallel=6))
    run = msgspec.structs.replace(
        RUN, lanes=(LaneEngines(), pair), log=LogLayout(lanes=2), model=Model(path=str(tmp_path))
    )
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(MachineError, match="the 6 processes that attend together"):
        servers(run, folder=tmp_path, environ=hidden, addresses=())
