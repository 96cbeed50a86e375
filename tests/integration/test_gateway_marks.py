"""A gateway goes on committing its marks to a real broker."""

import pytest

from forgemq_bus.kafka import KafkaLog
from forgemq_gateway.marks import NEEDED_GROUP
from tests.unit.gateway.test_marks import (
    FINISHED,
    TOPICS,
    MarkingGateway,
    committed_at_end,
    until,
    write,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_a_gateway_whose_writer_was_taken_over_commits_again(kafka_log: KafkaLog) -> None:
    await kafka_log.create_topics(TOPICS)
    gateway = MarkingGateway(kafka_log, every_s=0.1)
    async with gateway.marking() as marking:
        await write(kafka_log, FINISHED)
        await until(lambda: committed_at_end(kafka_log))
        await (await kafka_log.transaction_writer(NEEDED_GROUP)).close()
        await write(kafka_log, FINISHED)
        await until(lambda: committed_at_end(kafka_log))
        assert not marking.done()
    assert gateway.events() == ["needed_fenced"]
