"""Whether the agents of a run can play what its queues admit."""

from forgemq_contracts.run import RunConfiguration

PLAYED_SHARE_MIN = 0.25
"""Below this share of N x G, admitted groups wait for a player much longer than they are played."""


def shortage(configuration: RunConfiguration) -> str:
    """The warning about too few players; "" if there are enough."""
    played = configuration.episodes.concurrent_max
    admitted = sum(queue.slots * queue.group_size for queue in configuration.queues)
    if played >= PLAYED_SHARE_MIN * admitted:
        return ""
    parts = ", ".join(f"{q.domain}: {q.slots} x {q.group_size}" for q in configuration.queues)
    return (
        f"episodes.concurrent_max is {played}, and the queues admit N x G = {admitted} episodes "
        f"({parts}): most admitted groups wait for a player; raise it, run more agents processes, "
        "or lower slots (N)"
    )
