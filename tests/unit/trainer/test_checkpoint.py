"""Checkpoints on disk, intact and damaged ones."""

import hashlib
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.checkpoint import (
    OPTIMIZER_FILE,
    Checkpoint,
    DamagedCheckpointError,
    OtherRunError,
    checkpoints,
)
from forgemq_trainer.storage.folders import file_sha256, write_folder
from forgemq_trainer.storage.weights import WEIGHTS_FILE
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from tests.unit.trainer.rank_life import optimizer_tensors
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    make_model,
    merge,
    save_base,
    scheduled_step,
)


def _store(folder: Path, configuration: RunConfiguration) -> Store:
    return Store(
        TrainerSettings(folder=str(folder / "t")),
        blobs=str(folder / "blobs"),
        configuration=configuration,
        telemetry=Telemetry(service="trainer", stream=io.StringIO()),
        is_stopping=lambda: False,
    )


def _trained_store(
    folder: Path, *, steps: int, reference_weight: float = 0.0
) -> tuple[Store, Training]:
    configuration = msgspec.structs.replace(
        configuration_of(save_base(folder / "base"), checkpoints_kept=9),
        loss=Loss(reference_weight=reference_weight),
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    store = _store(folder, configuration)
    store.save_restored(training, None, lineage=1)
    generator = np.random.default_rng(0)
    for step in range(steps):
        tree = merge(agent_samples(generator), f"g-{step}")
        values = {tree.group_id: topics.encode(tree)}
        read = training.read(scheduled_step(step, [tree]), values)
        trained = TrainedStep(
            step=step,
            lineage=1,
            group_ids=(tree.group_id,),
            failed_group_ids=(),
            metrics=training.train(read),
            checkpoint_step=step,
            duration_s=0.0,
        )
        weights = store.keep_version(store.write_version(training, lineage=1)).weights
        store.save_checkpoint(
            training, weights=weights, trained=trained, tree_positions=((0, step), (1, 4))
        )
    return store, training


def test_a_checkpoint_holds_the_model_the_optimizer_and_its_step(tmp_path: Path) -> None:
    store, training = _trained_store(tmp_path, steps=2)
    found = store.newest_checkpoint()
    assert found is not None
    assert (found.step, found.record.tree_positions) == (1, ((0, 1), (1, 4)))
    state = optimizer_tensors(training)
    saved = found.optimizer_state()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    model = AutoModelForCausalLM.from_pretrained(found.folder, local_files_only=True)
    ours = dict(training.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, ours[name])


def test_saving_what_was_restored_gives_the_same_bytes(tmp_path: Path) -> None:
    store, _ = _trained_store(tmp_path, steps=1)
    found = store.newest_checkpoint()
    assert found is not None
    configuration = configuration_of(tmp_path / "base", checkpoints_kept=9)
    restored = Training(configuration, device="cpu", checkpoint=found)
    assert restored.version == 1
    weights = store.keep_version(store.write_version(restored, lineage=2)).weights
    assert weights.sha256 == found.record.weights_sha256


def test_a_checkpoint_is_a_model_folder_whose_only_tensors_are_the_weights(tmp_path: Path) -> None:
    """SGLang reads every safetensors file of a model's folder, and dies of an optimizer's."""
    store, _ = _trained_store(tmp_path, steps=1)
    found = store.newest_checkpoint()
    assert found is not None
    assert [path.name for path in found.folder.glob("*.safetensors")] == ["model.safetensors"]


def test_a_checkpoint_of_a_build_with_the_optimizer_beside_the_model_is_read(
    tmp_path: Path,
) -> None:
    store, training = _trained_store(tmp_path, steps=1)
    found = store.newest_checkpoint()
    assert found is not None
    (found.folder / OPTIMIZER_FILE).rename(found.folder / "optimizer.safetensors")
    (found.folder / OPTIMIZER_FILE).parent.rmdir()
    again = store.newest_checkpoint()
    assert again is not None
    state = again.optimizer_state()
    expected = optimizer_tensors(training)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("file", ["model.safetensors", OPTIMIZER_FILE, "trainer.json"])
def test_a_damaged_checkpoint_that_no_record_names_is_passed_over(
    tmp_path: Path, file: str
) -> None:
    store, _ = _trained_store(tmp_path, steps=2)
    damaged = tmp_path / "t" / "checkpoints" / "step-00000001" / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.unlink()  # Not overwritten: a hard link may share its bytes.
    damaged.write_bytes(data)
    found = store.newest_checkpoint()
    assert found is not None
    assert found.step == 0


def test_a_checkpoint_that_does_not_read_back_is_an_error_before_the_log_names_it(
    tmp_path: Path,
) -> None:
    store, training = _trained_store(tmp_path, steps=1)
    found = store.newest_checkpoint()
    assert found is not None
    weights = store.keep_version(store.write_version(training, lineage=1)).weights
    file = weights.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF  # As a failing disk does between a write and the next read.
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="step-00000000 does not read back"):
        store.save_checkpoint(
            training, weights=weights, trained=found.record.trained, tree_positions=()
        )


def test_a_checkpoint_of_a_build_whose_records_have_other_fields_is_read(tmp_path: Path) -> None:
    store, _ = _trained_store(tmp_path, steps=1)
    file = tmp_path / "t" / "checkpoints" / "step-00000000" / "trainer.json"
    sealed = json.loads(file.read_bytes())
    # What the run does not set is not there, as in the record of a build before the setting.
    assert not {"pool", "stages"} & set(sealed["record"]["configuration"])
    sealed["record"]["trained"]["added_later"] = 1
    written = msgspec.json.encode(sealed["record"])
    sealed["sha256"] = hashlib.sha256(written).hexdigest()
    file.write_bytes(msgspec.json.encode(sealed))
    found = store.newest_checkpoint()
    assert found is not None
    assert found.record.configuration.pool is None


def test_a_draft_that_a_crash_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    store, _ = _trained_store(tmp_path, steps=1)
    (tmp_path / "t" / "checkpoints" / ".step-00000001.draft").mkdir()
    found = store.newest_checkpoint()
    assert found is not None
    assert found.step == 0


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    _trained_store(tmp_path, steps=1)
    with pytest.raises(OtherRunError, match="of run r, this is other"):
        list(checkpoints(tmp_path / "t" / "checkpoints", run="other"))


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_a_checkpoint_is_not_resumed_near_another_model_than_its_run_started_from(
    tmp_path: Path, weight: float
) -> None:
    """Also if the run had no reference before, and after a life without one."""
    store, _ = _trained_store(tmp_path, steps=1, reference_weight=weight)
    first = store.newest_checkpoint()
    assert first is not None
    without = msgspec.structs.replace(first.record.configuration, loss=Loss())
    near = msgspec.structs.replace(without, loss=Loss(reference_weight=0.1))
    base = tmp_path / "base"
    started_from = file_sha256(base / WEIGHTS_FILE)
    assert first.record.reference_sha256 == started_from
    assert _store(tmp_path, near).newest_checkpoint() is not None
    save_base(base, initializer_range=0.1)
    again, training = _store(tmp_path, without), Training(without, device="cpu", checkpoint=first)
    weights = again.save_restored(training, first, lineage=2).weights
    trained = msgspec.structs.replace(first.record.trained, step=1, lineage=2)
    again.save_checkpoint(training, weights=weights, trained=trained, tree_positions=())
    second = again.newest_checkpoint()
    assert second is not None
    assert (second.step, second.record.reference_sha256) == (1, started_from)
    with pytest.raises(SettingsError, match=rf"the reference .* sha256 {started_from}, and .*base"):
        _store(tmp_path, near).newest_checkpoint()


def test_a_folder_is_whole_or_absent_and_nothing_stays_of_half_of_one(tmp_path: Path) -> None:
    folder = tmp_path / "x"

    def half(draft: Path) -> None:
        (draft / "a").write_text("a")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_folder(folder, half)
    assert list(tmp_path.iterdir()) == []
    write_folder(folder, lambda draft: (draft / "a").write_text("b") and None)
    assert (folder / "a").read_text() == "b"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_restores_the_random_state(tmp_path: Path) -> None:
    store, _ = _trained_store(tmp_path, steps=1)
    found = store.newest_checkpoint()
    assert isinstance(found, Checkpoint)
    expected = torch.rand(3)
    torch.rand(5)
    torch.set_rng_state(found.random_state())
    assert torch.equal(torch.rand(3), expected)


def test_weights_are_named_as_the_base_file_names_them(tmp_path: Path) -> None:
    store, training = _trained_store(tmp_path, steps=1)
    weights = store.keep_version(store.write_version(training, lineage=1)).weights
    base = load_file(tmp_path / "base" / "model.safetensors")
    saved = load_file(weights.folder / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {
        n: (t.shape, t.dtype) for n, t in base.items()
    }


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_engines_get_a_base_model_in_one_file_also_if_it_comes_in_shards(
    tmp_path: Path, shard_size: str
) -> None:
    base = tmp_path / "base"
    model = make_model("qwen3", torch.float32)
    model.save_pretrained(base, max_shard_size=shard_size)
    is_whole = (base / "model.safetensors").exists()
    assert is_whole == (shard_size == "1GB")
    configuration = configuration_of(base)
    store = Store(
        TrainerSettings(folder=str(tmp_path / "t")),
        blobs=str(tmp_path / "blobs"),
        configuration=configuration,
        telemetry=Telemetry(service="trainer", stream=io.StringIO()),
        is_stopping=lambda: False,
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    published = store.save_restored(training, None, lineage=1).weights
    assert (published.folder == base) == is_whole
    names = {path.name for path in published.folder.iterdir()}
    assert {name for name in names if "model" in name} == {"model.safetensors"}
    saved, own = load_file(published.folder / "model.safetensors"), model.state_dict()
    assert all(torch.equal(saved[name], own[name]) for name in saved)
