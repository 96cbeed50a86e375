"""A draft head on several ranks has the gradients, weights and checkpoints of one rank's."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.draft_loss import DraftTotals
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.rounds import forward_backward_rounds
from forgemq_trainer.core.step import Objective, forward_backward, forward_backward_together
from forgemq_trainer.core.team_plans import TeamPlans
from forgemq_trainer.core.traffic import Kept, passes_of
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.alone import ALONE
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard, whole_ends
from forgemq_trainer.storage.checkpoint import Checkpoint, checkpoint_at
from forgemq_trainer.storage.weights import WEIGHTS_FILE
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.rank_life import Life, live
from tests.unit.trainer.rank_peak import least_peak_bytes, settled
from tests.unit.trainer.rank_scene import (
    START_DEADLINE_S,
    WORK_DEADLINE_S,
    RankPair,
    RankProcesses,
)
from tests.unit.trainer.scene import (
    agent_samples,
    make_model,
    merge,
    save_base,
)
from tests.unit.trainer.team_scene import forests_of_teams, rounds_of_teams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
STEPS = (0, 1, 2)

Gradients = dict[str, torch.Tensor]


def _objective(forests: Sequence[Forest]) -> Objective:
    return Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=Loss()),
        loss=loss_function(Loss()),
    )


def _gradients(module: nn.Module) -> Gradients:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _of_rank(
    ranks: Ranks, folder: Path, kind: str, depths: int
) -> tuple[Gradients, Gradients, list[DraftTotals]]:
    """The head's gradients and sums of this rank, and the policy's whole gradients."""
    forests = forests_of_teams()
    model = make_model(kind, torch.float64)
    sharded = shard(prepare(model), ranks=ranks, dtype=torch.float64)
    head, policy = with_draft_head(
        folder,
        sharded,
        top_k=5,
        depths=depths,
        gather_ends=partial(whole_ends, model, dtype=torch.float64),
    )
    rounds = rounds_of_teams(forests, ranks.world_size)
    drafting = Drafting(head.model, forests, loss_weight=0.7)
    with sharded.gathering.update(Kept.NOTHING, backwards=passes_of(rounds).backwards):
        forward_backward_rounds(
            policy,
            _objective(forests),
            rounds,
            peers=ranks,
            head_chunk=CHUNK,
            drafting=drafting,
        )
    whole = {name: grad.full_tensor() for name, grad in _gradients(model).items()}  # type: ignore[attr-defined]  # DTensor
    return _gradients(head.layer), whole, drafting.totals


def _worst(ours: Gradients, theirs: Gradients) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


@pytest.mark.parametrize(("kind", "depths"), [("qwen3", 3), ("llama", 2)])
def test_the_gradients_of_a_head_on_ranks_add_up_to_those_of_one_rank(
    tmp_path: Path, ranks_of: tuple[int, RankProcesses], kind: str, depths: int
) -> None:
    """Qwen3's head is tied to the embedding here, and Llama's is not."""
    results = ranks_of[1].run(_of_rank, save_head(tmp_path), kind, depths)
    forests, loaded = forests_of_teams(), prepare(make_model(kind, torch.float64))
    head, policy = with_draft_head(tmp_path, loaded, top_k=5, depths=depths)
    assert policy.shape.is_head_tied == (kind == "qwen3")
    drafting = Drafting(head.model, forests, loss_weight=0.7)
    count = sum(forest.token_count for forest in forests)
    forward_backward(
        policy,
        _objective(forests),
        [Microbatch(groups=(0, 1, 2, 3), blocks=((0, count),))],
        head_chunk=CHUNK,
        drafting=drafting,
    )
    names = dict(head.layer.named_parameters())
    zeros = {name: torch.zeros_like(p) for name, p in names.items()}
    summed = {n: sum((own.get(n, zeros[n]) for own, _, _ in results), zeros[n]) for n in names}
    assert _worst(summed, _gradients(head.layer)) <= 1e-12
    assert _worst(results[0][1], _gradients(loaded.model)) <= 1e-12
    for depth in range(depths):
        found = sum((own[depth] for _, _, own in results), DraftTotals())
        assert found.rows == drafting.totals[depth].rows
        assert found.loss == pytest.approx(drafting.totals[depth].loss, rel=1e-12)
        assert found.overlap == pytest.approx(drafting.totals[depth].overlap, rel=1e-12)


def _life(folder: Path, *, kind: str = "qwen3", **fields: Any) -> Life:
    save_base(folder / "base", kind=kind)
    save_head(folder / "head")
    return Life(**({"folder": folder, "steps": STEPS, "has_head": True} | fields))


def _checkpoint(life: Life, step: int) -> Checkpoint:
    return checkpoint_at(life.folder / f"trainer/checkpoints/step-{step:08d}", is_hashed=True)


def _head(life: Life, step: int) -> dict[str, torch.Tensor]:
    """Its weights and its optimizer's state, as the checkpoint of a step has them."""
    checkpoint = _checkpoint(life, step)
    weights = load_file(checkpoint.head_folder / WEIGHTS_FILE)
    return {**weights, **checkpoint.head_optimizer_state()}


@pytest.mark.parametrize(
    ("kind", "dtype", "placed"),
    [
        ("qwen3", "float32", {}),
        ("qwen3", "bfloat16", {}),
        ("llama", "float32", {"shard_ranks": 1}),
        ("qwen3_moe", "float32", {"expert_ranks": 2, "is_routed": True}),
    ],
    ids=["shards", "bfloat16", "replicas", "experts"],
)
def test_two_ranks_train_the_head_that_one_trains(
    tmp_path: Path, rank_pair: RankPair, kind: str, dtype: str, placed: dict[str, Any]
) -> None:
    two, one = (
        _life(tmp_path / name, kind=kind, dtype=dtype, steps=STEPS[:2], **placed)
        for name in ("two", "one")
    )
    found, expected = rank_pair.run(live, two)[0], live(ALONE, one)
    rel = 1e-4 if dtype == "float32" else 2e-2
    for ours, theirs in zip(found, expected, strict=True):
        for field in ("draft_loss", "draft_grad_norm", "draft_overlap"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=rel), field
    head_of_two, head_of_one = (_head(life, 0) for life in (two, one))
    assert head_of_two.keys() == head_of_one.keys()
    assert _worst(head_of_two, head_of_one) <= (1e-4 if dtype == "float32" else 5e-2)


def test_ranks_go_on_with_a_head_to_the_same_bytes_and_one_goes_on_with_theirs(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    whole, broken = (_life(tmp_path / name) for name in ("whole", "broken"))
    rank_pair.run(live, whole)
    for step in STEPS:
        rank_pair.run(live, dataclasses.replace(broken, steps=(step,)))
    for step in STEPS:
        hashes = [_checkpoint(life, step).record.sha256_of_file() for life in (whole, broken)]
        assert "head/model.safetensors" in hashes[0]
        assert hashes[0] == hashes[1]
    alone = _life(tmp_path / "alone", steps=STEPS[:2])
    rank_pair.run(live, alone)
    live(ALONE, dataclasses.replace(alone, steps=STEPS[2:]))
    assert _worst(_head(alone, 2), _head(whole, 2)) <= 1e-3


def _peak(ranks: Ranks, folder: Path, share: float) -> tuple[int, int, int]:
    """Measured and predicted bytes of a rank's part of a tree, and its kept states'."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    loaded = prepare(make_model("qwen3", torch.float32, **sizes))
    head, policy = with_draft_head(folder, loaded, top_k=16)
    generator = np.random.default_rng(0)
    samples = agent_samples(generator, rollouts=8, turns=4, prompt=60, act=20, observe=30)
    forest = read_tree(merge(samples, "g"))
    needed = policy.shape.block_bytes(forest.token_count, chunk=32, is_carried=False)
    plans = TeamPlans([forest], shape=policy.shape, budget_bytes=int(share * needed), head_chunk=32)
    counts = range(1, 30)
    team = next(filter(None, (plans.team((0, 2), (0,), count=count) for count in counts)))
    assert not team.is_offloaded  # torch would count the mapped file too

    def run() -> None:
        forward_backward_together(
            policy,
            _objective([forest]),
            team,
            peers=settled(ranks.team((0, 2))),
            head_chunk=32,
            drafting=Drafting(head.model, [forest], loss_weight=1.0),
        )

    run()  # Makes the parameters' gradients.
    tokens = sum(end - start for block in team.blocks for start, end in [block[ranks.rank]])
    return least_peak_bytes(run), team.predicted_bytes, 2 * tokens * 128 * 4


@pytest.mark.parametrize("share", [0.7, 0.3], ids=["at once", "blocks"])
def test_the_ranks_of_a_team_hold_what_is_predicted_with_a_head(
    tmp_path: Path, rank_pair: RankPair, share: float
) -> None:
    """States lie in files, which torch counts."""
    save_head(tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    results = rank_pair.run(_peak, tmp_path, share)
    predicted = results[0][1]
    measured = max(peak - stored for peak, _, stored in results)
    assert 0.8 * predicted <= measured <= 1.03 * predicted


@pytest.mark.parametrize(("kind", "matrices"), [("qwen3", 1), ("llama", 2)])
def test_what_ranks_gather_of_the_policy_for_a_head_counts_at_every_peak(
    tmp_path: Path, kind: str, matrices: int
) -> None:
    """The policy's embedding, and its head if that is not tied to it, in 4 bytes a value."""
    loaded = prepare(make_model(kind, torch.float32))
    alone, policy = with_draft_head(save_head(tmp_path), loaded, top_k=5)
    _, sharing = with_draft_head(tmp_path, loaded, top_k=5, gather_ends=alone.model.policy_ends)
    for is_carried in (False, True):
        without, gathered = (
            each.shape.peaks(CHUNK, is_carried=is_carried) for each in (policy, sharing)
        )
        assert len(without) == len(gathered) > 3
        for own, more in zip(without, gathered, strict=True):
            assert more.fixed_bytes - own.fixed_bytes == matrices * 64 * 32 * 4
            assert more.token_bytes == own.token_bytes
