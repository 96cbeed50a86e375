"""Several optimizer updates on one step's groups, against a loop over single requests."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import Optimizer, RunConfiguration
from forgemq_contracts.steps import ScheduledStep, TrainingMetrics
from forgemq_contracts.updates import Updates
from forgemq_trainer.core.loss import Entries, loss_function
from forgemq_trainer.core.minibatches import minibatches
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.step_updates import StepUpdates, TakenUpdates
from forgemq_trainer.training import Training
from forgemq_trainer.whole_model import WholeModel
from tests.unit.trainer.rank_life import Life, save_checkpoint, store_of
from tests.unit.trainer.scene import (
    Sample,
    agent_samples,
    configuration_of,
    make_model,
    merge,
    sample_entries,
    save_base,
    scheduled_step,
)

Groups = Sequence[Sequence[Sample]]
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-6)
"""With a large eps a gradient that should be 0 moves no weight by what rounding made of it."""

FOUR = Updates(minibatches=2, passes=2)


def groups_of(*, seed: int = 0) -> Groups:
    """Three groups of one task each."""
    generator = np.random.default_rng(seed)
    return [agent_samples(generator, rollouts=2, turns=2) for _ in range(3)]


def exact_configuration(base: Path, updates: Updates, loss: Loss) -> RunConfiguration:
    """A run whose optimizer damps rounding."""
    return msgspec.structs.replace(
        configuration_of(base), optimizer=OPTIMIZER, updates=updates, loss=loss
    )


def exact_model(base: Path, configuration: RunConfiguration) -> WholeModel:
    """The base model in float64, with an optimizer."""
    model = WholeModel(configuration, None, device="cpu")
    model.module.double()
    model.updater = Updater(model.module, OPTIMIZER)
    return model


def in_float64(base: Path, updates: Updates, loss: Loss) -> tuple[nn.Module, TakenUpdates]:
    """The model after one step of these updates, and what they did."""
    configuration = exact_configuration(base, updates, loss)
    model = exact_model(base, configuration)
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups_of())]
    taken = StepUpdates(
        model,
        configuration,
        groups=scheduled_step(0, trees).groups,
        forests=[read_tree(tree) for tree in trees],
        loss=loss_function(loss),
    )
    taken.begin()
    return model.module, taken.take(lr=OPTIMIZER.lr)


def request_logprob(model: nn.Module, sample: Sample) -> Tensor:
    """Log-probabilities of one request's sampled tokens, with torch's causal attention."""
    tokens = torch.tensor([sample.tokens])
    logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
    places = torch.arange(sample.first_sampled, len(sample.tokens))
    return logits[places - 1].log_softmax(-1)[torch.arange(len(places)), tokens[0, places]]


def per_request(base: Path, updates: Updates, loss: Loss) -> nn.Module:
    """The model after the same updates, each request by itself."""
    model = make_model("qwen3", torch.float32).double()
    model.load_state_dict(exact_model(base, configuration_of(base)).module.state_dict())
    model.set_attn_implementation("sdpa")
    make_precise(model)
    updater, function, groups = Updater(model, OPTIMIZER), loss_function(loss), groups_of()
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups)]
    parts = minibatches(scheduled_step(0, trees).groups, count=updates.minibatches)
    for part in parts * updates.passes:
        samples = [sample for group in part for sample in groups[group]]
        count = sum(len(sample.behaviour) for sample in samples)
        for sample in samples:
            entries = sample_entries(sample, torch.float64)
            (function(request_logprob(model, sample), entries).loss.sum() / count).backward()
        updater.update(lr=OPTIMIZER.lr)
    return model


def distance(left: nn.Module, right: nn.Module) -> float:
    """Largest ||difference|| / ||weights|| over the parameters."""
    ours, theirs = (
        {name: p.detach() for name, p in model.named_parameters()} for model in (left, right)
    )
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cispo", "ppo_clip"])
def test_the_weights_are_those_of_as_many_updates_over_single_requests(
    tmp_path: Path, kind: str
) -> None:
    base, loss = save_base(tmp_path / "base"), Loss(kind=kind)
    model, taken = in_float64(base, FOUR, loss)
    expected = per_request(base, FOUR, loss)
    assert (len(taken.grad_norms), taken.skipped) == (4, 0)
    assert distance(model, expected) < 1e-12
    once = per_request(base, Updates(), loss)
    assert distance(model, once) > 1e-4, "one update gives other weights"


def test_later_updates_have_other_ratios_to_the_same_behaviour(tmp_path: Path) -> None:
    _, taken = in_float64(save_base(tmp_path / "base"), Updates(passes=3), Loss())
    values = taken.values
    behaviour, logprob = values.behaviour_E.reshape(3, -1), values.logprob_E.reshape(3, -1)
    assert np.array_equal(behaviour[0], behaviour[1])
    assert np.array_equal(behaviour[0], behaviour[2])
    assert np.abs(logprob[1] - logprob[0]).max() > 1e-3
    assert np.abs(logprob[2] - logprob[1]).max() > 1e-3


def _step(number: int = 0, *, seed: int = 0) -> tuple[ScheduledStep, dict[str, bytes]]:
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups_of(seed=seed))]
    return scheduled_step(number, trees), {t.group_id: topics.encode(t) for t in trees}


def _trained(configuration: RunConfiguration) -> tuple[Training, TrainingMetrics]:
    training = Training(configuration, device="cpu", checkpoint=None)
    scheduled, values = _step()
    return training, training.train(training.read(scheduled, values))


def _weights(training: Training) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def test_a_step_of_several_updates_is_one_version_and_its_metrics_are_over_all(
    tmp_path: Path,
) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"))
    once, one = _trained(configuration)
    several, many = _trained(msgspec.structs.replace(configuration, updates=FOUR))
    assert (once.version, several.version) == (1, 1)
    assert (one.updates, many.updates) == (1, 4)
    assert one.loss_tokens == many.loss_tokens == sum(g.loss_tokens for g in _step()[0].groups)
    assert one.tree_tokens == many.tree_tokens
    # Only the first update has the ratios of the step's beginning.
    assert many.ratio_mean != pytest.approx(one.ratio_mean, rel=1e-3)


def test_one_minibatch_and_one_pass_change_nothing(tmp_path: Path) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"))
    once, one = _trained(configuration)
    same, as_one = _trained(msgspec.structs.replace(configuration, updates=Updates()))
    assert torch.equal(_weights(once), _weights(same))
    assert one.loss == as_one.loss


def poisoned(logprob: Tensor, entries: Entries) -> Tensor:
    """A loss that is not a number for the group with an advantage above 90."""
    nan = torch.where(entries.advantage > 90, torch.nan, 1.0)
    return -entries.advantage * logprob * nan


def test_an_update_without_a_finite_gradient_is_skipped_and_the_others_are_taken(
    tmp_path: Path,
) -> None:
    configuration = msgspec.structs.replace(
        configuration_of(save_base(tmp_path / "base")),
        loss=Loss(kind=f"{__name__}:poisoned"),
        updates=Updates(minibatches=3),
    )
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{n}") for n in range(3)]
    count = len(trees[1].sample_advantage) // 4
    bad = np.full(count, 99.0, "<f4").tobytes()
    trees[1] = msgspec.structs.replace(trees[1], sample_advantage=bad)
    training = Training(configuration, device="cpu", checkpoint=None)
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    metrics = training.train(training.read(scheduled_step(0, trees), values))
    assert (metrics.updates, metrics.updates_skipped, metrics.skipped_in_a_row) == (2, 1, 0)
    assert bool(_weights(training).isfinite().all())


LIVES = {"updates": 100}
"""How many more losses `mortal` gives."""


class CutShortError(Exception):
    """The life of a trainer ended within a step."""


def mortal(logprob: Tensor, entries: Entries) -> Tensor:
    """REINFORCE until it has been asked too often."""
    if not LIVES["updates"]:
        raise CutShortError
    LIVES["updates"] -= 1
    return -entries.advantage * logprob


def test_a_step_that_was_cut_short_is_trained_again_to_the_same_bytes(tmp_path: Path) -> None:
    """A life ends after two of four updates of step 1; the next one begins after step 0."""
    save_base(tmp_path / "base")
    configuration = msgspec.structs.replace(
        Life(tmp_path, ()).configuration(world_size=1),
        updates=FOUR,
        loss=Loss(kind=f"{__name__}:mortal"),
    )
    store = store_of(tmp_path, configuration)
    whole = Training(configuration, device="cpu", checkpoint=None)
    save_checkpoint(store, whole, whole.train(whole.read(*_step())))
    cut, again = (
        Training(configuration, device="cpu", checkpoint=store.newest_checkpoint())
        for _ in range(2)
    )
    before = _weights(cut)
    LIVES["updates"] = 2
    with pytest.raises(CutShortError):
        cut.train(cut.read(*_step(1, seed=1)))
    LIVES["updates"] = 100
    assert not torch.equal(_weights(cut), before), "two updates were taken"
    metrics = [t.train(t.read(*_step(1, seed=1))) for t in (whole, again)]
    assert torch.equal(_weights(whole), _weights(again))
    assert metrics[0].loss == metrics[1].loss


def test_a_step_whose_groups_all_failed_takes_no_update(tmp_path: Path) -> None:
    configuration = msgspec.structs.replace(
        configuration_of(save_base(tmp_path / "base")), updates=FOUR
    )
    training = Training(configuration, device="cpu", checkpoint=None)
    metrics = training.train(training.read(_step()[0], {}))
    assert (metrics.updates, metrics.loss_tokens, training.version) == (0, 0, 1)
