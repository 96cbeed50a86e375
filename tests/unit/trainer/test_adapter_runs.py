"""The trainer as a service in a run with adapters: what it publishes, and where it goes on."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forgemq_contracts.lora import Lora
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.trees import MergedTree
from forgemq_settings.environment import SettingsError
from forgemq_trainer.merge_adapter import MergeError, merge_adapter
from forgemq_trainer.storage.folders import file_sha256
from tests.unit.trainer.bench import Bench, memory_bench
from tests.unit.trainer.scene import agent_samples, make_model, merge, scheduled_step

Publish = Literal["adapter", "merged"]
ADAPTER = "adapter/adapter_model.safetensors"
STATE = "optimizer/state.safetensors"


async def adapter_bench(folder: Path, publish: Publish, *, steps: int = 2) -> Bench:
    """So many steps are scheduled, over two trees each."""
    bench = await memory_bench(folder, checkpoints_kept=9)
    lora = Lora(rank=4, alpha=8.0, publish=publish)
    await bench.put_trees(TREES)
    await bench.put_steps([step(number) for number in range(steps)])
    configuration = msgspec.structs.replace(bench.configuration, lora=lora)
    return replace(bench, configuration=configuration)


def step(number: int) -> ScheduledStep:
    return scheduled_step(number, TREES[2 * number : 2 * number + 2])


def checkpoint(bench: Bench, number: int) -> Path:
    return bench.folder / "checkpoints" / f"step-{number:08d}"


def _trees() -> tuple[MergedTree, ...]:
    generator = np.random.default_rng(0)
    return tuple(merge(agent_samples(generator), f"g-{number}") for number in range(4))


TREES = _trees()


@pytest.mark.slow
@pytest.mark.parametrize("publish", ["adapter", "merged"])
async def test_a_restart_continues_adapters_to_the_same_bytes(
    tmp_path: Path, publish: Publish
) -> None:
    files = []
    for is_restarted in (False, True):
        scheduled = 1 if is_restarted else 2
        bench = await adapter_bench(tmp_path / f"{scheduled}", publish, steps=scheduled)
        await bench.train(until=scheduled - 1)
        if is_restarted:
            await bench.put_steps([step(1)])
            await bench.train(until=1, lineage=2)
        last = checkpoint(bench, 1)
        files.append([(last / name).read_bytes() for name in (ADAPTER, STATE)])
        assert not list(last.glob("*.safetensors"))  # The base is there by its checksum alone.
    assert files[0] == files[1]


async def test_every_version_of_the_run_is_an_adapter_of_the_base(tmp_path: Path) -> None:
    """Also the first, which changes nothing; its state has moments of the factors alone."""
    bench = await adapter_bench(tmp_path, "adapter")
    await bench.train(until=1)
    base = Path(bench.configuration.model.path)
    published = await bench.published()
    assert [each.version for each in published] == [0, 1, 2]
    for each in published:
        assert (each.kind, each.fast_paths) == ("adapter", ())
        assert each.base_sha256 == file_sha256(base / "model.safetensors")
        assert each.sha256 == file_sha256(Path(each.uri) / "adapter_model.safetensors")
        factors = load_file(Path(each.uri) / "adapter_model.safetensors")
        assert len(factors) == 2 * 7 * 2  # Layers, targets, A and B.
        changes = any(bool(value.any()) for name, value in factors.items() if "lora_B" in name)
        assert changes == (each.version > 0)
    settings = msgspec.json.decode((Path(published[2].uri) / "adapter_config.json").read_bytes())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}
    assert settings.items() >= (expected | {"base_model_name_or_path": str(base)}).items()
    state = load_file(checkpoint(bench, 1) / STATE)
    moments = {name.rpartition("|")[0].rpartition(".")[2] for name in state if "|exp" in name}
    assert moments == {"a_RI", "b_OR"}


async def test_merged_versions_are_the_base_and_the_adapter_in_the_checkpoint(
    tmp_path: Path,
) -> None:
    bench = await adapter_bench(tmp_path, "merged")
    await bench.train(until=1)
    *_, newest = await bench.published()
    assert (newest.version, newest.kind) == (2, "full")
    found = load_file(Path(newest.uri) / "model.safetensors")
    base = load_file(Path(bench.configuration.model.path) / "model.safetensors")
    factors = load_file(checkpoint(bench, 1) / ADAPTER)
    assert found.keys() == base.keys()
    changed = 0
    for name, value in found.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        if key.format("A") not in factors:
            assert torch.equal(value, base[name])
            continue
        product = factors[key.format("B")] @ factors[key.format("A")]
        torch.testing.assert_close(value, base[name] + 2.0 * product, rtol=0, atol=1e-7)
        changed += not torch.equal(value, base[name])
    assert changed == 14


@pytest.mark.slow
async def test_the_merged_export_of_a_checkpoint_has_the_tensors_that_engines_were_given(
    tmp_path: Path,
) -> None:
    bench = await adapter_bench(tmp_path, "merged")
    await bench.train(until=1)
    *_, newest = await bench.published()
    adapter, exported = checkpoint(bench, 1) / "adapter", tmp_path / "exported"
    assert merge_adapter(adapter, exported) == 14
    given = load_file(Path(newest.uri) / "model.safetensors")
    found = load_file(exported / "model.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in found)
    assert sorted(os.listdir(exported)) == sorted(os.listdir(bench.configuration.model.path))
    with pytest.raises(MergeError, match="exists; name another folder"):
        merge_adapter(adapter, exported)
    with pytest.raises(MergeError, match="has no adapter"):
        merge_adapter(tmp_path, tmp_path / "other")


async def test_an_adapter_goes_on_only_with_its_own_base_model(tmp_path: Path) -> None:
    bench = await adapter_bench(tmp_path, "adapter", steps=1)
    await bench.train(until=0)
    torch.manual_seed(9)
    model = make_model("qwen3", torch.float32, initializer_range=0.2)
    model.save_pretrained(bench.configuration.model.path)  # type: ignore[operator]  # transformers' method
    with pytest.raises(ExceptionGroup) as raised:
        await bench.train(until=1, lineage=2)
    (error,) = raised.value.exceptions
    assert isinstance(error, SettingsError)
    assert str(error).startswith("model.path: the adapter in ")
