"""The model with which a run's engines begin."""

import json
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.run import Model, RunConfiguration
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.model_folder import check_model_folder
from forgemq_launcher.upkeep.engine_model import model_of_engines, write_engine_model
from forgemq_launcher.upkeep.engine_servers import check_quantization
from forgemq_launcher.upkeep.machine import MachineError
from forgemq_sglang_cpu.options import EngineOptions, has_fp8_blocks
from tests.engine_fixture import ENGINE_MODEL
from tests.unit.launcher.test_gpus import RUN


def run_with(model: Path, named: str = "fp8_blocks") -> RunConfiguration:
    made = Model(path=str(model), engine_quantization=named)
    return msgspec.structs.replace(RUN, model=made)


def test_engines_begin_with_the_model_itself_unless_the_run_names_a_format(tmp_path: Path) -> None:
    assert model_of_engines(run_with(Path("/m"), "none"), folder=tmp_path) == Path("/m")
    write_engine_model(run_with(Path("/m"), "none"), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_in_8_bit_blocks_is_written_once_for_all_engines(tmp_path: Path) -> None:
    run = run_with(ENGINE_MODEL)
    write_engine_model(run, folder=tmp_path)
    folder = model_of_engines(run, folder=tmp_path)
    assert has_fp8_blocks((folder / "config.json").read_bytes())
    assert (folder / "tokenizer.json").is_file()
    written = (folder / "model.safetensors").stat()
    assert written.st_size < (ENGINE_MODEL / "model.safetensors").stat().st_size
    write_engine_model(run, folder=tmp_path)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["model-fp8_blocks"]


@pytest.mark.slow
def test_a_model_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(
        MachineError, match=r"^model\.engine_quantization fp8_blocks: .*config\.json"
    ):
        write_engine_model(run_with(tmp_path), folder=tmp_path / "engine")


def test_a_mixture_of_experts_in_8_bit_blocks_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 8}')
    run = run_with(tmp_path)
    check_quantization(run, [EngineOptions(has_gpu=True)])
    check_quantization(run_with(tmp_path, "none"), [EngineOptions()])
    with pytest.raises(MachineError, match=r"^model\.engine_quantization must be none for a mix"):
        check_quantization(run, [EngineOptions()])


def test_a_family_that_no_test_has_written_in_8_bits_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(MachineError, match="must be none for a model of type deepseek_v3"):
        check_quantization(run, [EngineOptions(has_gpu=True)])


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "mxfp4", "compressed-tensors"])
def test_a_base_model_that_is_quantised_itself_is_refused_by_its_format(
    tmp_path: Path, method: str
) -> None:
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigurationError, match=rf"^model\.path: .* is quantised itself .*{method}\)"
    ):
        check_model_folder(tmp_path)
