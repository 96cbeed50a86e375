"""The held-out round of the base model, on which agents and trainer have to agree."""

from forgemq_contracts.run import RunConfiguration, played_queues

START_ROUND = "start"
"""Its name begins so: version 1 is published once it is played."""


def start_round_groups(configuration: RunConfiguration) -> int:
    """Groups of the round of the base model: each held-out task once for each way to sample."""
    evaluation = configuration.evaluation
    ways = int(evaluation.sampled) + int(evaluation.greedy)
    return len(played_queues(configuration)) * evaluation.tasks * ways
