"""Which runs have topics on a broker: for lists of runs, which a deleted run is not in."""

from aiokafka.admin import AIOKafkaAdminClient

from forgemq_bus.kafka_connection import (
    KafkaConnection,
    bound_and_translate,
    client_settings,
    connect,
    retry,
)
from forgemq_bus.names import in_run
from forgemq_contracts.topics import TRAINED_STEPS


async def runs_on_broker(connection: KafkaConnection) -> frozenset[str]:
    """Ids of the runs whose topics this process may look at."""
    admin = AIOKafkaAdminClient(**client_settings(connection))
    doing = "open the admin connection"
    await connect(connection, admin._client, admin.start, admin.close, doing=doing)
    try:
        async with bound_and_translate(connection, "list the runs"):
            topics = await retry(admin.list_topics)
    finally:
        await admin.close()
    suffix = in_run(TRAINED_STEPS.name, run="")
    return frozenset(topic.removesuffix(suffix) for topic in topics if topic.endswith(suffix))
