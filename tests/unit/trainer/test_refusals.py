"""Errors that no restart can cure are SettingsErrors: the trainer ends with status 2."""

import re
from types import SimpleNamespace

import pytest

from forgemq_contracts.loss import Loss
from forgemq_contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq_settings.environment import SettingsError
from forgemq_trainer.families import check_supported
from forgemq_trainer.ranks.ranks import RankLaunch, check_world_size
from forgemq_trainer.start_checks import check_expert_ranks, loss_of
from forgemq_trainer.storage.checkpoint import OtherConfigurationError, OtherRunError


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(SettingsError, match="model_type 'gpt2' is not supported"):
        check_supported(SimpleNamespace(model_type="gpt2"))


def test_another_number_of_ranks_is_refused():
    with pytest.raises(SettingsError, match=r"trainer\.world_size is 2"):
        check_world_size(RankLaunch(world_size=1), configured=2)


@pytest.mark.parametrize("error", [OtherRunError, OtherConfigurationError])
def test_checkpoints_of_another_run_or_configuration_are_refused(error):
    assert issubclass(error, SettingsError)


@pytest.mark.parametrize("kind", ["no_such_loss", "no.such.module:loss", "json:no_such_function"])
def test_a_loss_name_without_a_function_is_refused_by_name(kind):
    run = RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="m"),
        queues=(Queue(domain="d", task_source="m:f", agent="m:g"),),
        trainer=Trainer(steps=1),
        loss=Loss(kind=kind),
    )
    with pytest.raises(SettingsError, match=rf"loss\.kind {kind}: "):
        loss_of(run)


@pytest.mark.parametrize(
    ("sizes", "expert_ranks", "message"),
    [
        ({"num_experts": 0}, 2, "model_type 'qwen3_moe' has no experts: it must be 1"),
        ({}, 4, "trainer.expert_ranks must divide the model's 6 experts, got 4"),
        ({"hidden_size": 63}, 3, "2 must divide hidden_size, which is 63"),
        ({"moe_intermediate_size": 25}, 3, "2 must divide an expert's size, which is 25"),
    ],
)
def test_experts_that_ranks_cannot_share_out_are_refused_by_name(sizes, expert_ranks, message):
    model = {"num_experts": 6, "hidden_size": 64, "moe_intermediate_size": 24} | sizes
    trainer = Trainer(steps=1, world_size=2 * expert_ranks, expert_ranks=expert_ranks)
    with pytest.raises(SettingsError, match=re.escape(message)):
        check_expert_ranks(SimpleNamespace(model_type="qwen3_moe", **model), trainer)
    check_expert_ranks(SimpleNamespace(**model), Trainer(steps=1, world_size=2))


def test_only_the_ranks_of_a_replica_share_out_the_rows_of_an_expert():
    model = SimpleNamespace(num_experts=6, hidden_size=63, moe_intermediate_size=25)
    check_expert_ranks(model, Trainer(steps=1, world_size=4, shard_ranks=2, expert_ranks=2))
