"""The held-out rounds on which the processes of a run have to agree."""

from forgemq_contracts.queues import played_queues
from forgemq_contracts.run import RunConfiguration

START_ROUND = "start"
"""The base model's; its name begins so: version 1 is published once it is played."""
END_ROUND = "end"
"""That of the last weights; its name begins so: a run is over once it is played."""

JUDGED_ROUND = "judged"
"""The one round of a run that judges a model and trains none."""


def start_round_groups(configuration: RunConfiguration) -> int:
    """Groups of the round of the base model: each held-out task once for each way to sample."""
    evaluation = configuration.evaluation
    ways = int(evaluation.sampled) + int(evaluation.greedy)
    return len(played_queues(configuration)) * evaluation.tasks * ways


def end_round_groups(configuration: RunConfiguration) -> int:
    """Groups of the round of the last weights, which plays what that of the base model did."""
    return start_round_groups(configuration)
