"""`forgemq plan` of a run with a draft head. The trainer's planner is called in this process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.draft_head import HEAD_FILE
from forgemq_contracts.weight_buckets import header_bytes
from forgemq_launcher.commands.new_head import write_new_head
from forgemq_launcher.core.configuration import configuration, document
from forgemq_launcher.plan.findings import reasons
from forgemq_launcher.plan.machines import Machines
from forgemq_launcher.plan.run_plan import PlannedRun, plan_of
from forgemq_trainer.core.memory import least_budget_bytes
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import load_model
from forgemq_trainer.plan import answer
from tests.unit.launcher.test_plan import DEMO, ROOT, TWO_H100

CPUS = msgspec.structs.replace(TWO_H100, gpu="cpu")


def planned_run(
    file: Path, model: Path, overrides: Sequence[str], *, machines: Machines = TWO_H100
) -> PlannedRun:
    """A run file with these overrides, whose memory budget is named."""
    return PlannedRun(
        configuration=configuration(
            document(file.read_text(), overrides=overrides), run="r", folder=ROOT
        ),
        config=(model / "config.json").read_bytes(),
        machines=machines,
        is_budget_named=True,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_draft_head_is_planned_as_new_head_writes_it_and_the_trainer_holds_it(
    tmp_path: Path, ranks: int
):
    count = write_new_head(DEMO / "model", tmp_path, seed=0)
    plans = []
    for guessing in ((), (f"speculation.head={tmp_path}",)):
        overrides = (f"trainer.world_size={ranks}", *guessing)
        planned = planned_run(DEMO / "run.toml", DEMO / "model", overrides, machines=CPUS)
        plans.append(plan_of(planned, answer))
    run = planned.configuration
    alone, beside = plans
    assert (alone.trainer.head_bytes, beside.trainer.head_bytes) == (0, 16 * count)
    assert beside.trainer.state_bytes == alone.trainer.state_bytes
    assert beside.host.checkpoint_bytes - alone.host.checkpoint_bytes == 12 * count
    loaded = load_model(DEMO / "model", dtype="float32", device="cpu")
    sharing = None if ranks == 1 else partial(pytest.fail, "nothing is gathered")
    _, policy = with_draft_head(tmp_path, loaded, top_k=4, gather_ends=sharing)
    assert beside.step.least_budget_bytes == least_budget_bytes(
        policy.shape,
        longest_path=run.model.context_tokens_max,
        head_chunk=run.trainer.head_chunk_tokens,
    )
    assert beside.step.least_budget_bytes > alone.step.least_budget_bytes
    file = (tmp_path / HEAD_FILE).read_bytes()
    stored = len(file) - header_bytes(file)
    assert stored == 4 * count
    assert beside.host.weights_bytes - alone.host.weights_bytes == stored
    # Four versions and one that is written; the demo keeps fewer checkpoints, and writes one more.
    checkpoints = (run.trainer.checkpoints_kept + 1) * 12 * count
    assert beside.host.disk_bytes - alone.host.disk_bytes == 5 * stored + checkpoints


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), slow(4, 1), (4, 2), slow(4, 4)])
def test_a_draft_head_adds_its_flops_sums_and_state_to_a_planned_step(ranks: int, replicas: int):
    folder = ROOT / "deploy/recipes/qwen3-4b"
    plans = []
    for guessing in ((), ("speculation.head=h",)):
        overrides = (
            f"trainer.world_size={ranks}",
            f"trainer.shard_ranks={ranks // replicas}",
            "trainer.memory_budget_bytes=30000000000",
            *guessing,
        )
        planned = planned_run(folder / "maths.toml", folder, overrides)
        plans.append(plan_of(planned, answer))
    alone, beside = plans
    assert alone.seconds is not None
    assert beside.seconds is not None
    count = beside.model.draft_head
    # docs/fleet.md has this number.
    assert beside.step.flops / alone.step.flops == pytest.approx(1.18, abs=0.005)
    assert beside.step.tree_tokens == alone.step.tree_tokens
    # Gradients in float32, summed over all ranks, each of which gets them whole.
    summed = beside.step.replicated_bytes - alone.step.replicated_bytes
    assert summed == 2 * (4 * count * (ranks - 1) // ranks)
    gpu, share = TWO_H100.device, TWO_H100.bandwidth_share
    assert gpu is not None
    moved_s = 2 * 18 * count / (gpu.memory_bytes_per_s * share)
    assert beside.seconds.update_s - alone.seconds.update_s == pytest.approx(moved_s)
    published_s = 2 * count / (gpu.network_bytes_per_s * share)
    assert beside.seconds.publish_s - alone.seconds.publish_s == pytest.approx(published_s)


def test_a_family_without_draft_heads_is_said_not_to_fit_with_one():
    folder = ROOT / "deploy/recipes/minimax-m2"
    planned = planned_run(next(folder.glob("*.toml")), folder, ("speculation.head=h",))
    found = reasons(planned, plan_of(planned, answer))
    said = "the trainer refuses it: speculation must be left out for a model of type minimax_m2"
    assert [reason for reason in found if reason.startswith(said)]
