"""Names on the broker: those of a run start with `<run>.`, those of shared topics do not."""

from functools import lru_cache

from forgemq_bus.log import Place
from forgemq_contracts import topics

# The log in memory asks for the same few hundred with each record.
_PLACES_MAX = 4096

SHARED_TOPICS = frozenset(topic.name for topic in topics.SHARED)


def broker_topic(topic: str, *, run: str) -> str:
    """Name on the broker of a topic of the contracts."""
    return topic if topic in SHARED_TOPICS else f"{run}.{topic}"


def contract_topic(name: str, *, run: str) -> str:
    """Name in the contracts of a topic on the broker; the inverse of `broker_topic`."""
    return name.removeprefix(f"{run}.")


@lru_cache(_PLACES_MAX)
def broker_place(place: Place, *, run: str) -> Place:
    """The same partition under its topic's name on the broker."""
    return Place(broker_topic(place.topic, run=run), place.partition)


def in_run(name: str, *, run: str) -> str:
    """Name on the broker of a consumer group or transactional id of this run."""
    return f"{run}.{name}"
