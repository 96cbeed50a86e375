"""Which GPUs the engines of a run take, and what is refused before one starts."""

import msgspec
import pytest

from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.core.gpus import engine_gpus, least_free_bytes, visible_gpus
from forgemq_launcher.upkeep.engine_servers import options_of_engines
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_sglang_cpu.options import EngineOptions

RUN = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="m"),
    queues=(Queue(domain="d", task_source="m:f", agent="m:g"),),
    trainer=Trainer(steps=1, world_size=2),
    log=LogLayout(lanes=2),
)


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        ("cpu", 1, (0, 1)),
        ("cpu", 2, (0, 1)),
        ("cuda", 1, (1, 2)),
        ("cuda", 2, (2, 3)),
        ("cuda:1", 1, (0, 2)),
    ],
)
def test_engines_take_the_first_gpus_that_the_trainer_leaves(
    device: str, ranks: int, expected: tuple[int, ...]
) -> None:
    assert engine_gpus([1, 1], gpus=4, trainer_device=device, ranks=ranks) == expected


def test_too_few_gpus_are_refused_with_both_numbers_and_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"shows 2 GPUs; the run's 2 engines need 2, .* takes 1"):
        engine_gpus([1, 1], gpus=2, trainer_device="cuda", ranks=1)
    assert engine_gpus([1], gpus=2, trainer_device="cuda", ranks=1) == (1,)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0, 3", 2), ("1,-1,2", 1), ("0,1,2,3,4", 4)],
)
def test_gpus_are_counted_as_cuda_reads_its_variable(variable: str | None, expected: int) -> None:
    assert visible_gpus(4, cuda_visible_devices=variable) == expected


GPUS = "GPU-aa11, 80000\nGPU-bb22, 500\nGPU-cc33, 70000\n"


@pytest.mark.parametrize(
    ("variable", "free_mib"),
    [
        (None, 500),
        ("0", 80_000),
        ("0, 2", 70_000),
        ("GPU-cc,GPU-aa11", 70_000),
        ("2,-1,1", 70_000),
        ("0,9,1", 80_000),
    ],
)
def test_only_gpus_that_are_visible_count_for_the_least_free_memory(
    variable: str | None, free_mib: int
) -> None:
    assert least_free_bytes(GPUS, cuda_visible_devices=variable) == free_mib * 2**20


@pytest.mark.parametrize("variable", ["", "-1", "MIG-dd44"])
def test_without_a_visible_gpu_no_free_memory_is_known(variable: str) -> None:
    assert least_free_bytes(GPUS, cuda_visible_devices=variable) is None


def test_each_lane_has_a_gpu_of_its_own_and_a_machine_without_one_serves_on_its_cpu() -> None:
    trainer_on_gpus = {"FORGEMQ_TRAINER_DEVICE": "cuda"}
    assert options_of_engines(RUN, gpus=4, environ=trainer_on_gpus) == (
        EngineOptions(has_gpu=True, gpu_first=2),
        EngineOptions(has_gpu=True, gpu_first=3),
    )
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert options_of_engines(RUN, gpus=0, environ={}) == (EngineOptions(),) * 2
    assert options_of_engines(RUN, gpus=4, environ=hidden) == (EngineOptions(),) * 2
    with pytest.raises(MachineError, match="FORGEMQ_TRAINER_DEVICE=cuda takes 2 more"):
        options_of_engines(RUN, gpus=3, environ=trainer_on_gpus)
    one = msgspec.structs.replace(RUN, log=LogLayout(lanes=1))
    assert options_of_engines(one, gpus=3, environ=trainer_on_gpus)[0].gpu_first == 2


def test_every_engine_of_a_run_that_speculates_starts_with_its_head() -> None:
    run = msgspec.structs.replace(RUN, speculation=Speculation(head="/h", steps=2))
    expected = EngineOptions(head="/h", draft_steps=2)
    assert options_of_engines(run, gpus=0, environ={}) == (expected, expected)
    on_gpus = options_of_engines(run, gpus=4, environ={"FORGEMQ_TRAINER_DEVICE": "cuda"})
    assert [(each.gpu_first, each.head, each.draft_steps) for each in on_gpus] == [
        (2, "/h", 2),
        (3, "/h", 2),
    ]
