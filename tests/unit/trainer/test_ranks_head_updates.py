"""A draft head and its policy take the updates of one rank on several, in float64.

However the ranks hold the model and share the groups: each update of either follows from the
weights that the one before it left in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.reference import read_forests
from forgemq_trainer.core.step import EntryValues, Objective, forward_backward
from forgemq_trainer.core.tree import Floats, Forest
from forgemq_trainer.head_training import HeadTraining, load_head
from forgemq_trainer.model import LoadedModel, prepare
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import whole_state
from forgemq_trainer.step_updates import TakenUpdates
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair, RankProcesses
from tests.unit.trainer.scene import make_model
from tests.unit.trainer.test_low_rank import adapted
from tests.unit.trainer.test_ranks_updates import CHUNK, RankModel, begun
from tests.unit.trainer.test_step_updates import FOUR, OPTIMIZER, exact_configuration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Four updates of a tiny policy and its head.

    Attributes:
        world: Number of ranks.
        shards: Of them that hold the policy once.
        is_shared: True if the largest groups run in blocks of several ranks; else all run at once.
        kind: Of the policy.
        expert_ranks: Of the ranks of a replica, those that hold all experts between them.
        is_adapted: True if adapters train, of a frozen policy.
        anchor: Of the loss.
    """

    world: int
    shards: int
    is_shared: bool
    kind: str = "qwen3"
    expert_ranks: int = 1
    is_adapted: bool = False
    anchor: str = "behaviour"


CASES = [
    *(Case(2, shards, is_shared) for shards in (1, 2) for is_shared in (False, True)),
    Case(2, 2, True, "llama", anchor="step_start"),
    Case(2, 2, True, is_adapted=True),
    *(Case(4, 2, is_shared) for is_shared in (False, True)),
    Case(2, 2, False, "qwen3_moe", expert_ranks=2),
    Case(4, 2, True, "qwen3_moe", expert_ranks=2),
    Case(4, 4, True, "qwen3_moe", expert_ranks=2, is_adapted=True),
]


def _name(case: Case) -> str:
    parts = [case.kind, f"{case.world // case.shards} replicas of {case.shards}"]
    parts += ["blocks" if case.is_shared else "at once", "adapters" if case.is_adapted else ""]
    parts += [f"experts on {case.expert_ranks}" if case.expert_ranks > 1 else "", case.anchor]
    return "-".join(filter(None, parts))


def _loaded(case: Case) -> LoadedModel:
    if case.is_adapted:
        return adapted(case.kind, torch.float64, "k_proj", "o_proj")
    model = make_model(case.kind, torch.float64)
    if case.kind == "qwen3_moe":
        model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    return prepare(model)


class OneModel:
    """The whole policy in float64, and its head, as `StepUpdates` uses it."""

    def __init__(self, loaded: LoadedModel, configuration: RunConfiguration) -> None:
        """Train what a run of this configuration does."""
        self.idle_share = 0.0
        self.module = loaded.model
        head = load_head(loaded, configuration, None)
        assert head is not None
        self.head, self.policy = head, head.policy
        self.updater = Updater(self.module, OPTIMIZER)

    def with_references(self, forests: tuple[Forest, ...]) -> tuple[Forest, ...]:
        """As they are."""
        return forests

    def read_forests(self, forests: Sequence[Forest]) -> list[Floats]:
        """Log-probabilities of every forest."""
        planned = plan_step(forests, shape=self.policy.shape, budget_bytes=10**9, head_chunk=CHUNK)
        return read_forests(self.policy, forests, planned, head_chunk=CHUNK)

    def forward_backward(self, objective: Objective) -> EntryValues:
        """Add the gradients of both."""
        planned = plan_step(
            objective.forests, shape=self.policy.shape, budget_bytes=10**9, head_chunk=CHUNK
        )
        drafting = self.head.drafting(objective.forests)
        return forward_backward(
            self.policy, objective, planned, head_chunk=CHUNK, drafting=drafting
        )


def _state_of(head: HeadTraining) -> State:
    """Its weights and its optimizer's moments."""
    return {
        name: tensor.clone() for name, tensor in (head.weights() | head.optimizer_state()).items()
    }


def _of_rank(
    ranks: Ranks, case: Case, configuration: RunConfiguration
) -> tuple[TakenUpdates, State, State]:
    """What the ranks did, this rank's head after it, and the whole policy of its replica."""
    mesh = ranks.mesh(case.shards)
    experts = None
    if case.expert_ranks > 1:
        experts = ExpertGroups(ranks, mesh.grid, expert_ranks=case.expert_ranks)
    model = RankModel(
        ranks,
        _loaded(case),
        configuration,
        is_shared=case.is_shared,
        mesh=mesh,
        experts=experts,
    )
    taken = begun(model, configuration).take(lr=OPTIMIZER.lr)
    assert model.head is not None
    state = whole_state(model.module, dtype=torch.float64, is_kept=True)
    return taken, _state_of(model.head), {name: tensor.clone() for name, tensor in state.items()}


def _worst(ours: State, theirs: State) -> float:
    """Largest ||difference|| / ||value|| of these tensors."""
    return max(float((ours[name] - value).norm() / value.norm()) for name, value in theirs.items())


def _trained(module: nn.Module) -> State:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_ranks_take_the_updates_of_one_with_policy_and_head(
    tmp_path: Path, case: Case, rank_pair: RankPair, four_ranks: RankProcesses
) -> None:
    loss = Loss(anchor=case.anchor)
    configuration = msgspec.structs.replace(
        exact_configuration(tmp_path, FOUR, loss),
        speculation=Speculation(head=str(save_head(tmp_path / "head")), learning_rate=1e-2),
    )
    ranks = rank_pair if case.world == 2 else four_ranks
    results = ranks.run(_of_rank, case, configuration)
    one = OneModel(_loaded(case), configuration)
    start = _trained(OneModel(_loaded(case), configuration).module), _state_of(one.head)
    expected = begun(one, configuration).take(lr=OPTIMIZER.lr)
    taken, head, policy = results[0]
    wanted = _trained(one.module), _state_of(one.head)
    assert _worst(policy, wanted[0]) <= 1e-12
    assert head.keys() == wanted[1].keys()
    assert _worst(head, wanted[1]) <= 1e-12
    assert _worst(start[0], wanted[0]) > 1e-4
    assert _worst({name: wanted[1][name] for name in start[1]}, start[1]) > 1e-2
    for _, other_head, other_policy in results[1:]:
        assert all(torch.equal(other_head[name], head[name]) for name in head)
        assert all(torch.equal(other_policy[name], policy[name]) for name in policy)
    assert taken.grad_norms == pytest.approx(expected.grad_norms, rel=1e-11)
    assert len(taken.grad_norms) == 4
    assert taken.draft is not None
    assert expected.draft is not None
    assert taken.draft.rows == expected.draft.rows
    for field in ("loss", "overlap", "grad_norm"):
        ours, theirs = (getattr(each.draft, field) for each in (taken, expected))
        assert ours == pytest.approx(theirs, rel=1e-11), field
