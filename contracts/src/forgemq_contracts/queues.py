"""What follows from the settings of a run's queues: windows, who asks for groups, whose loss."""

from forgemq_contracts.run import Queue, RunConfiguration


def window_of(queue: Queue) -> int:
    """W of a queue: as configured, else 0.3 N rounded up."""
    return queue.window if queue.window is not None else -(-3 * queue.slots // 10)


def played_queues(configuration: RunConfiguration) -> tuple[Queue, ...]:
    """Queues whose groups the run's own agents ask for and play; the others' come from outside."""
    return tuple(queue for queue in configuration.queues if queue.agent)


def supplied_queues(configuration: RunConfiguration) -> tuple[Queue, ...]:
    """Queues whose training groups the agents process asks for: played, or supervised by a file."""
    return tuple(
        queue
        for queue in configuration.queues
        if queue.agent or (queue.supervised is not None and queue.task_file)
    )


def supervised_fractions(configuration: RunConfiguration) -> dict[str, float]:
    """By supervised domain, its fraction of the loss."""
    return {
        queue.domain: queue.supervised.fraction
        for queue in configuration.queues
        if queue.supervised is not None
    }
