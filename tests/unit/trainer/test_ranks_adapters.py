"""Adapters on two ranks: the gradients and weights of one, in checkpoints that either reads."""

import dataclasses
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from forgemq_contracts.lora import ATTENTION_TARGETS, MLP_TARGETS, AdapterTarget, Lora
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_trainer.core.low_rank import factors_of
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.merge_adapter import merge_adapter
from forgemq_trainer.model import DTYPES
from forgemq_trainer.ranks.alone import ALONE
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharded_model import ShardedModel
from forgemq_trainer.ranks.sharding import whole_factors
from forgemq_trainer.storage.checkpoint import Checkpoint, checkpoint_at
from forgemq_trainer.storage.optimizer_state import RANDOM_STATE
from tests.unit.trainer.rank_life import Life, live, restored
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair
from tests.unit.trainer.scene import save_base
from tests.unit.trainer.test_low_rank import adapted
from tests.unit.trainer.test_ranks_updates import RankModel, begun
from tests.unit.trainer.test_step_updates import FOUR, OPTIMIZER, exact_configuration, exact_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

Tensors = dict[str, torch.Tensor]
STEPS = (0, 1, 2)


def _gradients(model: nn.Module) -> Tensors:
    """Whole gradients by name; collective if the model is sharded."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in found.items()
    }


def _of_two(
    ranks: Ranks,
    configuration: RunConfiguration,
    kind: str,
    targets: tuple[AdapterTarget, ...],
    is_shared: bool,
) -> tuple[Tensors, Tensors, int]:
    """Gradients of the first update, adapters after all, and how many parameters have moments."""
    whole = adapted(kind, torch.float64, *targets)
    mesh = ranks.mesh(ranks.world_size)
    model = RankModel(ranks, whole, configuration, is_shared=is_shared, mesh=mesh)
    updates = begun(model, configuration)
    gradients = _gradients(model.module)
    updates.take(lr=OPTIMIZER.lr)
    after = whole_factors(model.module, dtype=torch.float64, is_kept=True)
    trained = {name.partition("|")[0] for name in model.updater.parts()}
    return gradients, {name: factor.clone() for name, factor in after.items()}, len(trained)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own rounds", "shared rounds"])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", ATTENTION_TARGETS + MLP_TARGETS),
        ("qwen2", ("o_proj", "down_proj")),
        ("qwen3_moe", ATTENTION_TARGETS),
    ],
)
def test_two_ranks_have_the_gradients_and_adapters_of_one(
    tmp_path: Path,
    rank_pair: RankPair,
    kind: str,
    targets: tuple[AdapterTarget, ...],
    is_shared: bool,
) -> None:
    """In float64, over four updates of a step; nothing frozen has a gradient or moments."""
    base = save_base(tmp_path / "base")
    configuration = exact_configuration(base, FOUR, Loss())
    gradients, after, trained = rank_pair.run(_of_two, configuration, kind, targets, is_shared)[0]
    one = exact_model(base, configuration)
    loaded = adapted(kind, torch.float64, *targets)
    one.module, one.policy = loaded.model, loaded.policy
    one.updater = Updater(one.module, OPTIMIZER)
    updates = begun(one, configuration)
    expected = _gradients(one.module)
    assert len(expected) == trained == 2 * 2 * len(targets)  # Two factors in each of two layers.
    assert gradients.keys() == expected.keys()
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= 1e-12 * max(gradient.norm(), floor), name
    updates.take(lr=OPTIMIZER.lr)
    for name, factor in factors_of(one.module).items():
        assert (after[name] - factor).norm() <= 1e-12 * factor.norm(), name


def _checkpoint(life: Life, step: int) -> Checkpoint:
    return checkpoint_at(life.folder / f"trainer/checkpoints/step-{step:08d}", is_hashed=True)


def _adapter(life: Life, step: int) -> Tensors:
    return load_file(_checkpoint(life, step).adapter_folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("publish", "dtype", "kind"),
    [
        ("merged", "float32", "qwen3"),
        ("adapter", "bfloat16", "qwen3"),
        ("merged", "float32", "qwen3_moe"),
    ],
)
def test_the_number_of_ranks_that_train_adapters_may_change_between_two_lives(
    tmp_path: Path,
    rank_pair: RankPair,
    publish: Literal["adapter", "merged"],
    dtype: Literal["float32", "bfloat16"],
    kind: str,
) -> None:
    """One rank, two, one: restored state is equal to the byte, later steps within rounding.

    Two ranks of a mixture hold half of its experts each.
    """
    lora, is_mixture = Lora(rank=3, alpha=6.0, publish=publish), kind == "qwen3_moe"
    if is_mixture:
        lora = msgspec.structs.replace(lora, targets=ATTENTION_TARGETS)
    alone, changing = (
        Life(
            tmp_path / name,
            STEPS,
            dtype,
            is_routed=is_mixture,
            lora=lora,
            expert_ranks=1 + is_mixture,
        )
        for name in ("one", "two")
    )
    for life in (alone, changing):
        save_base(life.folder / "base", kind=kind)
    live(ALONE, alone)
    live(ALONE, dataclasses.replace(changing, steps=(0,)))
    (version, state), _ = rank_pair.run(restored, changing)
    first = _checkpoint(changing, 0)
    adapter, stored = _adapter(changing, 0), dict(first.optimizer_state())
    assert version.adapter.keys() == adapter.keys()
    assert all(torch.equal(version.adapter[name], adapter[name]) for name in adapter)
    assert state.keys() - stored.keys() == {RANDOM_STATE}
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    rank_pair.run(live, dataclasses.replace(changing, steps=(1,)))
    _check_published(changing, version=2)
    live(ALONE, dataclasses.replace(changing, steps=(2,)))
    for name, expected in _adapter(alone, 2).items():
        assert expected.dtype == DTYPES[dtype]
        difference = (_adapter(changing, 2)[name] - expected).norm()
        assert difference <= (1e-5 if dtype == "float32" else 3e-2) * expected.norm(), name


def _check_published(life: Life, *, version: int) -> None:
    """What two ranks published is their checkpoint's adapter, by itself or in the base model."""
    assert life.lora is not None
    (published,) = (life.folder / "blobs").rglob(f"1.{version}")
    adapter = _checkpoint(life, version - 1).adapter_folder
    if life.lora.publish == "adapter":
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (published / name).read_bytes() == (adapter / name).read_bytes()
        return
    layers = 2 * len(life.lora.targets)
    assert merge_adapter(adapter, life.folder / "merged") == layers
    expected = load_file(life.folder / "merged/model.safetensors")
    found = load_file(published / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def _held(ranks: Ranks, life: Life) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype of each parameter that a rank holds, and the bytes of its part."""
    configuration = life.configuration(world_size=2)
    model = ShardedModel(configuration, None, ranks=ranks, device="cpu")
    held = {}
    for name, parameter in model.module.named_parameters():
        assert isinstance(parameter, DTensor)
        held[name] = (parameter.dtype, parameter.to_local().nbytes)
    return held


def test_ranks_hold_frozen_weights_in_the_models_dtype_and_adapters_as_masters(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    """Together they hold each once."""
    life = Life(tmp_path, (), "bfloat16", lora=Lora(rank=3))
    save_base(tmp_path / "base")
    first, second = rank_pair.run(_held, life)
    whole = adapted("qwen3", torch.bfloat16, *ATTENTION_TARGETS, *MLP_TARGETS)
    for name, parameter in whole.model.named_parameters():
        dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert first[name][0] == second[name][0] == dtype
        assert first[name][1] + second[name][1] == parameter.numel() * dtype.itemsize
