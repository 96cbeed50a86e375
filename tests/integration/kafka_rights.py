"""The rights of the production overlay's Kafka users, as a broker takes them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

SCRIPT = Path(__file__).parents[2] / "deploy/kubernetes/kafka_users.py"
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Alter": AclOperation.ALTER,
    "Delete": AclOperation.DELETE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}
KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactionalId": ResourceType.TRANSACTIONAL_ID,
    "cluster": ResourceType.BROKER,
}


def rights_of(run: str) -> dict[str, list[dict]]:
    """Rights by user, as the script of the overlay writes them for a run of this name."""
    specification = importlib.util.spec_from_file_location("kafka_users", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return {
        each["metadata"]["name"]: each["spec"]["authorization"]["acls"]
        for each in module.users(run=run)
    }


def bindings(run: str) -> list[AclBinding]:
    """All rights of all users, each once."""
    return list(dict.fromkeys(_bindings(run)))


def _bindings(run: str) -> Iterator[AclBinding]:
    for user, rules in rights_of(run).items():
        for rule in rules:
            resource = rule["resource"]
            prefixed = resource.get("patternType") == "prefix"
            for operation in rule["operations"]:
                yield AclBinding(
                    KINDS[resource["type"]],
                    resource.get("name", "kafka-cluster"),
                    ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL,
                    f"User:{user}",
                    "*",
                    OPERATIONS[operation],
                    AclPermissionType.ALLOW,
                )
