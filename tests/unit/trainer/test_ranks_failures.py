"""Ranks that cannot continue: refused settings, and a rank that hangs or dies."""

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainingMetrics
from forgemq_settings.environment import SettingsError
from forgemq_trainer.command_loop import carry_out_commands
from forgemq_trainer.core.loss import Entries
from forgemq_trainer.core.memory import least_budget_bytes
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.ranks.ranks import RankLaunch, RankLostError, Ranks, device_of, launch_of
from forgemq_trainer.ranks.torchrun import describe_ends
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.training import Training
from tests.unit.trainer.rank_life import Life, train
from tests.unit.trainer.rank_scene import (
    START_DEADLINE_S,
    WORK_DEADLINE_S,
    LostRankProcessError,
    RankPair,
)
from tests.unit.trainer.scene import make_model, save_base, scheduled_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]


def _failures(
    ranks: Ranks, configuration: RunConfiguration, life: Life
) -> tuple[tuple[tuple[str, str], ...], int]:
    """The groups of step 0 that rank 0 leaves out, and why; and the version after the step."""
    if ranks.rank > 0:
        carry_out_commands(ranks, device="cpu")
        return (), 0
    training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
    trees = life.trees(0)
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    step = training.read(scheduled_step(0, trees), values)
    assert training.train(step).loss_tokens == 0
    training.end()
    return step.failed, training.version


def _refusal(ranks: Ranks, configuration: RunConfiguration, life: Life) -> str:
    try:
        if ranks.rank > 0:
            carry_out_commands(ranks, device="cpu")
            return ""
        training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
        train(training, life, 0)
    except SettingsError as error:
        return str(error)
    return ""


def _least_budget(configuration: RunConfiguration, context: int) -> RunConfiguration:
    """The same run with the least budget for episodes of so many tokens."""
    least = least_budget_bytes(
        prepare(make_model("qwen3", torch.float32)).policy.shape,
        longest_path=context,
        head_chunk=configuration.trainer.head_chunk_tokens,
    )
    return msgspec.structs.replace(
        configuration,
        trainer=msgspec.structs.replace(configuration.trainer, memory_budget_bytes=least),
        model=msgspec.structs.replace(configuration.model, context_tokens_max=context),
    )


def _trained(ranks: Ranks, configuration: RunConfiguration, life: Life) -> TrainingMetrics | None:
    if ranks.rank > 0:
        carry_out_commands(ranks, device="cpu")
        return None
    training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
    metrics = train(training, life, 0)
    training.end()
    return metrics


def test_ranks_train_in_the_least_budget_in_which_one_trains(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    """Keys and values of the trees have no room on either."""
    life = Life(tmp_path, (0,), rollouts=8, turns=9)
    save_base(life.folder / "base")
    longest = max(int(read_tree(tree).position_N.max()) + 1 for tree in life.trees(0))
    alone, both = (_least_budget(life.configuration(world_size=ranks), longest) for ranks in (1, 2))
    expected = train(Training(alone, device="cpu", checkpoint=None), life, 0)
    found, _ = rank_pair.run(_trained, both, life)
    assert found.loss_tokens == expected.loss_tokens > 0
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_trees_that_no_rank_has_room_for_fail_their_groups_and_the_step_goes_on(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    """All groups of the step are deeper than the budget's context, which leaves it without any."""
    life = Life(tmp_path, (0,), rollouts=8, turns=9)
    save_base(life.folder / "base")
    small = _least_budget(life.configuration(world_size=2), 8)
    (failed, version), _ = rank_pair.run(_failures, small, life)
    assert version == 1
    assert [group for group, _ in failed] == ["g-0-0", "g-0-1", "g-0-2"]
    assert all("trainer.memory_budget_bytes is" in reason for _, reason in failed)


def test_a_budget_below_the_longest_context_is_refused_by_name_on_every_rank(
    tmp_path: Path, rank_pair: RankPair
) -> None:
    life = Life(tmp_path, (0,))
    save_base(life.folder / "base")
    configuration = life.configuration(world_size=2)
    trainer = msgspec.structs.replace(configuration.trainer, memory_budget_bytes=1000)
    small = msgspec.structs.replace(configuration, trainer=trainer)
    refusals = rank_pair.run(_refusal, small, life)
    assert refusals[0] == refusals[1]
    assert "trainer.memory_budget_bytes is 1000" in refusals[0]


DEADLINE_S = 3.0
"""Of a rank within a step: short, as the test waits for it, and long beside a local exchange."""


@pytest.fixture
def mortal_pair() -> Iterator[RankPair]:
    """Two ranks with a deadline of seconds."""
    pair = RankPair(deadline_s=DEADLINE_S)
    yield pair
    pair.close()


def _hang(ranks: Ranks) -> str:
    """Rank 1 stays away until rank 0 has given it up."""
    # The test uses one of the step's groups; the sharded parameters' group has the same deadline.
    parameters = (
        ranks.mesh(ranks.world_size).device_mesh.get_group()._get_backend(torch.device("cpu"))
    )
    assert parameters.options._timeout == timedelta(seconds=DEADLINE_S)
    if ranks.rank == 1:
        signal.sigtimedwait([signal.SIGUSR1], DEADLINE_S + 1)
        return ""
    try:
        with ranks.together():
            ranks.gather_bytes(b"own")
    except RankLostError as error:
        return str(error)
    return ""


def die_on_rank_0(logprob: torch.Tensor, entries: Entries) -> torch.Tensor:
    """A loss that kills rank 0 between two collectives of a step."""
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return -entries.advantage * logprob


def _die(ranks: Ranks, life: Life) -> str:
    try:
        if ranks.rank > 0:
            carry_out_commands(ranks, device="cpu")
            return ""
        loss = Loss(kind=f"{__name__}:die_on_rank_0")
        configuration = msgspec.structs.replace(life.configuration(world_size=2), loss=loss)
        training = Training(configuration, device="cpu", checkpoint=None, ranks=ranks)
        train(training, life, 0)
    except RankLostError as error:
        return str(error)
    return ""


def test_a_rank_that_hangs_or_dies_within_a_step_ends_the_others_with_one_line(
    tmp_path: Path, mortal_pair: RankPair
) -> None:
    reason, _ = mortal_pair.run(_hang)
    assert reason.startswith(
        "rank 0 lost another of 2 ranks, which died or did not come within 3 s"
    )
    assert "\n" not in reason
    life = Life(tmp_path, (0,))
    save_base(life.folder / "base")
    dead, reason = mortal_pair.ends(_die, life)
    assert isinstance(dead, LostRankProcessError)
    assert str(dead) == "rank 0 ended with status -9"
    assert reason.startswith("rank 1 lost another of 2 ranks")
    assert "\n" not in reason


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    second = RankLaunch(rank=5, local_rank=1, world_size=8, local_world_size=4)
    assert device_of("cuda", launch=second, gpus=4) == "cuda:1"
    assert device_of("cpu", launch=second, gpus=4) == "cpu"
    assert device_of("cuda:3", launch=RankLaunch(), gpus=4) == "cuda:3"
    with pytest.raises(SettingsError, match="FORGEMQ_TRAINER_DEVICE=cuda:0 gives 8 ranks one GPU"):
        device_of("cuda:0", launch=second, gpus=4)


def test_a_trainer_without_a_device_in_its_settings_takes_the_gpus_that_suffice() -> None:
    device = TrainerSettings(folder="f").device
    assert device_of(device, launch=RankLaunch(), gpus=0) == "cpu"
    assert device_of(device, launch=RankLaunch(), gpus=1) == "cuda"
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert device_of(device, launch=launch_of(environ), gpus=3) == "cpu"
    assert device_of(device, launch=launch_of(environ), gpus=4) == "cuda:1"


def test_the_rank_that_was_killed_is_named_before_those_that_failed_for_it() -> None:
    assert describe_ends({0: 1, 1: -9}) == (
        "rank 1 was killed by SIGKILL, rank 0 ended with status 1; the trainer ends with all its "
        "ranks"
    )
