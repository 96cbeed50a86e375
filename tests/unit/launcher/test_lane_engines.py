"""The engines that the launcher starts for the lanes of a run's file."""

from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.lane_engines import LaneEngines, RoleEngines
from forgemq_contracts.run import LogLayout, Model, RunConfiguration
from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.core.gpus import engine_gpus
from forgemq_launcher.placement import gpus_of_engines
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.engine_servers import (
    added_addresses_count,
    added_servers,
    addresses_count,
    alone,
    options_of_engines,
    servers,
)
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.named_engines import check_lanes_unnamed
from forgemq_launcher.upkeep.services import service_specs
from forgemq_sglang_cpu.options import EngineOptions
from tests.unit.launcher.test_configuration import FILE
from tests.unit.launcher.test_gpus import RUN
from tests.unit.launcher.test_services import ADDRESSES, PLAYED
from tests.unit.launcher.test_services import configuration as services_run

PAIR = LaneEngines(
    prefill=RoleEngines(tensor_parallel=2),
    decode=RoleEngines(flags=("--mem-fraction-static", "0.7")),
)
WIDE = LaneEngines(tensor_parallel=4, expert_parallel=4, attention_data_parallel=2)
ON_CPU_TRAINER = {"FORGEMQ_TRAINER_DEVICE": "cpu"}


def run_with(*lanes: LaneEngines, model: str = "m") -> RunConfiguration:
    return msgspec.structs.replace(
        RUN, lanes=lanes, log=LogLayout(lanes=len(lanes)), model=Model(path=model)
    )


def test_each_engine_has_its_role_its_gpus_and_its_flags() -> None:
    run = run_with(WIDE, PAIR)
    made = options_of_engines(run, gpus=8, environ=ON_CPU_TRAINER)
    gpu = EngineOptions(has_gpu=True)
    assert made == (
        msgspec.structs.replace(
            gpu, tensor_parallel=4, expert_parallel=4, attention_data_parallel=2
        ),
        msgspec.structs.replace(gpu, role="prefill", tensor_parallel=2, gpu_first=4),
        msgspec.structs.replace(
            gpu, role="decode", extra=("--mem-fraction-static", "0.7"), gpu_first=6
        ),
    )
    assert (gpus_of_engines(run), gpus_of_engines(RUN)) == (7, 2)


def test_the_gpus_of_one_engine_lie_beside_one_another() -> None:
    assert engine_gpus([2, 1], gpus=4, trainer_device="cuda:1", ranks=1) == (2, 0)
    with pytest.raises(ValueError, match="the run's 1 engines need 3, those of one engine beside"):
        engine_gpus([3], gpus=5, trainer_device="cuda:2", ranks=1)


def test_a_pair_is_a_lane_of_two_servers_and_three_ports(tmp_path: Path) -> None:
    run = run_with(LaneEngines(prefill=RoleEngines(), decode=RoleEngines()), LaneEngines())
    assert (addresses_count(run), addresses_count(RUN)) == (4, 2)
    addresses = [("127.0.0.1", port) for port in (1, 2, 3, 4)]
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    pair, single = servers(run, folder=tmp_path, environ=hidden, addresses=addresses)
    assert pair.prefill is not None
    assert single.prefill is None
    urls = [server.url for server in (pair.prefill, pair.serving, single.serving)]
    assert urls == [f"http://127.0.0.1:{port}" for port in (1, 3, 4)]
    assert pair.prefill.log_path == tmp_path / "lane-0-prefill" / "engine.log"


def test_a_lane_that_is_added_has_engines_like_those_of_the_files_last_lane(tmp_path: Path) -> None:
    """The file says a single engine, then a pair; lanes 0 and 1 are as they were."""
    run = run_with(LaneEngines(), LaneEngines(prefill=RoleEngines(), decode=RoleEngines()))
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    addresses = [("127.0.0.1", port) for port in (7, 8, 9)]
    counts = [added_addresses_count(lane, run) for lane in (0, 1, 2, 5)]
    assert counts == [1, 3, 3, 3]
    for lane in (1, 5):
        added = added_servers(lane, run, folder=tmp_path, environ=hidden, addresses=addresses)
        assert added.prefill is not None
        assert (added.prefill.url, added.serving.url) == (
            "http://127.0.0.1:7",
            "http://127.0.0.1:9",
        )
        assert added.serving.log_path == tmp_path / f"lane-{lane}" / "engine.log"
    first = added_servers(0, run, folder=tmp_path, environ=hidden, addresses=addresses[:1])
    assert (first.prefill, first.serving.url) == (None, "http://127.0.0.1:7")


def test_without_lanes_in_the_file_an_added_lane_has_one_engine(tmp_path: Path) -> None:
    assert added_addresses_count(4, RUN) == 1
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    added = added_servers(4, RUN, folder=tmp_path, environ=hidden, addresses=[("127.0.0.1", 7)])
    assert (added.prefill, added.serving.url) == (None, "http://127.0.0.1:7")


@pytest.mark.parametrize("in_use", [{0}, {1}, set[int]()])
def test_an_added_lane_takes_the_first_gpu_that_no_engine_has(in_use: set[int]) -> None:
    """Lanes 1 to 6 were removed, or have engines elsewhere: two GPUs are enough for lane 7."""
    lane = alone(7, run_with(LaneEngines(), LaneEngines(flags=("--x",))))
    made = options_of_engines(lane, gpus=2, environ=ON_CPU_TRAINER, in_use=in_use)
    first = 1 if in_use == {0} else 0
    assert made == (EngineOptions(has_gpu=True, gpu_first=first, extra=("--x",)),)


def test_a_lane_without_a_gpu_left_is_refused_with_who_has_them() -> None:
    on_gpu = {"FORGEMQ_TRAINER_DEVICE": "cuda:0"}
    with pytest.raises(
        MachineError,
        match=r"^this machine shows 4 GPUs, of which the run's engines have 2 and a trainer on "
        r"FORGEMQ_TRAINER_DEVICE=cuda:0 1; another lane needs 4, .*: remove a lane, or name",
    ):
        options_of_engines(alone(2, run_with(WIDE)), gpus=4, environ=on_gpu, in_use={1, 2})


def test_a_mixture_of_experts_is_refused_for_a_pair_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 8}')
    run = run_with(PAIR, model=str(tmp_path))
    with pytest.raises(MachineError, match=r"^lanes\.prefill must be left out for a mixture"):
        servers(run, folder=tmp_path, environ={}, addresses=())


def test_without_gpus_the_processes_of_an_engine_share_the_cpu() -> None:
    (made,) = options_of_engines(run_with(WIDE), gpus=0, environ={})
    assert made == EngineOptions(
        tensor_parallel=4, expert_parallel=4, attention_data_parallel=2, has_gpu=False
    )


def test_lanes_beside_engines_of_somebody_else_are_refused() -> None:
    check_lanes_unnamed(RUN)
    with pytest.raises(MachineError, match=r"^lanes must be left out if FORGEMQ_ENGINE_URL"):
        check_lanes_unnamed(run_with(WIDE))


def test_the_inference_process_of_a_pair_is_told_of_both_engines(tmp_path: Path) -> None:
    addresses = msgspec.structs.replace(
        ADDRESSES, engine_urls=("http://d", "http://u"), prefill_urls=("http://p", "")
    )
    specs = service_specs(
        services_run(PLAYED), folder=RunFolder(tmp_path), addresses=addresses, environ={}
    )
    prefill = {
        spec.name: spec.environ.get("FORGEMQ_INFERENCE_PREFILL_URL")
        for spec in specs
        if spec.module == "forgemq_inference"
    }
    assert prefill == {"inference-0": "http://p", "inference-1": None}


def test_a_file_names_lanes_as_tables() -> None:
    text = """
        [[lanes]]
        count = 2
        flags = ["--mem-fraction-static=0.8"]

        [[lanes]]
        [lanes.prefill]
        [lanes.decode]
        flags = ["--max-total-tokens", "30000"]
    """
    values = document(FILE + text, overrides=["log.lanes=3"])
    made = configuration(values, run="desk-1", folder=Path("/work"))
    assert made.lanes == (
        LaneEngines(count=2, flags=("--mem-fraction-static=0.8",)),
        LaneEngines(
            prefill=RoleEngines(), decode=RoleEngines(flags=("--max-total-tokens", "30000"))
        ),
    )
