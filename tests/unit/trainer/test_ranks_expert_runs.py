"""Runs whose experts are spread over ranks: checkpoints for other numbers, and a reference."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from forgemq_contracts.loss import Loss
from forgemq_trainer.model import load_model
from forgemq_trainer.ranks.alone import ALONE
from forgemq_trainer.storage.checkpoint import checkpoint_at
from forgemq_trainer.storage.optimizer_state import RANDOM_STATE
from tests.unit.trainer.rank_life import Life, live, restored
from tests.unit.trainer.rank_scene import (
    START_DEADLINE_S,
    WORK_DEADLINE_S,
    RankPair,
    RankProcesses,
)
from tests.unit.trainer.scene import save_base
from tests.unit.trainer.test_ranks_experts import Tensors, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]


def _stored(life: Life, step: int) -> tuple[Tensors, Tensors]:
    """Weights and optimizer state of a checkpoint, by the model's names."""
    checkpoint = checkpoint_at(life.folder / f"trainer/checkpoints/step-{step:08d}", is_hashed=True)
    state = {RANDOM_STATE: checkpoint.random_state(), **checkpoint.optimizer_state()}
    return load_model(checkpoint.folder, dtype="float32").model.state_dict(), state


def _assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_checkpoint_continues_from_its_bytes_on_other_numbers_of_expert_ranks(
    tmp_path: Path, rank_pair: RankPair, four_ranks: RankProcesses
) -> None:
    """One rank; two with half of the experts each; four with a half, then with a quarter each.

    Then two replicas, each of two ranks with a half, and two ranks again.
    """
    changing, alone = (Life(tmp_path / name, (0,), is_routed=True) for name in ("many", "one"))
    for life in (changing, alone):
        save_base(life.folder / "base", kind="qwen3_moe")
    live(ALONE, changing)
    expected = live(ALONE, dataclasses.replace(alone, steps=(0, 1, 2, 3, 4, 5)))
    more: list[tuple[RankProcesses, int, int | None]] = [
        (rank_pair, 2, None),
        (four_ranks, 2, None),
        (four_ranks, 4, None),
        (four_ranks, 2, 2),
        (rank_pair, 2, None),
    ]
    for step, (processes, expert_ranks, shard_ranks) in enumerate(more, start=1):
        life = dataclasses.replace(
            changing, steps=(step,), expert_ranks=expert_ranks, shard_ranks=shard_ranks
        )
        weights, state = _stored(life, step - 1)
        (version, found_state), *_ = processes.run(restored, life)
        assert version.weights is not None
        _assert_equal(version.weights, weights)
        _assert_equal(found_state, state)
        shutil.rmtree(life.folder / "again")
        (seen,), *_ = processes.run(live, life)
        assert seen.loss_tokens == expected[step].loss_tokens
        assert seen.grad_norm == pytest.approx(expected[step].grad_norm, rel=1e-3)
    ours, theirs = (_stored(life, 5)[0] for life in (changing, alone))
    assert worst(ours, theirs) <= 1e-4


def test_a_run_with_spread_experts_stays_as_near_to_its_reference_as_on_one_rank(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    two, one = (
        Life(
            tmp_path / name,
            (0, 1),
            is_routed=True,
            loss=Loss(reference_weight=20.0),
            expert_ranks=2,
        )
        for name in ("two", "one")
    )
    for life in (two, one):
        save_base(life.folder / "base", kind="qwen3_moe")
    found, expected = rank_pair.run(live, two)[0], live(ALONE, one)
    assert [step.kl_reference for step in found] == pytest.approx(
        [step.kl_reference for step in expected], rel=1e-3, abs=1e-9
    )
    assert found[1].kl_reference > 1e-6
    ours, theirs = (_stored(life, 1)[0] for life in (two, one))
    assert worst(ours, theirs) <= 1e-4
