"""Teams of three and four ranks, side by side and together, compute the gradients of one rank.

Also that the ranks of a team hold what is predicted.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from forgemq_contracts.loss import Loss, SequenceMask
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.reference import read_forests
from forgemq_trainer.core.rounds import (
    forward_backward_rounds,
    read_rounds,
    values_bytes,
    values_of,
)
from forgemq_trainer.core.step import (
    EntryValues,
    Objective,
    forward_backward,
    forward_backward_together,
    merged,
)
from forgemq_trainer.core.team_plans import TeamPlans
from forgemq_trainer.core.traffic import Kept, passes_of
from forgemq_trainer.core.tree import Floats, Forest, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard
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
from tests.unit.trainer.test_ranks_updates import begun, of_rank
from tests.unit.trainer.test_step_updates import FOUR, OPTIMIZER, exact_configuration, exact_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
KINDS = ("qwen3", "gpt_oss", "qwen3_moe")

Gradients = dict[str, torch.Tensor]


def _objective(forests: list[Forest]) -> Objective:
    """The sequences' loss couples entries of different ranks."""
    return Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=Loss()),
        loss=loss_function(Loss(kind="gspo")),
    )


def _model(kind: str) -> torch.nn.Module:
    model = make_model(kind, torch.float64)
    if kind != "qwen3":
        model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    return model


def _of_rank(ranks: Ranks, kind: str) -> tuple[Gradients, EntryValues, list[Floats]] | None:
    model, forests = _model(kind), forests_of_teams(kind)
    sharded = shard(prepare(model), ranks=ranks, dtype=torch.float64)
    policy = sharded.policy
    rounds = rounds_of_teams(forests, ranks.world_size)
    with sharded.gathering.reading(Kept.NOTHING):
        read = read_rounds(policy, forests, rounds, peers=ranks, head_chunk=CHUNK)
    with sharded.gathering.update(Kept.NOTHING, backwards=passes_of(rounds).backwards):
        own = forward_backward_rounds(
            policy, _objective(forests), rounds, peers=ranks, head_chunk=CHUNK
        )
    everyones = ranks.gather_bytes(values_bytes(own))
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor()  # type: ignore[union-attr]  # DTensor
        gradients[name] = gradient
    values = merged([values_of(each) for each in everyones])
    return (gradients, values, read) if everyones else None


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_log_probabilities_of_teams_are_those_of_one_rank(
    kind: str, ranks_of: tuple[int, RankProcesses]
) -> None:
    _, processes = ranks_of
    gradients, values, read = processes.run(_of_rank, kind)[0]
    model, forests = _model(kind), forests_of_teams(kind)
    policy = prepare(model).policy
    whole = plan_step(forests, shape=policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
    expected = forward_backward(policy, _objective(forests), whole, head_chunk=CHUNK)
    norms = {
        name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None
    }
    for name, parameter in model.named_parameters():
        difference = float((gradients[name] - parameter.grad).norm())
        assert difference <= 1e-12 * max(norms[name], 1e-3 * max(norms.values())), name
    assert values.loss == pytest.approx(expected.loss, rel=1e-12)
    assert len(values.logprob_E) == len(expected.logprob_E)
    assert np.sort(values.loss_E) == pytest.approx(np.sort(expected.loss_E), rel=1e-10)
    assert values.route_disagreements == expected.route_disagreements
    alone = read_forests(policy, forests, whole, head_chunk=CHUNK)
    for ours, theirs in zip(read, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_three_and_four_ranks_take_the_updates_of_one(
    tmp_path: Path, ranks_of: tuple[int, RankProcesses]
) -> None:
    world, processes = ranks_of
    base = save_base(tmp_path / "base")
    loss = Loss(kind="ppo_clip", anchor="step_start", sequence_mask=SequenceMask())
    configuration = exact_configuration(base, FOUR, loss)
    taken, weights = processes.run(of_rank, configuration, True, world)[0]
    one = exact_model(base, configuration)
    expected = begun(one, configuration).take(lr=OPTIMIZER.lr)
    for name, parameter in one.module.named_parameters():
        difference = (weights[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert float(difference) < 1e-12, name
    assert taken.grad_norms == pytest.approx(expected.grad_norms, rel=1e-11)
    assert 0 < taken.idle_share < 0.5
    assert expected.idle_share == 0


def _peak(ranks: Ranks, share: float) -> tuple[int, int]:
    """Measured and predicted bytes of a rank's part of a tree."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    policy = prepare(make_model("qwen3", torch.float32, **sizes)).policy
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
            policy, _objective([forest]), team, peers=settled(ranks.team((0, 2))), head_chunk=32
        )

    run()  # Makes the parameters' gradients.
    return least_peak_bytes(run), team.predicted_bytes


@pytest.mark.parametrize("share", [0.6, 0.2], ids=["at once", "blocks"])
def test_the_ranks_of_a_team_hold_what_is_predicted(rank_pair: RankPair, share: float) -> None:
    measured, predicted = zip(*rank_pair.run(_peak, share), strict=True)
    assert 0.9 * predicted[0] <= max(measured) <= 1.01 * predicted[0]
