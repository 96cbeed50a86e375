"""What a real engine holds after a fast path is compared with what was published."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forgemq_contracts.arrays import unpack_floats, unpack_ids
from forgemq_contracts.weight_buckets import tensor_specs
from forgemq_contracts.weight_samples import PARAMETERS_MAX, parameters
from forgemq_contracts.weights import RelayedLane, SampledParameter
from forgemq_trainer.samples import sampled_parameters
from tests.integration.test_weights_engine import (
    CONTEXT,
    logprobs,
    perturbed,
    publisher,
    serving_scene,
    spans,
)
from tests.lane_scene import LaneScene
from tests.relay_sender import relay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

KEY = "r-1.1"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def trained(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(engine_model, tmp_path_factory.mktemp("trained"), seed=1)


def every_parameter(folder: Path) -> tuple[SampledParameter, ...]:
    file = folder / "model.safetensors"
    found = sampled_parameters(file, key=KEY, count=10_000)
    assert len(found) == len(parameters(tensor_specs(file.read_bytes())))
    assert {"model.layers.0.self_attn.qkv_proj.weight", DOWN} < {each.name for each in found}
    return found


def spoiled(folder: Path, target: Path, *, tensor: str) -> Path:
    """The same weights with one wrong value."""
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    weights[tensor].view(-1)[7] += 0.25
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def check_serves(scene: LaneScene, model: Path) -> None:
    """What the lane samples has the log-probabilities of this model, under version 1."""
    await scene.request(1, CONTEXT, max_tokens=20)
    (record,) = await scene.finished(count=1)
    assert spans(record)[0][2:] == (1, 1)
    expected = logprobs(model, CONTEXT + unpack_ids(record.output), first=len(CONTEXT))
    assert unpack_floats(record.logprobs) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    "tensor", [DOWN, "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"]
)
async def test_a_bucket_with_a_wrong_value_is_found_and_the_durable_copy_is_loaded(
    base_engine_url: str, engine_model: Path, trained: Path, tmp_path: Path, tensor: str
) -> None:
    """The trainer's process broadcasts another file than the one that it published."""
    sent = spoiled(trained, tmp_path / "sent", tensor=tensor)
    async with (
        serving_scene(base_engine_url, engine_model) as scene,
        publisher(sent, "send") as trainer,
    ):
        offers = await trainer.offer()
        sampled = every_parameter(trained)
        await scene.publish(trained, version=1, fast_paths=offers, sampled=sampled)
        await trainer.send()
        assert await trainer.result() == {"0": ""}
        _, loaded = await scene.loaded(count=2, timeout_s=60)
        await check_serves(scene, trained)
    assert (loaded.path, loaded.version) == ("durable", 1)
    held = tensor.replace("k_proj", "qkv_proj")
    assert [event["tensor"] for event in scene.events_named("wrong_tensor")] == [held]
    (failed,) = scene.events_named("fast_path_failed")
    assert failed["error"] == f"holds other bytes than were sent: {held}"
    assert scene.events_named("read_back_off") == []


async def test_every_parameter_that_arrives_whole_is_found_equal_by_broadcast_and_by_relay(
    base_engine_url: str, engine_model: Path, trained: Path
) -> None:
    async with (
        serving_scene(base_engine_url, engine_model) as scene,
        publisher(trained, "send") as trainer,
    ):
        offers = await trainer.offer()
        sampled = every_parameter(trained)
        await scene.publish(trained, version=1, fast_paths=offers, sampled=sampled)
        await trainer.send()
        await scene.loaded(count=2, timeout_s=60)
        await check_serves(scene, trained)
        address = (await scene.report(is_serving=True)).weights_address
        await relay(engine_model, [address], version=2)
        to_us, sampled = (RelayedLane(lane=0, epoch=1),), every_parameter(engine_model)
        await scene.publish(engine_model, version=2, relayed_to=to_us, sampled=sampled)
        *_, broadcast, relayed = await scene.loaded(count=3, timeout_s=60)
    assert (broadcast.path, relayed.path) == ("fast", "fast")
    for event in ("wrong_tensor", "read_back_off", "fast_path_failed", "relay_failed"):
        assert scene.events_named(event) == []


async def test_an_engine_that_holds_the_durable_copy_otherwise_is_not_asked_again(
    base_engine_url: str, engine_model: Path, trained: Path
) -> None:
    """As one with another dtype, or quantised weights: it costs one durable load."""
    down = next(each for each in every_parameter(trained) if each.name == DOWN)
    sampled = (SampledParameter(name=DOWN, sha256=down.sha256[::-1]),)
    to_us = (RelayedLane(lane=0, epoch=1),)
    async with serving_scene(base_engine_url, engine_model) as scene:
        address = (await scene.report(is_serving=True)).weights_address
        for version, folder in ((1, trained), (2, engine_model)):
            await relay(folder, [address], version=version)
            await scene.publish(folder, version=version, relayed_to=to_us, sampled=sampled)
            loaded = await scene.loaded(count=version + 1, timeout_s=60)
            if version == 1:
                await check_serves(scene, trained)
    assert [each.path for each in loaded] == ["start", "durable", "fast"]
    assert len(scene.events_named("read_back_off")) == 1
    assert [event["weights"] for event in scene.events_named("wrong_tensor")] == ["1.1", "1.1"]


def test_a_version_samples_a_few_parameters_and_another_version_others(trained: Path) -> None:
    file = trained / "model.safetensors"
    samples = [
        {each.name for each in sampled_parameters(file, key=f"r-1.{version}")}
        for version in range(40)
    ]
    assert {len(names) for names in samples} == {PARAMETERS_MAX}
    assert all(sum("norm" in name for name in names) == 2 for names in samples)
    assert set().union(*samples) == {each.name for each in every_parameter(trained)}
