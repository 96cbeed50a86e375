"""Advantages from a teacher: in closed form, and what a policy learns from them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts import topics
from forgemq_contracts.distillation import Distillation
from forgemq_contracts.run import Optimizer, RunConfiguration
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.distillation import distilled, kl_teacher
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    Sample,
    agent_samples,
    configuration_of,
    merge,
    save_base,
    scheduled_step,
)

TEACHER = Distillation(url="http://127.0.0.1:1")
VALUES = st.lists(st.floats(-30, 0, width=32), min_size=4, max_size=4)


def _tree(group: str = "g-0", *, teacher: Sequence[float] | None = None) -> MergedTree:
    """A tree of random samples; its teacher gives its entries these values, in turn."""
    tree = merge(agent_samples(np.random.default_rng(0)), group)
    if teacher is None:
        return tree
    count = len(tree.entry_token) // 4
    values = np.resize(np.asarray(teacher, "<f4"), count)
    return msgspec.structs.replace(tree, entry_teacher_logprob=values.tobytes())


@pytest.mark.slow
@given(VALUES, st.floats(0.1, 2), st.floats(0, 2))
def test_a_token_gets_the_teachers_difference_bounded_beside_its_reward(
    teacher: list[float], weight: float, reward_weight: float
) -> None:
    forest = read_tree(_tree(teacher=teacher))
    settings = Distillation(url="http://t", weight=weight, reward_weight=reward_weight)
    seen = distilled(forest, settings).entry_advantage_E
    difference = [
        min(max(t - b, -10.0), 10.0)
        for t, b in zip(forest.entry_teacher_E, forest.entry_logprob_E, strict=True)
    ]
    wanted = reward_weight * forest.entry_advantage_E + weight * np.array(difference)
    assert seen == pytest.approx(wanted, rel=1e-12)


def test_without_a_teacher_nothing_changes() -> None:
    forest = read_tree(_tree())
    assert distilled(forest, None) is forest
    assert kl_teacher([forest]) == 0.0


def test_a_teacher_that_agrees_leaves_the_rewards_alone() -> None:
    tree = _tree()
    agreed = msgspec.structs.replace(tree, entry_teacher_logprob=tree.entry_logprob)
    forest = read_tree(agreed)
    assert np.array_equal(distilled(forest, TEACHER).entry_advantage_E, forest.entry_advantage_E)
    assert kl_teacher([forest]) == 0.0


def test_the_divergence_to_the_teacher_is_the_mean_over_all_tokens() -> None:
    forest = read_tree(_tree(teacher=[-1.0]))
    assert kl_teacher([forest, forest]) == pytest.approx(float(forest.entry_logprob_E.mean()) + 1)


def _configuration(base: Path) -> RunConfiguration:
    only_teacher = msgspec.structs.replace(TEACHER, reward_weight=0.0)
    return msgspec.structs.replace(
        configuration_of(base, steps=40), distillation=only_teacher, optimizer=Optimizer(lr=3e-3)
    )


def test_a_tree_about_which_the_teacher_said_nothing_fails_its_group_only(tmp_path: Path) -> None:
    training = Training(_configuration(save_base(tmp_path / "base")), device="cpu", checkpoint=None)
    trees = [_tree("g-0"), _tree("g-1", teacher=[-1.0])]
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    read = training.read(scheduled_step(0, trees), values)
    reason = "entry_teacher_logprob: the teacher did not answer for its tokens"
    assert read.failed == (("g-0", reason),)
    metrics = training.train(read)
    assert metrics.kl_teacher == pytest.approx(kl_teacher(read.forests))


def _divergence(policy: torch.Tensor, teacher: torch.Tensor) -> float:
    return float((policy.exp() * (policy - teacher)).sum())


def _sampled(policy: torch.Tensor, teacher: torch.Tensor, number: int, step: int) -> MergedTree:
    """A tree of 32 one-token samples after one context, drawn from the policy."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.multinomial(policy.exp(), 32, replacement=True, generator=generator).tolist()
    samples = [
        Sample((5, 6, 7, token), 3, 0.0, (float(policy[token]),), version=step) for token in tokens
    ]
    values = np.array([float(teacher[token]) for token in tokens], "<f4")
    tree = merge(samples, f"g-{step}-{number}")
    return msgspec.structs.replace(tree, entry_teacher_logprob=values.tobytes())


def _next_token(training: Training) -> torch.Tensor:
    """Log-probabilities of every token after the context, under the policy."""
    samples = [Sample((5, 6, 7, token), 3, 0.0, (-1.0,)) for token in range(1, 64)]
    return torch.from_numpy(training._model.read_logprobs(read_tree(merge(samples))))


@pytest.mark.slow
def test_a_policy_that_hears_only_the_teacher_comes_near_it(tmp_path: Path) -> None:
    """40 steps on its own samples; the reverse KL falls to a tenth."""
    training = Training(_configuration(save_base(tmp_path / "base")), device="cpu", checkpoint=None)
    generator = torch.Generator().manual_seed(3)
    teacher = (1.5 * torch.randn(63, generator=generator, dtype=torch.float64)).log_softmax(-1)
    seen = []
    for step in range(40):
        raw = _next_token(training)
        policy = (raw - raw.logsumexp(0)).float().double()
        seen.append(_divergence(policy, teacher))
        padded = [torch.cat([torch.tensor([-torch.inf], dtype=torch.float64), each])
                  for each in (policy, teacher)]  # fmt: skip
        trees = [_sampled(padded[0], padded[1], number, step) for number in range(2)]
        values = {tree.group_id: topics.encode(tree) for tree in trees}
        training.train(training.read(scheduled_step(step, trees), values))
    assert seen[0] > 0.5
    assert seen[-1] < 0.1 * seen[0]
