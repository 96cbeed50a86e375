"""Several ranks take the updates of one, also anchored at the step's beginning, in float64."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from forgemq_contracts.loss import Loss, SequenceMask
from forgemq_contracts.run import RunConfiguration
from forgemq_trainer.core.assignment import Round, idle_share, plan_rounds
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN
from forgemq_trainer.core.rounds import (
    forward_backward_rounds,
    read_rounds,
    values_bytes,
    values_of,
)
from forgemq_trainer.core.step import EntryValues, Objective, merged
from forgemq_trainer.core.traffic import Kept, passes_of
from forgemq_trainer.core.tree import Floats, Forest, read_tree
from forgemq_trainer.head_training import SharingRanks, load_head
from forgemq_trainer.model import LoadedModel, prepare
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.shard_mesh import ShardMesh
from forgemq_trainer.ranks.sharded_updater import ShardedUpdater
from forgemq_trainer.ranks.sharding import FsdpShards, shard, whole_ends, whole_state
from forgemq_trainer.step_updates import StepUpdates, TakenUpdates, TrainedModel
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
    scheduled_step,
)
from tests.unit.trainer.test_step_updates import FOUR, OPTIMIZER, exact_configuration, exact_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8


class RankModel:
    """One rank's shard of a tiny model in float64, as `StepUpdates` uses it."""

    def __init__(
        self,
        ranks: Ranks,
        whole: LoadedModel,
        configuration: RunConfiguration,
        *,
        is_shared: bool,
        mesh: ShardMesh,
        experts: ExpertGroups | None = None,
    ) -> None:
        """Keep a shard of the model, which is the same on every rank, and the run's draft head."""
        self._ranks, self._is_shared = ranks, is_shared
        loaded = shard(whole, ranks=ranks, mesh=mesh, dtype=torch.float64, experts=experts)
        self.idle_share = 0.0
        self.module, self._gathering = loaded.model, loaded.gathering
        gather_ends = partial(whole_ends, self.module, dtype=torch.float64)
        sharing = SharingRanks(gather_ends=gather_ends, all_reduce=ranks.all_reduce)
        self.head = load_head(loaded, configuration, None, sharing=sharing)
        self.policy = loaded.policy if self.head is None else self.head.policy
        shards = FsdpShards(ranks, loaded.mesh, dtype=torch.float64)
        self.updater = ShardedUpdater(self.module, OPTIMIZER, shards=shards)

    def _rounds(self, forests: Sequence[Forest]) -> tuple[Round, ...]:
        shape, longest = self.policy.shape, max(int(f.position_N.max()) + 1 for f in forests)
        # Ranges of about the least length, beside a path of any of these trees.
        blocks = shape.block_bytes(BLOCK_TOKENS_MIN + 16, chunk=CHUNK, is_carried=True)
        shared_bytes = blocks + (longest + BLOCK_TOKENS_MIN) * shape.carry_bytes_per_token
        rounds = plan_rounds(
            forests,
            shape=shape,
            world_size=self._ranks.world_size,
            budget_bytes=shared_bytes if self._is_shared else 10**9,
            head_chunk=CHUNK,
        )
        shared = [t for each in rounds for t in each.teams if t.size > 1 and len(t.blocks) > 1]
        assert (len(shared) > 0) == self._is_shared
        return rounds

    def with_references(self, forests: tuple[Forest, ...]) -> tuple[Forest, ...]:
        """As they are."""
        return forests

    def read_forests(self, forests: Sequence[Forest]) -> list[Floats]:
        """Log-probabilities of every forest."""
        rounds = self._rounds(forests)
        with self._gathering.reading(Kept.WEIGHTS):
            return read_rounds(self.policy, forests, rounds, peers=self._ranks, head_chunk=CHUNK)

    def forward_backward(self, objective: Objective) -> EntryValues:
        """Add this rank's gradients."""
        rounds = self._rounds(objective.forests)
        self.idle_share = idle_share(rounds, world_size=self._ranks.world_size)
        drafting = None if self.head is None else self.head.drafting(objective.forests)
        with self._gathering.update(Kept.WEIGHTS, backwards=passes_of(rounds).backwards):
            own = forward_backward_rounds(
                self.policy,
                objective,
                rounds,
                peers=self._ranks,
                head_chunk=CHUNK,
                drafting=drafting,
            )
        parts = self._ranks.gather_bytes(values_bytes(own))
        return merged([values_of(part) for part in parts]) if parts else own


def begun(model: TrainedModel, configuration: RunConfiguration) -> StepUpdates:
    """Begin a step over five groups: a minibatch has an odd number, so a rank has less to do."""
    generator = np.random.default_rng(5)
    samples = [agent_samples(generator, rollouts=5 + n % 2, turns=4) for n in range(5)]
    trees = [merge(each, f"g-{n}") for n, each in enumerate(samples)]
    updates = StepUpdates(
        model,
        configuration,
        groups=scheduled_step(0, trees).groups,
        forests=[read_tree(tree) for tree in trees],
        loss=loss_function(configuration.loss),
    )
    updates.begin()
    return updates


def of_rank(
    ranks: Ranks, configuration: RunConfiguration, is_shared: bool, shards: int
) -> tuple[TakenUpdates, dict[str, torch.Tensor]]:
    """What the ranks did, and whole weights after it, of this rank's replica."""
    whole = prepare(make_model("qwen3", torch.float64))
    mesh = ranks.mesh(shards)
    model = RankModel(ranks, whole, configuration, is_shared=is_shared, mesh=mesh)
    taken = begun(model, configuration).take(lr=OPTIMIZER.lr)
    state = whole_state(model.module, dtype=torch.float64, is_kept=True)
    return taken, {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("is_shared", [False, True], ids=["at once", "blocks"])
@pytest.mark.parametrize(
    "loss",
    [Loss(), Loss(kind="ppo_clip", anchor="step_start", sequence_mask=SequenceMask())],
    ids=["cispo", "anchored and masked"],
)
def test_two_ranks_take_the_updates_of_one(
    tmp_path: Path, rank_pair: RankPair, loss: Loss, is_shared: bool
) -> None:
    _check(tmp_path, rank_pair, loss, is_shared=is_shared, shards=2)


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_of_ranks_take_the_updates_of_one(
    tmp_path: Path, four_ranks: RankProcesses, shards: int
) -> None:
    loss = Loss(kind="ppo_clip", anchor="step_start")
    results = _check(tmp_path, four_ranks, loss, is_shared=shards == 2, shards=shards)
    first = results[0][1]
    for _, weights in results[1:]:
        assert all(torch.equal(weights[name], first[name]) for name in first)


def _check(
    tmp_path: Path, ranks: RankProcesses, loss: Loss, *, is_shared: bool, shards: int
) -> list[tuple[TakenUpdates, dict[str, torch.Tensor]]]:
    """Check the ranks' updates against those of one; returns what each rank saw."""
    base = save_base(tmp_path / "base")
    configuration = exact_configuration(base, FOUR, loss)
    results = ranks.run(of_rank, configuration, is_shared, shards)
    taken, weights = results[0]
    one = exact_model(base, configuration)
    expected = begun(one, configuration).take(lr=OPTIMIZER.lr)
    for name, parameter in one.module.named_parameters():
        difference = (weights[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert float(difference) < 1e-12, name
    assert taken.grad_norms == pytest.approx(expected.grad_norms, rel=1e-11)
    assert len(taken.grad_norms) == 4
    assert taken.values.loss == pytest.approx(expected.values.loss, rel=1e-11)
    assert len(taken.values.logprob_E) == len(expected.values.logprob_E)
    ours, theirs = taken.values.is_limited_E, expected.values.is_limited_E
    assert ours.sum() == theirs.sum()
    assert 0 < ours.sum() < len(ours) or loss.anchor == "behaviour"
    return results
