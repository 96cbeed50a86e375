"""Which engines a run's file may ask for."""

import msgspec
import pytest

from forgemq_contracts.lane_engines import (
    LaneEngines,
    RoleEngines,
    check_lanes,
    every_lane,
    gpus_of,
    shapes_of,
)
from forgemq_contracts.pool import Pool
from forgemq_contracts.run import LogLayout, Model, RunConfiguration
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.run_rules import check
from forgemq_contracts.speculation import Speculation
from tests.unit.contracts.test_run import SOUND

PREFILL = RoleEngines(tensor_parallel=2)
DECODE = RoleEngines(tensor_parallel=4, flags=("--disaggregation-ib-device", "mlx5_0"))
PAIR = LaneEngines(prefill=PREFILL, decode=DECODE)
WIDE = LaneEngines(
    count=2,
    tensor_parallel=8,
    expert_parallel=8,
    attention_data_parallel=4,
    flags=("--mem-fraction-static=0.8", "--disaggregation-transfer-backend", "nixl"),
)


def run_with(*lanes: LaneEngines, partitions: int, **fields: object) -> RunConfiguration:
    return msgspec.structs.replace(SOUND, lanes=lanes, log=LogLayout(lanes=partitions), **fields)


def test_lanes_of_unequal_size_are_taken_and_numbered_in_the_order_of_the_file() -> None:
    check(run_with(WIDE, PAIR, partitions=3))
    assert every_lane((WIDE, PAIR)) == (WIDE, WIDE, PAIR)
    assert [gpus_of(lane) for lane in (WIDE, PAIR)] == [8, 6]
    assert shapes_of(PAIR) == (PREFILL, DECODE)
    assert shapes_of(WIDE) == (WIDE,)


def test_a_run_of_a_build_without_lanes_has_one_engine_for_each_lane() -> None:
    values = msgspec.to_builtins(SOUND)
    assert "lanes" not in values  # Not set, so not on the wire.
    assert msgspec.convert(values, RunConfiguration, strict=True) == SOUND
    assert SOUND.lanes == ()


def test_other_engines_may_serve_a_run_that_is_resumed() -> None:
    check_changes(run_with(WIDE, PAIR, partitions=3), run_with(PAIR, WIDE, partitions=3))


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (LaneEngines(count=2), r"^log\.lanes must be the sum of lanes\.count, got 1 and 2"),
        (LaneEngines(prefill=PREFILL), r"^lanes\.0\.decode must be given if lanes\.0\.prefill is"),
        (LaneEngines(decode=DECODE), r"^lanes\.0\.prefill must be given if lanes\.0\.decode is"),
        (
            LaneEngines(prefill=PREFILL, decode=DECODE, tensor_parallel=2),
            r"^lanes\.0\.tensor_parallel must be left out .* got 2",
        ),
        (
            LaneEngines(prefill=PREFILL, decode=DECODE, flags=("--x",)),
            r"^lanes\.0\.flags must be left out",
        ),
        (
            LaneEngines(prefill=RoleEngines(count=2), decode=DECODE),
            r"^lanes\.0\.prefill\.count must be 1, got 2",
        ),
        (
            LaneEngines(
                prefill=PREFILL, decode=RoleEngines(tensor_parallel=2, attention_data_parallel=2)
            ),
            r"^lanes\.0\.decode\.attention_data_parallel must be 1, got 2",
        ),
        (
            LaneEngines(tensor_parallel=4, expert_parallel=3),
            r"^lanes\.0\.expert_parallel must divide lanes\.0\.tensor_parallel, got 3 and 4",
        ),
        (LaneEngines(flags=("nixl",)), r"^lanes\.0\.flags must begin with a flag, got 'nixl'"),
    ],
)
def test_lanes_that_cannot_work_are_refused_by_field(lane: LaneEngines, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_lanes((lane,), partitions=1)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--tp-size=8", "--tp-size: tensor_parallel says it"),
        ("--tensor-parallel-s", "--tensor-parallel-s: tensor_parallel says it"),
        ("--port", "--port: the launcher gives"),
        ("--hicache-ratio", r"--hicache-ratio: \[pool\] says it"),
        ("--speculative-algorithm", r"--speculative-algorithm: \[speculation\] says it"),
        ("--disaggregation-mode", "--disaggregation-mode: lanes.prefill and lanes.decode"),
        ("--config", "--config: a file of flags"),
    ],
)
def test_flags_that_forgemq_sets_are_refused_in_any_spelling_sglang_takes(
    flag: str, reason: str
) -> None:
    lane = LaneEngines(
        prefill=PREFILL, decode=RoleEngines(flags=("--mem-fraction-static", "0.8", flag))
    )
    with pytest.raises(ValueError, match=rf"^lanes\.0\.decode\.flags must be without {reason}"):
        check_lanes((lane,), partitions=1)


def test_a_pair_may_have_a_pool_a_draft_head_and_8_bit_weights() -> None:
    check(
        run_with(
            PAIR,
            partitions=1,
            pool=Pool(storage="file"),
            speculation=Speculation(head="h"),
            model=Model(path="m", engine_quantization="fp8_blocks"),
        )
    )
