"""What a run has on a broker beyond its records' readers: topics and consumer groups, to delete.

For the command that deletes a run; no service deletes a topic or a group.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DeleteGroupsRequest
from msgspec import Struct

from forgemq_bus.errors import LogError
from forgemq_bus.kafka_connection import (
    RETRY_PAUSE_S,
    KafkaConnection,
    bound_and_translate,
    client_settings,
    connect,
    retry,
)
from forgemq_bus.names import in_run

ENDED_STATES = ("Empty", "Dead")
"""States of a consumer group without members, as the broker names them."""

_DONE = (0, kafka_errors.UnknownTopicOrPartitionError.errno, kafka_errors.GroupIdNotFound.errno)
"""Deleted now, or before."""


class RunOnBroker(Struct, frozen=True, kw_only=True):
    """Names on the broker, sorted; `joined` are the groups that have members now."""

    topics: tuple[str, ...]
    groups: tuple[str, ...]
    joined: tuple[str, ...]


class KafkaRemoval:
    """Finds and deletes what a run has on a broker; use `kafka_removal` to open one."""

    def __init__(self, connection: KafkaConnection, admin: AIOKafkaAdminClient) -> None:
        self._connection = connection
        self._admin = admin

    async def find(self, run: str) -> RunOnBroker:
        """All topics and consumer groups of the run; those of other runs do not count."""
        prefix = in_run("", run=run)
        async with bound_and_translate(self._connection, f"list what run {run} has"):
            topics = await retry(self._admin.list_topics)
            listed = await retry(self._admin.list_consumer_groups)
            groups = sorted(name for name, *_ in listed if name.startswith(prefix))
            joined = [name for name in groups if await self._state(name) not in ENDED_STATES]
        return RunOnBroker(
            topics=tuple(sorted(topic for topic in topics if topic.startswith(prefix))),
            groups=tuple(groups),
            joined=tuple(joined),
        )

    async def delete(self, found: RunOnBroker) -> None:
        """Delete the groups, then the topics; what is gone already is no error.

        Raises:
            LogError: the broker refuses one; the message names it.
        """
        async with bound_and_translate(self._connection, "delete consumer groups"):
            for group in found.groups:
                await self._delete_group(group)
        async with bound_and_translate(self._connection, "delete topics"):
            if found.topics:
                response = await self._admin.delete_topics(list(found.topics))
                for topic, code, *_ in response.topic_error_codes:
                    _check(topic, code)
            # The answer comes before every broker has forgotten the topics.
            while set(await self._admin.list_topics()) & set(found.topics):  # noqa: ASYNC110
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _state(self, group: str) -> str:
        (response,) = await retry(lambda: self._admin.describe_consumer_groups([group]))
        return str(response.groups[0][2])

    async def _delete_group(self, group: str) -> None:
        node = await retry(lambda: self._admin.find_coordinator(group))
        response = await self._admin._client.send(node, DeleteGroupsRequest([group]))
        for name, code in response.results:
            _check(name, code)


@asynccontextmanager
async def kafka_removal(connection: KafkaConnection) -> AsyncIterator[KafkaRemoval]:
    """Open a `KafkaRemoval`; its connection is closed at the end of the block."""
    admin = AIOKafkaAdminClient(**client_settings(connection))
    doing = "open the admin connection"
    await connect(connection, admin._client, admin.start, admin.close, doing=doing)
    try:
        yield KafkaRemoval(connection, admin)
    finally:
        await admin.close()


def _check(name: str, code: int) -> None:
    if code not in _DONE:
        raise LogError(f"delete {name}: {kafka_errors.for_code(code).__name__}")
