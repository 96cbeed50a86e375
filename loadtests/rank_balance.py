"""How long do ranks wait for one another in a step that they train, and how long by its plan?

Two ranks train steps over the trees of `tree_workloads`, with the model of `tree_training` in
float32 and one thread each. `rank_plans` adds up FLOPs; here each pass is timed on both ranks, in
CPU seconds of the thread that computes, which count neither waits nor other programs. Ranks meet in
every pass, so the one that takes less waits for the other. A case is a step of one tree, or of all:

- waited: the share of both ranks' time in which one waits for the other;
- planned: the same by the plan's FLOPs;
- step_s: CPU seconds of the rank that takes longer.

`make load NAME=rank_balance JSON=balance.json`
"""

import itertools
import time
from collections.abc import Mapping, Sequence

import torch
from measurement import Measurement, arguments
from msgspec import Struct
from rank_plans import HEAD_CHUNK, steps
from rank_processes import on_ranks
from torch import nn
from tree_training import made_model

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.assignment import idle_share, plan_rounds
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.rounds import forward_backward_rounds
from forgemq_trainer.core.step import Objective
from forgemq_trainer.core.traffic import Kept, passes_of
from forgemq_trainer.core.tree import Forest
from forgemq_trainer.heap import keep_freed_memory
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.sharding import ShardedPolicy, shard

QUESTION = "How long do ranks wait for one another in a step that they train?"
WORLD = 2
BUDGET_BYTES = 8 * 10**9
REPEATS = 2
"""The first step of a shape fills the heap, and the last one counts."""


class Timed(Struct, frozen=True, kw_only=True):
    """CPU seconds of a rank in each pass of a step, and the planned share of waiting."""

    pass_s: list[float]
    planned: float


def timed_step(ranks: Ranks, sharded: ShardedPolicy, forests: Sequence[Forest]) -> Timed:
    """Compute the gradients of one step, once to fill the heap and once to be timed."""
    loss = Loss()
    objective = Objective(
        forests=forests,
        loss_weights=group_loss_weights(forests, loss=loss),
        loss=loss_function(loss),
    )
    rounds = plan_rounds(
        forests,
        shape=sharded.policy.shape,
        world_size=WORLD,
        budget_bytes=BUDGET_BYTES,
        head_chunk=HEAD_CHUNK,
    )
    marks: list[float] = []

    def mark(_module: nn.Module, _inputs: object) -> None:
        marks.append(time.thread_time())

    for _ in range(REPEATS):
        marks.clear()
        marking = sharded.policy.decoder.register_forward_pre_hook(mark)
        with sharded.gathering.update(Kept.NOTHING, backwards=passes_of(rounds).backwards):
            forward_backward_rounds(
                sharded.policy, objective, rounds, peers=ranks, head_chunk=HEAD_CHUNK
            )
        marks.append(time.thread_time())
        marking.remove()
        sharded.model.zero_grad()
    return Timed(
        pass_s=[end - begin for begin, end in itertools.pairwise(marks)],
        planned=idle_share(rounds, world_size=WORLD),
    )


def timed_steps(ranks: Ranks, cases: Sequence[str]) -> Mapping[str, Timed]:
    """What this rank took, by case."""
    keep_freed_memory()
    sharded = shard(made_model(), ranks=ranks, dtype=torch.float32)
    of_case = steps()
    return {case: timed_step(ranks, sharded, of_case[case]) for case in cases}


def waited_share(pass_s_of_rank: Sequence[Sequence[float]]) -> float:
    """The share of all ranks' time that they wait for the one which takes longest in a pass."""
    longest_s: float = sum(max(seconds) for seconds in zip(*pass_s_of_rank, strict=True))
    worked_s = sum(sum(pass_s) for pass_s in pass_s_of_rank)
    return 1 - worked_s / (len(pass_s_of_rank) * longest_s)


def main() -> int:
    """Train every case."""
    options = arguments(QUESTION)
    measurement = Measurement(name="rank_balance", question=QUESTION)
    cases = [case for case in steps() if not options.case or case in options.case]
    timed = on_ranks(timed_steps, cases, world=WORLD) if cases else []
    for case in cases:
        of_rank = [each[case] for each in timed]
        waited = waited_share([each.pass_s for each in of_rank])
        measurement.row(case, "waited", waited, "share")
        measurement.row(case, "planned", of_rank[0].planned, "share")
        measurement.row(case, "step_s", max(sum(each.pass_s) for each in of_rank), "s")
    return measurement.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
