"""The document of a run that judges a model: one domain of a run's document, or a domain alone."""

import re

from forgemq_contracts.environments import environment_of
from forgemq_launcher.core.configuration import ConfigurationError, Document, TomlValue

HELD_OUT_TASKS = 64
"""Held-out tasks of a domain that no file describes: Wilson's interval of a rate is then at most
0.24 wide."""

_OF_TRAINING = (
    *("live", "speculation", "stages", "distillation", "lora"),
    *("loss", "updates", "optimizer"),
)
"""Tables that say what is trained and how. A head of speculation belongs to the file's own model,
and a model that is judged has its adapters in its weights."""


def domains_in(values: Document) -> tuple[str, ...]:
    """The domains of the document's queues."""
    return tuple(str(queue.get("domain")) for queue in _queues(values))


def judging(values: Document, *, model: str, domain: str) -> Document:
    """The document of a run that judges this model on the held-out tasks of one domain.

    The other domains and what says how the run trains are left out.

    Raises:
        ConfigurationError: the document has no such domain, or no held-out tasks.
    """
    kept = [queue for queue in _queues(values) if queue.get("domain") == domain]
    if not kept:
        known = ", ".join(domains_in(values))
        raise ConfigurationError(f"--domain: there is no domain {domain!r}; there are {known}")
    if not kept[0].get("agent"):
        raise ConfigurationError(f"queues.{domain}.agent: none plays its held-out tasks")
    evaluation = values.get("evaluation")
    if not isinstance(evaluation, dict) or not evaluation.get("tasks"):
        raise ConfigurationError(
            "evaluation.tasks: the file has no held-out tasks: set evaluation.tasks=N"
        )
    own = values.get("model")
    rest = {name: value for name, value in values.items() if name not in _OF_TRAINING}
    return {
        **rest,
        "model": {**(own if isinstance(own, dict) else {}), "path": model},
        "queues": kept,
    }


def domain_alone(domain: str, *, model: Document) -> Document:
    """The document of a run whose only domain is this one, before its overrides.

    Args:
        domain: Its name, or an environment that is its agent, such as `verifiers:my_env`.
        model: Table of the model.
    """
    agent = {} if environment_of(domain) is None else {"agent": domain}
    return {
        "seed": 0,
        "model": model,
        "queues": [{"domain": domain_of(domain), **agent}],
        "evaluation": {"tasks": HELD_OUT_TASKS},
        "trainer": {"steps": 1},
    }


def domain_of(name: str) -> str:
    """The name of a domain: as given, or made of an environment's."""
    environment = environment_of(name)
    if environment is None:
        return name
    return re.sub(r"[^a-z0-9_]", "_", environment.lower())[:40]


def _queues(values: Document) -> list[dict[str, TomlValue]]:
    queues = values.get("queues")
    return [each for each in queues if isinstance(each, dict)] if isinstance(queues, list) else []
