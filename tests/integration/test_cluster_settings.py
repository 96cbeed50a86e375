"""Settings of topics on a real broker: set when a run creates them, and named if they are weak."""

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from forgemq_bus.kafka import KafkaLog
from forgemq_bus.names import broker_topic
from forgemq_contracts import topics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def settings_of(admin: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    ((_, _, _, _, entries),) = response.resources
    return {entry[0]: entry[1] for entry in entries}


async def test_topics_get_the_settings_of_a_run_and_weak_ones_are_named(
    kafka_log: KafkaLog, kafka_bootstrap: str
):
    scored, journal = topics.SCORED_GROUPS.name, topics.MERGER_JOURNAL.name
    await kafka_log.create_topics({scored: 1})
    assert await kafka_log.setting_faults() == []
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    try:
        found = await settings_of(admin, broker_topic(scored, run=kafka_log._run))
        by_hand = broker_topic(journal, run=kafka_log._run)
        weak = {"retention.ms": "3600000", "cleanup.policy": "compact"}
        await admin.create_topics([NewTopic(by_hand, 1, -1, {}, weak)])
    finally:
        await admin.close()
    assert found["min.insync.replicas"] == "1"
    assert (found["retention.ms"], found["retention.bytes"]) == ("-1", "-1")
    assert (found["cleanup.policy"], found["unclean.leader.election.enable"]) == ("delete", "false")
    faults = await kafka_log.setting_faults()
    assert {(fault.setting, fault.value, fault.where) for fault in faults} == {
        ("retention.ms", "3600000", f"topic {by_hand}"),
        ("cleanup.policy", "compact", f"topic {by_hand}"),
        ("max.message.bytes", "1048588", f"topic {by_hand}"),
    }
