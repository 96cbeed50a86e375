"""Four updates a step teach more than one on the same samples, and nothing if returns are noise.

A bandit for the real trainer, without broker and engine: a prompt of one kind of four, one sampled
token of 64, and a reward of 1 for the 16 tokens of the prompt's kind. Each step plays 16 episodes
of each of 8 prompts with the newest weights, from a generator of the seed. Success is exact: the
probability of a right token, read from the model. The seeds were chosen before any was run.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts import topics
from forgemq_contracts.run import Optimizer
from forgemq_contracts.updates import Updates
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    Sample,
    configuration_of,
    make_model,
    merge,
    save_base,
    scheduled_step,
)

pytestmark = pytest.mark.slow

SEEDS = (10, pytest.param(11, marks=pytest.mark.long), pytest.param(12, marks=pytest.mark.long))
STEPS = 10
EPISODES = 16
PROMPTS = tuple((first, 50) for first in range(1, 9))
TOKENS = 64
KINDS = 4
FOUR = Updates(minibatches=4)


def is_right(prompt: tuple[int, ...], tokens: np.ndarray) -> np.ndarray:
    """For each token, whether it answers this prompt."""
    return tokens % KINDS == prompt[0] % KINDS


@dataclass
class Bandit:
    """The task, played by the trainer's model as transformers runs it."""

    training: Training
    plain: torch.nn.Module
    generator: np.random.Generator
    is_shuffled: bool

    def logprobs(self) -> np.ndarray:
        """Of every token behind every prompt, by the newest weights."""
        self.plain.load_state_dict(self.training.model.state_dict())
        with torch.no_grad():
            logits = self.plain(input_ids=torch.tensor(PROMPTS), use_cache=False).logits[:, -1]
        return logits.double().log_softmax(-1).numpy()

    def success(self) -> float:
        """Probability of a right token, over the prompts."""
        every = np.arange(TOKENS)
        chances = np.exp(self.logprobs())
        rows = zip(PROMPTS, chances, strict=True)
        return float(np.mean([row[is_right(prompt, every)].sum() for prompt, row in rows]))

    def group(self, prompt: tuple[int, ...], logprobs: np.ndarray) -> list[Sample]:
        """The episodes of one prompt, each compared with the group's mean."""
        chances = np.exp(logprobs)
        tokens = self.generator.choice(TOKENS, size=EPISODES, p=chances / chances.sum())
        returns = is_right(prompt, tokens).astype(float)
        if self.is_shuffled:
            self.generator.shuffle(returns)
        return [
            Sample(
                tokens=(*prompt, int(token)),
                first_sampled=len(prompt),
                advantage=float(value - returns.mean()),
                behaviour=(float(logprobs[token]),),
            )
            for token, value in zip(tokens, returns, strict=True)
        ]

    def train_step(self, step: int) -> None:
        """Play every prompt, and train the groups as one step."""
        rows = zip(PROMPTS, self.logprobs(), strict=True)
        trees = [merge(self.group(*row), f"g-{number}") for number, row in enumerate(rows)]
        values = {tree.group_id: topics.encode(tree) for tree in trees}
        self.training.train(self.training.read(scheduled_step(step, trees), values))


def trained(base: Path, *, seed: int, updates: Updates, is_shuffled: bool = False) -> float:
    """Success after the last step of a run."""
    configuration = msgspec.structs.replace(
        configuration_of(base, steps=STEPS),
        updates=updates,
        optimizer=Optimizer(lr=3e-3, eps=1e-8),
        seed=seed,
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    plain = make_model("qwen3", torch.float32)
    bandit = Bandit(training, plain, np.random.default_rng(seed), is_shuffled)
    before = bandit.success()
    assert before == pytest.approx(0.24, abs=0.01), "one token of four is right by chance"
    for step in range(STEPS):
        bandit.train_step(step)
    return bandit.success()


@pytest.mark.parametrize("seed", SEEDS)
def test_four_updates_a_step_learn_more_of_as_many_samples_than_one(
    tmp_path: Path, seed: int
) -> None:
    base = save_base(tmp_path / "base")
    one = trained(base, seed=seed, updates=Updates())
    four = trained(base, seed=seed, updates=FOUR)
    assert (one > 0.5, four > 0.75) == (True, True), (one, four)
    assert four > one + 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_with_returns_shuffled_inside_each_group_four_updates_a_step_learn_nothing(
    tmp_path: Path, seed: int
) -> None:
    base = save_base(tmp_path / "base")
    assert trained(base, seed=seed, updates=FOUR, is_shuffled=True) < 0.4
