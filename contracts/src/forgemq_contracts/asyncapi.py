"""The AsyncAPI 3.0 document of all topics, from the registry and the structs."""

from typing import Any

from forgemq_contracts import topics
from forgemq_contracts.compatibility import schemas
from forgemq_contracts.topics import Topic

_SCHEMA_REF = "#/components/schemas/{name}"
_CONTENT_TYPE = "application/vnd.msgpack"


def document(*, version: str) -> dict[str, Any]:
    """The whole document as plain values, ready for YAML."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "ForgeMQ",
            "version": version,
            "description": "Agent reinforcement learning over a message queue. Every record is a "
            "fact that happened. Within a major, fields are only added, with defaults.",
        },
        "defaultContentType": _CONTENT_TYPE,
        "servers": {
            "broker": {
                "host": "{bootstrap}",
                "protocol": "kafka",
                "description": "Apache Kafka 4.2 or later.",
                "variables": {"bootstrap": {"default": "127.0.0.1:9092"}},
            }
        },
        "channels": {topic.name: _channel(topic) for topic in topics.ALL},
        "operations": dict(
            operation for topic in topics.ALL for operation in _operations(topic).items()
        ),
        "components": {
            "messages": {topic.record.__name__: _message(topic) for topic in topics.ALL},
            "schemas": schemas(ref_template=_SCHEMA_REF),
        },
    }


def _channel(topic: Topic) -> dict[str, Any]:
    record = topic.record.__name__
    channel: dict[str, Any] = {
        "address": topic.name if topic in topics.SHARED else f"{{run}}.{topic.name}",
        "messages": {record: {"$ref": f"#/components/messages/{record}"}},
        "x-key": topic.key,
        "x-partitioned-by": topic.partitioned_by,
        "x-transactional": topic.is_transactional,
        "x-retention": "needed" if topic.needed_by else "run",
        "x-needed-by": sorted(topic.needed_by),
        "x-producer": topic.producer,
        "x-consumers": sorted(topic.consumers),
    }
    if topic not in topics.SHARED:
        channel["parameters"] = {"run": {"description": "Id of the run."}}
    if topic.has_dlq:
        channel["x-dead-letters"] = topic.dlq_name
        channel["x-dead-letters-by"] = topic.dead_letters_by
    return channel


def _operations(topic: Topic) -> dict[str, Any]:
    sides = [("send", topic.producer)] + [("receive", name) for name in sorted(topic.consumers)]
    return {
        f"{service}-{action}-{topic.name}": {
            "action": action,
            "channel": {"$ref": f"#/channels/{topic.name}"},
            "summary": f"{service} {'writes' if action == 'send' else 'reads'} {topic.name}.",
            "messages": [{"$ref": f"#/channels/{topic.name}/messages/{topic.record.__name__}"}],
        }
        for action, service in sides
    }


def _message(topic: Topic) -> dict[str, Any]:
    record = topic.record.__name__
    return {
        "name": record,
        "title": record,
        "summary": (topic.record.__doc__ or "").strip().splitlines()[0],
        "contentType": _CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {
                "traceparent": {"type": "string", "description": "W3C trace context."},
                "blob": {
                    "type": "string",
                    "contentEncoding": "base64",
                    "description": "Where the payload is, if it is over the inline limit.",
                },
            },
        },
        "payload": {"$ref": _SCHEMA_REF.format(name=record)},
        "bindings": {"kafka": {"key": {"type": "string"}, "bindingVersion": "0.5.0"}},
    }
