"""What the trainer publishes for engines that hold weights as 8-bit floats in blocks."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from forgemq_contracts import topics
from forgemq_contracts.lora import Lora
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep
from forgemq_fp8_blocks import quantise_model
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.families import UnsupportedModelError, check_supported
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.weights import SavedVersion
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    save_base,
    scheduled_step,
)

FILE = "model.safetensors"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}


def configuration(folder: Path, **sizes: int) -> RunConfiguration:
    made = configuration_of(save_base(folder / "base", **{**SIZES, **sizes}))
    return replace(made, model=replace(made.model, engine_quantization="fp8_blocks"))


def store_of(run: RunConfiguration, folder: Path) -> Store:
    return Store(
        TrainerSettings(folder=str(folder / "t")),
        blobs=str(folder / "blobs"),
        configuration=run,
        telemetry=Telemetry(service="trainer", stream=io.StringIO()),
        is_stopping=lambda: False,
    )


def trained_and_saved(store: Store, training: Training, *, step: int) -> SavedVersion:
    tree = merge(agent_samples(np.random.default_rng(step)), f"g-{step}")
    read = training.read(scheduled_step(step, [tree]), {tree.group_id: topics.encode(tree)})
    trained = TrainedStep(
        step=step,
        lineage=1,
        group_ids=(tree.group_id,),
        failed_group_ids=(),
        metrics=training.train(read),
        checkpoint_step=step,
        duration_s=0.0,
    )
    saved = store.keep_version(store.write_version(training, lineage=1))
    store.save_checkpoint(training, weights=saved.checkpointed, trained=trained, tree_positions=())
    return saved


@pytest.mark.slow
def test_merged_adapters_are_quantised_and_a_restarted_trainer_publishes_the_same_bytes(
    tmp_path: Path,
) -> None:
    """Its checkpoint has the adapter and no model, so it merges and quantises again."""
    run = replace(configuration(tmp_path), lora=Lora(rank=4, publish="merged"))
    store, training = store_of(run, tmp_path), Training(run, device="cpu", checkpoint=None)
    store.save_restored(training, None, lineage=1)
    saved = trained_and_saved(store, training, step=0)
    found = store_of(run, tmp_path).newest_checkpoint()
    assert found is not None
    assert not (found.folder / FILE).exists()
    again = Training(run, device="cpu", checkpoint=found)
    restored = store_of(run, tmp_path).save_restored(again, found, lineage=2)
    assert restored.weights.folder.name == "2.1"
    assert restored.weights.sha256 == saved.weights.sha256
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in load_file(saved.files[0]).values())


@pytest.mark.slow
def test_engines_get_8_bit_floats_and_the_checkpoint_keeps_the_weights_in_full(
    tmp_path: Path,
) -> None:
    run = configuration(tmp_path)
    store, training = store_of(run, tmp_path), Training(run, device="cpu", checkpoint=None)
    saved = [trained_and_saved(store, training, step=step) for step in range(2)]
    published = load_file(saved[1].files[0])
    assert {str(tensor.dtype) for tensor in published.values()} == {
        "torch.float32",
        "torch.float8_e4m3fn",
    }
    checkpoint = store.newest_checkpoint()
    assert checkpoint is not None
    full = load_file(checkpoint.folder / FILE)
    for name, parameter in training.model.named_parameters():
        assert torch.equal(full[name], parameter), name
    # Exactly what these weights give, and no more of them is kept in full than training needs.
    quantise_model(checkpoint.folder, tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == saved[1].files[0].read_bytes()
    assert [path.name for path in (tmp_path / "t" / "whole").iterdir()] == ["1.2"]
    assert saved[0].weights.sha256 != saved[1].weights.sha256


@pytest.mark.slow
def test_a_restarted_trainer_publishes_the_same_bytes_and_trains_from_the_weights_in_full(
    tmp_path: Path,
) -> None:
    run = configuration(tmp_path)
    store, training = store_of(run, tmp_path), Training(run, device="cpu", checkpoint=None)
    saved = trained_and_saved(store, training, step=0)
    again = store_of(run, tmp_path)
    checkpoint = again.newest_checkpoint()
    resumed = Training(run, device="cpu", checkpoint=checkpoint)
    for one, other in zip(training.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    restored = again.save_restored(resumed, checkpoint, lineage=2)
    assert restored.weights.folder.name == "2.1"
    assert restored.weights.sha256 == saved.weights.sha256


def test_version_0_is_what_engines_begin_with(tmp_path: Path) -> None:
    run = configuration(tmp_path)
    store, training = store_of(run, tmp_path), Training(run, device="cpu", checkpoint=None)
    saved = store.save_restored(training, None, lineage=1)
    quantise_model(tmp_path / "base", tmp_path / "begun")
    assert saved.files[0].read_bytes() == (tmp_path / "begun" / FILE).read_bytes()


def test_a_model_without_whole_blocks_is_refused_by_the_field(tmp_path: Path) -> None:
    run = configuration(tmp_path, hidden_size=64, head_dim=16)
    store, training = store_of(run, tmp_path), Training(run, device="cpu", checkpoint=None)
    with pytest.raises(SettingsError, match=r"^model\.engine_quantization fp8_blocks: none of 14"):
        store.save_restored(training, None, lineage=1)


def test_a_base_model_that_is_quantised_itself_is_refused_by_its_format() -> None:
    config = SimpleNamespace(model_type="qwen3", quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedModelError, match=r"^quantization_config must .* 'awq'"):
        check_supported(config)
