"""Ranks gather parameters and sum gradients beside what they compute.

On a GPU these calls run on streams of their own, from when they are made until their result is
taken. On a CPU a call ends before it returns, but calls and computation come in the same order. So
these tests record the order, and count the matrix products between a call and where its result is
taken.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.traffic import Kept
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.expert_groups import ExpertGroups
from forgemq_trainer.ranks.rank_group import PendingTensor
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import ShardedPolicy, shard
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankProcesses
from tests.unit.trainer.scene import agent_samples, make_model, merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

CHUNK = 8
LAYERS = 3
HEAD = "head"
HEAD_TAKEN = "head taken"
PRODUCT = "aten::mm"
ROOT = ""
"""The decoder's own parameters, embedding and last norm; FSDP calls it by no name."""


@dataclass(frozen=True)
class Calls:
    """How often each part was gathered, or summed, beside matrix products and beside none."""

    beside: Counter[str]
    alone: Counter[str]


def _sharded(ranks: Ranks) -> ShardedPolicy:
    """A mixture in two shards; each half of its experts is in two shards as well."""
    sizes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False, "vocab_size": 63}
    mesh = ranks.mesh(ranks.world_size)
    return shard(
        prepare(make_model("qwen3_moe", torch.float32, **sizes)),
        ranks=ranks,
        dtype=torch.float32,
        mesh=mesh,
        experts=ExpertGroups(ranks, mesh.grid, expert_ranks=2),
    )


def _forest() -> Forest:
    return read_tree(merge(agent_samples(np.random.default_rng(3), rollouts=4, turns=3), "g"))


def _order(ranks: Ranks, blocks: int, recomputed_layers: int) -> list[str]:
    """What a rank called and computed in an update, in order."""
    forest = _forest()
    cuts = np.linspace(0, forest.token_count, blocks + 1).astype(int).tolist()
    microbatch = Microbatch(
        groups=(0,),
        blocks=tuple(itertools.pairwise(cuts)),
        recomputed_layers=recomputed_layers,
    )
    objective = Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss()))
    sharded = _sharded(ranks)
    take = PendingTensor.result

    def recorded_take(pending: PendingTensor) -> Any:
        with record_function(HEAD_TAKEN):
            return take(pending)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PendingTensor, "result", recorded_take)
        with (
            profile(activities=[ProfilerActivity.CPU]) as profiled,
            sharded.gathering.update(Kept.NOTHING, backwards=blocks),
        ):
            forward_backward(sharded.policy, objective, [microbatch], head_chunk=CHUNK)
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events]


def _part(name: str, label: str) -> str | None:
    """The part of the model that FSDP's event with this label is about; None for other events."""
    if name == label:
        return ROOT
    return name[len(label) + 2 : -1] if name.startswith(f"{label} (") else None


def _calls(order: list[str], *, label: str, call: str, taken: str) -> Calls:
    """Calls of one kind, and whether there was computation before their results were taken.

    Args:
        order: Of all events.
        label: FSDP's, for the event in which it makes such a call.
        call: The event of the call itself, FSDP's or the head's.
        taken: FSDP's label where it takes results: that of the same part, or of those before it.
    """
    began: dict[str, int] = {}
    calls = Calls(Counter(), Counter())
    products, is_of_fsdp = 0, False
    for name in order:
        products += name == PRODUCT
        done: list[str] = []
        if (part := _part(name, label)) is not None:
            began[part], is_of_fsdp = products, True
        elif name == call:
            began |= {} if is_of_fsdp else {HEAD: products}
            is_of_fsdp = False
        elif name == HEAD_TAKEN:
            done = [HEAD]
        elif (part := _part(name, taken)) is not None:
            done = [part] if part in began else [each for each in began if each != HEAD]
        for each in set(done) & set(began):
            (calls.beside if products > began.pop(each) else calls.alone)[each] += 1
    calls.alone.update(began.keys())
    return calls


def _gathers(order: list[str]) -> Calls:
    return _calls(
        order,
        label="FSDP::all_gather",
        call="c10d::_allgather_base_",
        taken="FSDP::all_gather_copy_out",
    )


def _sums(order: list[str]) -> Calls:
    return _calls(
        order,
        label="FSDP::post_backward_reduce",
        call="c10d::_reduce_scatter_base_",
        taken="FSDP::post_backward_rs_wait",
    )


LAYER_PARTS = [f"layers.{n}{part}" for n in range(LAYERS) for part in ("", ".mlp.experts")]


@pytest.mark.parametrize("recomputed_layers", [0, LAYERS - 1])
def test_all_but_the_first_gathers_of_a_pass_and_the_last_sums_run_beside_computation(
    recomputed_layers: int, four_ranks: RankProcesses
) -> None:
    for order in four_ranks.run(_order, 1, recomputed_layers):
        gathers, sums = _gathers(order), _sums(order)
        forward, backward = [ROOT, *LAYER_PARTS[:2]], LAYER_PARTS[-2:]
        # Experts of the first layer have its attention to run beside.
        forward.remove("layers.0.mlp.experts")
        assert gathers.alone == Counter([*forward, *backward])
        assert gathers.beside == Counter([*LAYER_PARTS, *LAYER_PARTS, HEAD]) - (
            Counter([*forward, *backward])
        )
        assert sums.alone == Counter(["layers.0", ROOT])
        assert sums.beside == Counter([*LAYER_PARTS, HEAD]) - Counter(["layers.0"])


def test_the_head_is_gathered_beside_the_last_layer_in_each_pass_of_blocks(
    four_ranks: RankProcesses,
) -> None:
    """Two blocks go forward without gradient, then each forward and backward."""
    for order in four_ranks.run(_order, 2, 0):
        gathers, sums = _gathers(order), _sums(order)
        assert (gathers.beside[HEAD], gathers.alone[HEAD]) == (4, 0)
        assert (sums.beside[HEAD], sums.alone[HEAD]) == (2, 0)
        assert gathers.alone == Counter(
            {ROOT: 2, "layers.0": 4, "layers.2": 2, "layers.2.mlp.experts": 2}
        )
