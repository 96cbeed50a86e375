"""Names on the broker: everything of a run starts with `<run>.`, the shared topics with nothing."""

from forgemq_bus.log import Place
from forgemq_contracts import topics

SHARED_TOPICS = frozenset(topic.name for topic in topics.SHARED)


def broker_topic(topic: str, *, run: str) -> str:
    """Name on the broker of a contract's topic."""
    return topic if topic in SHARED_TOPICS else f"{run}.{topic}"


def contract_topic(name: str, *, run: str) -> str:
    """Name in the contracts of a broker's topic; the inverse of `broker_topic`."""
    return name.removeprefix(f"{run}.")


def broker_place(place: Place, *, run: str) -> Place:
    """The same partition under its topic's name on the broker."""
    return Place(broker_topic(place.topic, run=run), place.partition)


def in_run(name: str, *, run: str) -> str:
    """Name on the broker of a consumer group or transactional id of this run."""
    return f"{run}.{name}"
