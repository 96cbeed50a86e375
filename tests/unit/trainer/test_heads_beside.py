"""A draft head beside several updates of a step, and beside adapters of a frozen policy."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch_allocation import peak_allocated_bytes

from forgemq_contracts.lora import Lora
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.updates import Updates
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.metrics import DraftMeasures
from forgemq_trainer.core.microbatches import path_microbatch, plan_step
from forgemq_trainer.core.minibatches import minibatches
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import prepare, with_adapters
from forgemq_trainer.ranks.alone import ALONE
from forgemq_trainer.step_updates import StepUpdates
from forgemq_trainer.storage.checkpoint import checkpoint_at
from forgemq_trainer.training import Training
from forgemq_trainer.whole_model import WholeModel
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.rank_life import Life, live, store_of
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    make_model,
    merge,
    save_base,
    scheduled_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

MERGED = Lora(rank=4, alpha=8.0, publish="merged")
STEPS = (0, 1, 2)
ADAPTER = "adapter/adapter_model.safetensors"


def _configuration(folder: Path, updates: Updates) -> RunConfiguration:
    return msgspec.structs.replace(
        configuration_of(save_base(folder / "base")),
        speculation=Speculation(head=str(save_head(folder / "head"))),
        updates=updates,
    )


def test_a_head_takes_an_update_with_each_of_the_policys(tmp_path: Path) -> None:
    """Three groups of unequal sizes in two minibatches, twice: four of the one and of the other."""
    configuration = _configuration(tmp_path, Updates(minibatches=2, passes=2))
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator, rollouts=2 + n, turns=2), f"g-{n}") for n in range(3)]
    groups, forests = scheduled_step(0, trees).groups, [read_tree(tree) for tree in trees]
    loss = loss_function(configuration.loss)
    model = WholeModel(configuration, None, device="cpu")
    updates = StepUpdates(model, configuration, groups=groups, forests=forests, loss=loss)
    updates.begin()
    taken = updates.take(lr=1e-3)

    one = WholeModel(configuration, None, device="cpu")
    assert one.head is not None
    assert model.head is not None
    parts: list[DraftMeasures] = []
    for part in 2 * minibatches(groups, count=2):
        own = [forests[group] for group in part]
        weights = group_loss_weights(own, loss=Loss())
        one.forward_backward(Objective(forests=own, loss_weights=weights, loss=loss))
        one.updater.update(lr=1e-3)
        measured = one.head.update()
        assert measured is not None
        parts.append(measured)
    ours, theirs = model.head.weights(), one.head.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = [part.rows for part in parts]
    assert len(set(rows)) == 2
    assert taken.draft is not None
    assert taken.draft.rows == sum(rows)
    assert taken.draft.loss == pytest.approx(np.average([p.loss for p in parts], weights=rows))
    assert taken.draft.overlap == pytest.approx(
        np.average([p.overlap for p in parts], weights=rows)
    )
    assert taken.draft.grad_norm == pytest.approx(np.mean([p.grad_norm for p in parts]))


def _life(folder: Path, **fields: object) -> Life:
    save_base(folder / "base")
    save_head(folder / "head")
    return Life(folder, STEPS, lora=MERGED, **fields)  # type: ignore[arg-type]


def _hashes(life: Life, step: int) -> dict[str, str]:
    folder = life.folder / f"trainer/checkpoints/step-{step:08d}"
    return checkpoint_at(folder, is_hashed=True).record.sha256_of_file()


def test_adapters_train_to_the_same_bytes_beside_a_head_as_without(tmp_path: Path) -> None:
    plain, guessing = (
        _life(tmp_path / name, has_head=name == "guessing") for name in ("plain", "guessing")
    )
    alone, beside = (live(ALONE, life) for life in (plain, guessing))
    assert [each.grad_norm for each in beside] == [each.grad_norm for each in alone]
    for step in STEPS:
        without, with_head = (_hashes(life, step) for life in (plain, guessing))
        assert with_head[ADAPTER] == without[ADAPTER]
        assert with_head.keys() - without.keys() == {
            "head/model.safetensors",
            "head/optimizer/state.safetensors",
        }
    assert len({_hashes(guessing, step)["head/model.safetensors"] for step in STEPS}) == len(STEPS)


def test_ranks_go_on_with_adapters_and_a_head_to_the_same_bytes(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    whole, broken = (_life(tmp_path / name, has_head=True) for name in ("whole", "broken"))
    found = rank_pair.run(live, whole)[0]
    for step in STEPS:
        rank_pair.run(live, dataclasses.replace(broken, steps=(step,)))
    assert [_hashes(broken, step) for step in STEPS] == [_hashes(whole, step) for step in STEPS]
    expected = live(ALONE, _life(tmp_path / "one", has_head=True))
    for ours, theirs in zip(found, expected, strict=True):
        for field in ("draft_loss", "draft_grad_norm", "draft_overlap"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-3), field


def test_a_restored_version_of_adapters_brings_its_head_between_two_pushes_too(
    tmp_path: Path,
) -> None:
    life = dataclasses.replace(_life(tmp_path, has_head=True), steps=STEPS[:1])
    live(ALONE, life)
    plain = life.configuration(world_size=1)
    assert plain.speculation is not None
    seldom = msgspec.structs.replace(plain.speculation, push_every_steps=2)
    configuration = msgspec.structs.replace(plain, speculation=seldom)
    store = store_of(tmp_path, configuration)
    checkpoint = store.newest_checkpoint()
    training = Training(configuration, device="cpu", checkpoint=checkpoint)
    assert store.write_version(training, lineage=2).head is None
    restored = store.save_restored(training, checkpoint, lineage=2)
    assert restored.version == 1
    assert restored.head is not None
    assert restored.head.sha256 == _hashes(life, 0)["head/model.safetensors"]


@pytest.mark.parametrize("way", ["kept", "blocks"])
def test_a_step_with_adapters_and_a_head_holds_at_most_the_predicted_bytes(
    tmp_path: Path, way: str
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = make_model("qwen3", torch.float32, num_hidden_layers=2, **sizes)
    loaded = with_adapters(prepare(model), MERGED)
    head, policy = with_draft_head(save_head(tmp_path, **sizes), loaded, top_k=16)
    samples = agent_samples(
        np.random.default_rng(0), rollouts=5, turns=4, prompt=60, act=20, observe=30, vocabulary=60
    )
    forest = read_tree(merge(samples, "g"))
    shape = policy.shape
    whole = shape.block_bytes(forest.token_count, chunk=32, is_carried=False)
    if way == "kept":
        (microbatch,) = plan_step([forest], shape=shape, budget_bytes=whole, head_chunk=32)
    else:
        microbatch = path_microbatch(
            0, forest, shape=shape, budget_bytes=int(0.6 * whole), head_chunk=32
        )
    assert (len(microbatch.blocks) > 1) == (way == "blocks")

    def run() -> None:
        forward_backward(
            policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [microbatch],
            head_chunk=32,
            drafting=Drafting(head.model, [forest], loss_weight=1.0),
        )

    run()  # Makes the parameters' gradients.
    peak = peak_allocated_bytes(run)
    if way == "blocks":  # States lie in files then, which torch counts too.
        peak -= 2 * forest.token_count * 128 * 4
    assert 0.8 * microbatch.predicted_bytes <= peak <= 1.03 * microbatch.predicted_bytes
