"""A record that a broker refuses for good leaves the writer of its process whole."""

import os
from collections.abc import AsyncIterator, Callable

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from forgemq_bus.errors import LogError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit

pytestmark = pytest.mark.integration

LARGEST_BYTES = 1000
SMALL = Emit(topic="a", partition=0, key=b"", value=b"small")


@pytest.fixture
async def log(kafka_bootstrap: str, new_run_id: Callable[[], str]) -> AsyncIterator[KafkaLog]:
    """Its topic takes smaller records than its writers send."""
    run = new_run_id()
    log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run)
    await log.create_topics({"a": 1})
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    limit = {"max.message.bytes": str(LARGEST_BYTES)}
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, f"{run}.a", configs=limit)])
    await admin.close()
    yield log
    await log.close()


async def test_what_follows_a_refused_record_is_written(log: KafkaLog) -> None:
    writer = await log.writer()
    assert await writer.write(SMALL) == 0
    large = Emit(topic="a", partition=0, key=b"", value=os.urandom(5 * LARGEST_BYTES))
    for count in range(2):
        with pytest.raises(LogError, match="MessageSizeTooLarge"):
            await writer.write(large)
        assert [await writer.write(SMALL) for _ in range(2)] == [1 + 2 * count, 2 + 2 * count]
