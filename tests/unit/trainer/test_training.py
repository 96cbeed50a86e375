"""Steps of training: the run's loss, its budget, and the errors that stop it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts import topics
from forgemq_contracts.run import Loss, RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.optimizer import NonFiniteGradientError
from forgemq_trainer.training import ReadStep, Training
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
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
        configuration = configuration_of(base, memory_budget_bytes=budget)
        training = Training(configuration, device="cpu", checkpoint=None)
        norms.append(training.train(_read(training, _trees())).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_budget_that_no_block_fits_stops_the_run_with_its_name(tmp_path: Path) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"), memory_budget_bytes=1000)
    training = Training(configuration, device="cpu", checkpoint=None)
    with pytest.raises(ValueError, match=r"memory_budget_bytes is 1000, .* needs at most"):
        training.train(_read(training, _trees()))


def test_only_the_next_step_trains(tmp_path: Path) -> None:
    training = Training(
        configuration_of(save_base(tmp_path / "base")), device="cpu", checkpoint=None
    )
    with pytest.raises(ValueError, match="version 0 trains step 0, got 1"):
        training.train(_read(training, _trees(), step=1))


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    training = Training(
        configuration_of(save_base(tmp_path / "base")), device="cpu", checkpoint=None
    )
    with torch.no_grad():
        next(iter(training.model.parameters()))[7, 0] = float("inf")
    with pytest.raises(NonFiniteGradientError):
        training.train(_read(training, _trees()))
    assert training.version == 0


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
