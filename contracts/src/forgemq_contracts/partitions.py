"""Which partition a record belongs to: explicit functions, never the client's hash."""

import functools
import hashlib
import itertools


# A gateway asks several times for each request.
@functools.lru_cache(maxsize=4096)
def group_partition(group_id: str, *, partitions: int) -> int:
    """Partition of a group in every group-keyed topic of a run."""
    digest = hashlib.blake2b(group_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % partitions


def group_id(*, run: str, domain: str, idempotency_key: str) -> str:
    """Id of the group that this key asks for; the same key always asks for the same group."""
    text = f"{run}\0{domain}\0{idempotency_key}".encode()
    return "g-" + hashlib.blake2b(text, digest_size=8).hexdigest()


def live_group_id(
    *, run: str, domain: str, idempotency_key: str, partition: int, partitions: int
) -> str:
    """Id of a group of live traffic; its partition is the given one, whose owner records it."""
    plain = group_id(run=run, domain=domain, idempotency_key=idempotency_key)
    ids = (f"{plain}-{number}" for number in itertools.count())
    return next(each for each in ids if group_partition(each, partitions=partitions) == partition)


def episode_id(*, group: str, index: int, attempt: int) -> str:
    """Id of one attempt at one episode of a group."""
    return f"{group}.{index}.{attempt}"


def group_of_episode(episode_id: str) -> str:
    """Group of a well-formed id that `episode_id` made."""
    return episode_id.rsplit(".", 2)[0]


def request_id(*, episode: str, parent: str | None, body_digest: str, ordinal: int) -> str:
    """Id of one completion request; a client's retry of the same turn has the same id."""
    text = f"{episode}\0{parent or ''}\0{body_digest}\0{ordinal}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
