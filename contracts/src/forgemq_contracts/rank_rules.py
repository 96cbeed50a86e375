"""How many ranks of the trainer share the model, and what that number must be."""

from forgemq_contracts.run import Trainer


def shard_ranks_of(trainer: Trainer) -> int:
    """Ranks that hold the model's parameters once: as configured, else all."""
    return trainer.world_size if trainer.shard_ranks is None else trainer.shard_ranks


def check_ranks(trainer: Trainer) -> None:
    """Refuse ranks that cannot be divided into groups which each hold the model.

    Raises:
        ValueError: Names the field and the rule.
    """
    if trainer.world_size % shard_ranks_of(trainer):
        raise ValueError(
            "trainer.shard_ranks must divide trainer.world_size, "
            f"got {trainer.shard_ranks} and {trainer.world_size}"
        )
