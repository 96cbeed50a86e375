"""What a run's configuration has to allow before it trains: its memory and loss."""

import importlib
from typing import Any, cast

from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration, Trainer
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.loss import LossFunction, UserLoss, loss_function
from forgemq_trainer.core.memory import least_budget_bytes
from forgemq_trainer.model_sizes import expert_count


def check_budget(configuration: RunConfiguration, policy: PolicyModel) -> None:
    """Refuse a budget in which an episode may become too long to train.

    Raises:
        SettingsError: Naming the least budget for model.context_tokens_max.
    """
    trainer, context_tokens_max = configuration.trainer, configuration.model.context_tokens_max
    least = least_budget_bytes(
        policy.shape, longest_path=context_tokens_max, head_chunk=trainer.head_chunk_tokens
    )
    if trainer.memory_budget_bytes < least:
        raise SettingsError(
            f"trainer.memory_budget_bytes is {trainer.memory_budget_bytes}; an episode of "
            f"model.context_tokens_max = {context_tokens_max} tokens needs {least}: raise the one "
            "or lower the other"
        )


def check_expert_ranks(config: Any, trainer: Trainer) -> None:  # noqa: ANN401  # of transformers
    """Refuse experts that so many ranks cannot share out evenly.

    Raises:
        SettingsError: Names the field and the rule.
    """
    if trainer.expert_ranks == 1:
        return
    count = expert_count(config)
    if not count:
        raise SettingsError(
            f"trainer.expert_ranks is {trainer.expert_ranks}, but model_type {config.model_type!r} "
            "has no experts: it must be 1"
        )
    if count % trainer.expert_ranks:
        raise SettingsError(
            f"trainer.expert_ranks must divide the model's {count} experts, "
            f"got {trainer.expert_ranks}"
        )
    holders = shard_ranks_of(trainer) // trainer.expert_ranks
    expert_size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    for name, size in (("hidden_size", config.hidden_size), ("an expert's size", expert_size)):
        if size % holders:
            raise SettingsError(
                "trainer.shard_ranks / trainer.expert_ranks ranks hold the same experts, each an "
                f"equal part of every row: {holders} must divide {name}, which is {size}"
            )


def loss_of(configuration: RunConfiguration) -> LossFunction:
    """The run's loss; raises SettingsError if its name leads to no function."""
    kind = configuration.loss.kind
    try:
        if ":" not in kind:
            return loss_function(configuration.loss)
        module, _, name = kind.partition(":")
        # The user's function is called with our types; its own annotations are not checked.
        user = cast(UserLoss, getattr(importlib.import_module(module), name))
    except (ValueError, ImportError, AttributeError) as error:
        raise SettingsError(f"loss.kind {kind}: {error}") from error
    return loss_function(configuration.loss, user=user)
