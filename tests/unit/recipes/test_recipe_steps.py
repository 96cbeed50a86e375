"""Each recipe takes a step of its own settings through the trainer, with its model scaled down."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainingMetrics
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.command_loop import carry_out_commands
from forgemq_trainer.ranks.alone import ALONE, AnyRanks
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.training import Training
from tests.unit.recipes.planned_recipes import run_of
from tests.unit.recipes.scaled_recipes import SCALED_FILES, scaled_config
from tests.unit.trainer.rank_life import store_of
from tests.unit.trainer.rank_scene import START_DEADLINE_S, WORK_DEADLINE_S, RankPair
from tests.unit.trainer.scene import agent_samples, merge, routed, scheduled_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(START_DEADLINE_S + 2 * WORK_DEADLINE_S)]

DTYPE = torch.bfloat16
"""Of every recipe."""


@pytest.fixture(scope="module")
def rank_pair() -> Iterator[RankPair]:
    """Two ranks, for the many that a recipe has."""
    pair = RankPair()
    yield pair
    pair.close()


@dataclass(frozen=True)
class Step:
    """A recipe's step: its folder, its run and its groups."""

    folder: Path
    run: RunConfiguration
    trees: tuple[MergedTree, ...]

    def taken(self, ranks: AnyRanks) -> TrainingMetrics | None:
        """Take it from the base model, and publish version 1; the metrics on rank 0."""
        if isinstance(ranks, Ranks) and ranks.rank > 0:
            carry_out_commands(ranks, device="cpu")
            return None
        training = Training(self.run, device="cpu", checkpoint=None, ranks=ranks)
        values = {tree.group_id: topics.encode(tree) for tree in self.trees}
        step = training.read(scheduled_step(0, self.trees), values)
        assert not step.failed
        metrics = training.train(step)
        store = store_of(self.folder, self.run)
        store.keep_version(store.write_version(training, lineage=1))
        training.end()
        return metrics

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors of version 1."""
        (folder,) = (self.folder / "blobs").rglob("1.1")
        return load_file(folder / "model.safetensors")


def _take(ranks: Ranks, step: Step) -> TrainingMetrics | None:
    return step.taken(ranks)


def _step(recipe: str, base: Path, folder: Path, *, ranks: int) -> Step:
    """The recipe's step with so many ranks; of a mixture the engines record the routes."""
    config = scaled_config(recipe, dtype="bfloat16")
    # At the recipe's rate the warm-up's first step is below what bfloat16 can show.
    overrides = [f"model.path={base}", f"trainer.world_size={ranks}", "optimizer.lr=1e-3"]
    if run_of(SCALED_FILES[recipe]).trainer.expert_ranks > 1:
        overrides.append(f"trainer.expert_ranks={ranks}")
    run = run_of(SCALED_FILES[recipe], *overrides)
    assert run.model.dtype == "bfloat16"
    [queue] = run.queues
    generator = np.random.default_rng(3)
    turns = 1 if queue.domain == "maths" else 3
    groups = [
        agent_samples(generator, rollouts=queue.group_size, turns=turns, vocabulary=500)
        for _ in range(3)
    ]
    trees = [merge(samples, f"g-{number}") for number, samples in enumerate(groups)]
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        chosen = config["num_experts_per_tok"]
        trees = [routed(each, layers=2, top_k=chosen, experts=experts) for each in trees]
    return Step(folder=folder, run=run, trees=tuple(trees))


@pytest.mark.parametrize("recipe", SCALED_FILES)
def test_two_ranks_take_the_step_of_a_recipe_as_one_does_and_publish_what_engines_load(
    recipe: str, tmp_path: Path, rank_pair: RankPair
) -> None:
    """In bfloat16, as the recipe says; it names more ranks than two."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**scaled_config(recipe, dtype="bfloat16"))
    AutoModelForCausalLM.from_config(config).to(DTYPE).save_pretrained(base)
    assert run_of(SCALED_FILES[recipe]).trainer.world_size > 2
    steps = [_step(recipe, base, tmp_path / f"{ranks}", ranks=ranks) for ranks in (2, 1)]
    (found, _), expected = rank_pair.run(_take, steps[0]), steps[1].taken(ALONE)
    assert expected is not None
    assert found.loss_tokens == expected.loss_tokens
    assert found.route_disagreements == expected.route_disagreements
    assert found.skipped_in_a_row == 0
    for field in ("loss", "grad_norm", "entropy"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-2), field
    stored, published = load_file(base / "model.safetensors"), steps[0].published()
    assert {n: t.shape for n, t in published.items()} == {n: t.shape for n, t in stored.items()}
    wide = {name for name, tensor in published.items() if tensor.dtype != DTYPE}
    assert all(name.endswith("e_score_correction_bias") for name in wide)
    matrices = [name for name, tensor in stored.items() if tensor.dim() > 1]
    assert not [name for name in matrices if torch.equal(published[name], stored[name])]
