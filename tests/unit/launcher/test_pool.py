"""The pool that the launcher gives its engines."""

from pathlib import Path, PurePath

import msgspec
import pytest

from forgemq_contracts.pool import Pool
from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.upkeep.engine_servers import with_pool
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.pool import EnginePool
from tests.unit.launcher.test_configuration import FILE
from tests.unit.launcher.test_gpus import RUN

CPU = (EngineOptions(), EngineOptions())
GPU = (EngineOptions(has_gpu=True), EngineOptions(has_gpu=True, gpu_first=1))
OWN = Path("/runs/r/engine/pool")
STORE = Pool(storage="mooncake", extra_config="@/store.json", host_gb=8)


def given(options: tuple[EngineOptions, ...], pool: Pool | None) -> tuple[EngineOptions, ...]:
    return with_pool(options, msgspec.structs.replace(RUN, pool=pool), own_folder=OWN)


def test_all_engines_of_a_run_get_one_folder_which_is_the_runs_own_unless_named() -> None:
    assert given(CPU, None) == CPU
    own, named = (given(CPU, Pool(storage="file", folder=name)) for name in ("", "/shared"))
    assert [options.pool for options in own] == [EnginePool(storage="file", folder=str(OWN))] * 2
    assert [options.pool.folder for options in named if options.pool] == ["/shared"] * 2


def test_a_storage_for_gpus_is_refused_on_a_cpu_and_passed_on_otherwise() -> None:
    with pytest.raises(MachineError, match=r"^pool\.storage must be file .* got mooncake"):
        given(CPU, STORE)
    pool = EnginePool(storage="mooncake", extra_config="@/store.json", host_gb=8)
    assert given(GPU, STORE) == tuple(
        msgspec.structs.replace(options, pool=pool) for options in GPU
    )


def test_a_relative_folder_starts_at_the_folder_of_the_runs_file() -> None:
    overrides = ["pool.storage=file", "pool.folder=kv"]
    values = document(FILE, overrides=overrides)
    made = configuration(values, run="desk-1", folder=PurePath("/work"))
    assert made.pool == Pool(storage="file", folder="/work/kv")
