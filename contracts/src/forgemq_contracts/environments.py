"""Agents that are environments of the package `verifiers`: `agent = "verifiers:NAME"` of a queue.

NAME is the name of the module that has the environment's `load_environment`.
"""

_PREFIX = "verifiers:"

EXTRA = "the package verifiers: install the extra 'verifiers' (forgemq-agents[verifiers])"
"""What is missing where such an agent cannot be played."""


def environment_of(agent: str) -> str | None:
    """Name of the environment that this agent is; None if it is a function, or nothing.

    Example: "my_env" of "verifiers:my_env".
    """
    return agent.removeprefix(_PREFIX) if agent.startswith(_PREFIX) else None
