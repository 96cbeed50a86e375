"""Steps of training: the run's loss, its budget, and the errors that stop it."""

import dataclasses
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import Optimizer, RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.loss import Entries
from forgemq_trainer.training import DivergedTrainingError, ReadStep, Training
from tests.unit.trainer.rank_life import Life, save_checkpoint, store_of
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    make_sample,
    merge,
    save_base,
    scheduled_step,
)


def _trees() -> list[MergedTree]:
    generator = np.random.default_rng(0)
    return [merge(agent_samples(generator), f"g-{n}") for n in range(3)]


def _read(training: Training, trees: list[MergedTree], step: int = 0) -> ReadStep:
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    return training.read(scheduled_step(step, trees), values)


def _with(configuration: RunConfiguration, **changes: object) -> RunConfiguration:
    return msgspec.structs.replace(configuration, **changes)


def shallow(base: Path, **trainer: object) -> RunConfiguration:
    """A run whose contexts have at most 64 tokens."""
    configuration = configuration_of(base, **trainer)
    model = msgspec.structs.replace(configuration.model, context_tokens_max=64)
    return _with(configuration, model=model)


def line_tree(tokens: int, *, group: str = "g-0", advantage: float = 1.0) -> MergedTree:
    """One sample of this many tokens, all but the first sampled."""
    generator = np.random.default_rng(tokens)
    drawn = generator.integers(1, 61, tokens).tolist()
    sample = make_sample(drawn[:1], drawn[1:], generator)
    return merge([dataclasses.replace(sample, advantage=advantage)], group)


def _weights_after(configuration: RunConfiguration) -> torch.Tensor:
    training = Training(configuration, device="cpu", checkpoint=None)
    training.train(_read(training, _trees()))
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def test_a_run_may_name_a_users_loss(tmp_path: Path) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"))
    user = _with(configuration, loss=Loss(kind="tests.unit.trainer.scene:reinforce"))
    training = Training(user, device="cpu", checkpoint=None)
    metrics = training.train(_read(training, _trees()))
    assert metrics.capped_share == 0
    capless = _with(configuration, loss=Loss(ratio_cap=1e9))
    assert not torch.equal(_weights_after(user), _weights_after(capless))


def test_a_small_budget_changes_the_blocks_and_not_the_gradient(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    norms = []
    for budget in (8_000_000_000, 1_000_000):
        configuration = shallow(base, memory_budget_bytes=budget)
        training = Training(configuration, device="cpu", checkpoint=None)
        norms.append(training.train(_read(training, _trees())).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_budget_below_an_episode_of_the_longest_context_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"), memory_budget_bytes=1000)
    with pytest.raises(SettingsError, match=r"is 1000; .*context_tokens_max = 512 .* needs (\d+)"):
        Training(configuration, device="cpu", checkpoint=None)


def test_a_tree_over_the_budget_fails_its_group_and_not_the_run(tmp_path: Path) -> None:
    """The least budget for contexts of 64 tokens; one tree is deeper than that."""
    base = save_base(tmp_path / "base")
    with pytest.raises(SettingsError) as refused:
        Training(shallow(base, memory_budget_bytes=1), device="cpu", checkpoint=None)
    least = int(re.findall(r"needs (\d+)", str(refused.value))[0])
    run = shallow(base, memory_budget_bytes=least)
    training = Training(run, device="cpu", checkpoint=None)
    read = _read(training, [line_tree(2000, group="g-1"), line_tree(40)])
    assert [group for group, _ in read.failed] == ["g-1"]
    assert f"trainer.memory_budget_bytes is {least}" in read.failed[0][1]
    assert training.train(read).loss_tokens == 39
    assert training.version == 1


def test_only_the_next_step_trains(tmp_path: Path) -> None:
    training = Training(
        configuration_of(save_base(tmp_path / "base")), device="cpu", checkpoint=None
    )
    with pytest.raises(ValueError, match="version 0 trains step 0, got 1"):
        training.train(_read(training, _trees(), step=1))


def poisoned(logprob: torch.Tensor, entries: Entries) -> torch.Tensor:
    """A loss that is not a number if an advantage is above 90."""
    return -entries.advantage * logprob * torch.where(entries.advantage > 90, torch.nan, 1.0)


def _weights(training: Training) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def test_a_gradient_that_is_not_finite_skips_its_step_and_is_counted(tmp_path: Path) -> None:
    configuration = _with(
        configuration_of(save_base(tmp_path / "base")),
        loss=Loss(kind="tests.unit.trainer.test_training:poisoned"),
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    good, bad = line_tree(40), line_tree(40, advantage=99.0)
    before = _weights(training)
    metrics = training.train(_read(training, [bad]))
    assert (metrics.skipped_in_a_row, metrics.grad_norm) == (1, 0.0)
    assert torch.equal(_weights(training), before)
    assert training.version == 1
    metrics = training.train(_read(training, [good], step=1))
    assert metrics.skipped_in_a_row == 0
    assert metrics.grad_norm > 0, "the bad step left nothing behind"
    assert not torch.equal(_weights(training), before)
    other = Training(configuration, device="cpu", checkpoint=None)
    other.version = 1
    other.train(_read(other, [good], step=1))
    assert torch.equal(_weights(training), _weights(other))


def test_too_many_steps_in_a_row_without_a_finite_gradient_end_the_run(tmp_path: Path) -> None:
    configuration = _with(
        configuration_of(save_base(tmp_path / "base")),
        loss=Loss(kind="tests.unit.trainer.test_training:poisoned"),
        optimizer=Optimizer(lr=0.01, skipped_in_a_row_max=2),
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    bad = line_tree(40, advantage=99.0)
    for step in range(2):
        assert training.train(_read(training, [bad], step=step)).skipped_in_a_row == step + 1
    with pytest.raises(DivergedTrainingError, match="3 steps in a row up to step 2") as ended:
        training.train(_read(training, [bad], step=2))
    assert training.version == 2
    # Status 2, with which nothing restarts it: the next life would train the same step.
    assert isinstance(ended.value, SettingsError)


def test_a_restart_goes_on_counting_the_steps_that_were_skipped(tmp_path: Path) -> None:
    life = Life(tmp_path, ())
    save_base(tmp_path / "base")
    configuration = _with(
        life.configuration(world_size=1),
        loss=Loss(kind="tests.unit.trainer.test_training:poisoned"),
        optimizer=Optimizer(lr=0.01, skipped_in_a_row_max=1),
    )
    store, bad = store_of(tmp_path, configuration), line_tree(40, advantage=99.0)
    training = Training(configuration, device="cpu", checkpoint=None)
    save_checkpoint(store, training, training.train(_read(training, [bad])))
    later = Training(configuration, device="cpu", checkpoint=store.newest_checkpoint())
    with pytest.raises(DivergedTrainingError, match="2 steps in a row up to step 1"):
        later.train(_read(later, [bad], step=1))


def test_tokens_outside_the_vocabulary_fail_their_group(tmp_path: Path) -> None:
    training = Training(
        configuration_of(save_base(tmp_path / "base")), device="cpu", checkpoint=None
    )
    good, bad = _trees()[:2]
    tokens = np.frombuffer(bad.tokens, "<i4").copy()
    tokens[-1] = 64
    bad = msgspec.structs.replace(bad, tokens=tokens.tobytes())
    read = _read(training, [good, bad])
    assert read.failed == (("g-1", "tokens: ids must be in 0..63"),)
    assert [group.group_id for group in read.groups] == ["g-0"]


def test_normalisation_by_group_changes_the_weights(tmp_path: Path) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"))
    by_group = _with(configuration, loss=Loss(normalisation="group"))
    assert not torch.equal(_weights_after(configuration), _weights_after(by_group))


def test_group_tokens_leave_no_length_in_the_loss(tmp_path: Path) -> None:
    """The loss is the sum over entries by 3 groups * 512 tokens, however many entries there are."""
    configuration = configuration_of(save_base(tmp_path / "base"))
    losses = {}
    for loss in (Loss(), Loss(group_tokens=512)):
        training = Training(_with(configuration, loss=loss), device="cpu", checkpoint=None)
        losses[loss.group_tokens] = training.train(_read(training, _trees()))
    by_step, constant = losses[None], losses[512]
    assert constant.loss * 3 * 512 == pytest.approx(by_step.loss * by_step.loss_tokens, rel=1e-6)
    assert constant.grad_norm * 3 * 512 == pytest.approx(
        by_step.grad_norm * by_step.loss_tokens, rel=1e-5
    )
