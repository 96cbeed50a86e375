"""What ranks send for a draft head, counted in the process groups' calls, is what is planned."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_trainer.core.assignment import Round, plan_rounds
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, ModelShape
from forgemq_trainer.core.rounds import forward_backward_rounds
from forgemq_trainer.core.step import Objective
from forgemq_trainer.core.traffic import Kept, passes_of, update_traffic
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.head_training import SharingRanks, load_head
from forgemq_trainer.model import prepare
from forgemq_trainer.model_sizes import gathered_values
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import shard, whole_ends
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair, RankProcesses
from tests.unit.trainer.scene import agent_samples, configuration_of, make_model, merge
from tests.unit.trainer.sent_bytes import SentBytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
HIDDEN = 32
TOTALS_BYTES = 3 * 8
"""Rows, loss and overlap of the first depth, which are summed over the ranks; not planned."""


@dataclass(frozen=True)
class Case:
    """One update of a tiny policy in float64 with its draft head.

    Attributes:
        world: Number of ranks.
        shards: Of them that hold the policy once.
        is_shared: True if the largest groups run in blocks of several ranks; else all run at once.
        kind: Of the policy.
        is_tied: True if the language-model head's weights are the embedding's.
    """

    world: int
    shards: int
    is_shared: bool
    kind: str = "qwen3"
    is_tied: bool = False


CASES = [
    *(Case(2, shards, is_shared) for shards in (1, 2) for is_shared in (False, True)),
    Case(2, 2, True, "llama", is_tied=True),
    *(Case(4, 2, is_shared) for is_shared in (False, True)),
]


def _name(case: Case) -> str:
    parts = [case.kind, f"{case.world // case.shards} replicas of {case.shards}"]
    parts += ["blocks" if case.is_shared else "at once", "tied" if case.is_tied else ""]
    return "-".join(filter(None, parts))


def _forests(case: Case) -> tuple[Forest, ...]:
    generator = np.random.default_rng(4)
    large: dict[str, Any] = {"rollouts": 8, "is_stripped": True} if case.is_shared else {}
    count = case.world // 2 if case.is_shared else 5
    groups = [agent_samples(generator, turns=4, **large) for _ in range(count)]
    groups += [agent_samples(generator, rollouts=2, turns=1)]
    return tuple(read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups))


def _rounds(case: Case, forests: tuple[Forest, ...], shape: ModelShape) -> tuple[Round, ...]:
    """Of one block each; or one for the small group, and blocks of several ranks."""
    budget = 10**9
    if case.is_shared:
        longest = max(int(forest.position_N.max()) + 1 for forest in forests)
        # Ranges of about the least length, beside a path of any of these trees.
        budget = shape.block_bytes(BLOCK_TOKENS_MIN + 16, chunk=CHUNK, is_carried=True)
        budget += (longest + BLOCK_TOKENS_MIN) * shape.carry_bytes_per_token
    rounds = plan_rounds(
        forests, shape=shape, world_size=case.world, budget_bytes=budget, head_chunk=CHUNK
    )
    teams = [team for planned in rounds for team in planned.teams]
    assert any(team.size > 1 and len(team.blocks) > 1 for team in teams) == case.is_shared
    return rounds


def _of_rank(ranks: Ranks, case: Case, configuration: RunConfiguration) -> list[float]:
    """Bytes that this rank sends in an update above those that are planned, by what is kept."""
    forests, mesh = _forests(case), ranks.mesh(case.shards)
    # 63 rows of embedding and head make shards of two sizes.
    model = make_model(case.kind, torch.float64, vocab_size=63, tie_word_embeddings=case.is_tied)
    sharded = shard(prepare(model), ranks=ranks, dtype=torch.float64, mesh=mesh)
    head = load_head(
        sharded,
        configuration,
        None,
        sharing=SharingRanks(
            gather_ends=partial(whole_ends, model, dtype=torch.float64),
            all_reduce=ranks.all_reduce,
        ),
    )
    assert head is not None
    shape = head.policy.shape
    rounds = _rounds(case, forests, shape)
    objective = Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=Loss()),
        loss=loss_function(Loss()),
    )
    above = []
    for kept in (Kept.NOTHING, Kept.WEIGHTS):
        backwards = passes_of(rounds).backwards
        with SentBytes(None) as sent:
            drafting = head.drafting(forests)
            with sharded.gathering.update(kept, backwards=backwards):
                forward_backward_rounds(
                    head.policy,
                    objective,
                    rounds,
                    peers=ranks,
                    head_chunk=CHUNK,
                    drafting=drafting,
                )
            head.update()
        model.zero_grad(set_to_none=True)
        planned = update_traffic(
            rounds,
            forests,
            shape=shape,
            values=gathered_values(model, shards=case.shards),
            grid=mesh.grid,
            kept=kept,
            rank=ranks.rank,
        )
        of_totals = 2 * TOTALS_BYTES * (case.world - 1) / case.world
        above.append(sent.sent_bytes - of_totals - planned.total)
    return above


def _missing_bytes(case: Case, rank: int) -> int:
    """What a rank with a shorter shard of the policy's head sends less to the other replica."""
    is_summed = 1 < case.shards < case.world
    return 8 * HIDDEN if is_summed and rank % case.shards == case.shards - 1 else 0


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_the_bytes_that_a_rank_sends_with_a_draft_head_are_those_of_the_formula(
    tmp_path: Path, case: Case, rank_pair: RankPair, four_ranks: RankProcesses
) -> None:
    head = save_head(tmp_path / "head", vocab_size=63)
    configuration = msgspec.structs.replace(
        configuration_of(tmp_path), speculation=Speculation(head=str(head))
    )
    ranks = rank_pair if case.world == 2 else four_ranks
    for rank, above in enumerate(ranks.run(_of_rank, case, configuration)):
        assert above == [-_missing_bytes(case, rank)] * 2, rank
