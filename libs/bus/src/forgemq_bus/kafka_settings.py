"""Reads settings of brokers and topics, as far as this process may."""

from collections.abc import Sequence
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from forgemq_bus.setting_faults import BROKER_SETTINGS, TOPIC_SETTINGS, Settings, TopicFacts

_NOT_READABLE = (
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.IncompatibleBrokerVersion,
    kafka_errors.InvalidRequestError,
)
"""A managed service may show no settings; a run works there all the same."""


async def broker_settings(admin: AIOKafkaAdminClient) -> dict[int, Settings]:
    """Every broker of the cluster by its id, with the settings that may be read."""
    cluster = await admin.describe_cluster()
    nodes = [int(broker["node_id"]) for broker in cluster["brokers"]]
    wanted = dict.fromkeys(BROKER_SETTINGS)
    resources = [ConfigResource(ConfigResourceType.BROKER, str(node), wanted) for node in nodes]
    found = await _described(admin, resources)
    return {node: found.get(str(node), {}) for node in nodes}


async def topic_facts(admin: AIOKafkaAdminClient, topics: Sequence[str]) -> dict[str, TopicFacts]:
    """Those of these topics that exist, by name."""
    described = await admin.describe_topics(sorted(topics))
    replicas = {
        topic["topic"]: min(len(partition["replicas"]) for partition in topic["partitions"])
        for topic in described
        if topic["error_code"] == 0
    }
    wanted = dict.fromkeys(TOPIC_SETTINGS)
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, wanted) for name in replicas]
    settings = await _described(admin, resources)
    return {name: TopicFacts(count, settings.get(name, {})) for name, count in replicas.items()}


async def _described(
    admin: AIOKafkaAdminClient, resources: Sequence[ConfigResource]
) -> dict[str, Settings]:
    if not resources:
        return {}
    try:
        responses: list[Any] = await admin.describe_configs(list(resources))
    except _NOT_READABLE:
        return {}
    found: dict[str, Settings] = {}
    for code, _message, _type, name, entries in (r for each in responses for r in each.resources):
        error = kafka_errors.for_code(code)
        if code and not issubclass(error, _NOT_READABLE):
            raise error(f"settings of {name}")
        # An entry is its name, its value and what a reader of settings does not need.
        found[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
    return found
