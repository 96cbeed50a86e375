"""The generated document against AsyncAPI's own schema.

`asyncapi-3.0.0.schema.json` is schemas/3.0.0.json of the npm package @asyncapi/specs 6.11.1
(Apache-2.0), without its examples.
"""

import copy
import json
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from forgemq_contracts import topics
from forgemq_contracts.asyncapi import document

OFFICIAL = Path(__file__).parent / "asyncapi-3.0.0.schema.json"


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    return Draft7Validator(json.loads(OFFICIAL.read_text(encoding="utf-8")))


def test_the_document_is_valid(validator: Draft7Validator):
    assert [error.message for error in validator.iter_errors(document(version="1.0.0"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("misspelt", ["adress", "mesages"])
def test_a_misspelt_key_is_found(validator: Draft7Validator, misspelt: str):
    broken = copy.deepcopy(document(version="1.0.0"))
    broken["channels"]["scored-groups-v1"][misspelt] = "x"
    assert list(validator.iter_errors(broken))


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_every_reference_leads_somewhere():
    whole = document(version="1.0.0")
    for reference in references(whole):
        node = whole
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, f"{reference} leads nowhere"
            node = node[part]


def test_every_topic_has_its_channel_its_producer_and_its_consumers():
    whole = document(version="1.0.0")
    assert set(whole["channels"]) == {topic.name for topic in topics.ALL}
    for topic in topics.ALL:
        operations = {
            name: operation["action"]
            for name, operation in whole["operations"].items()
            if operation["channel"]["$ref"] == f"#/channels/{topic.name}"
        }
        assert operations == {f"{topic.producer}-send-{topic.name}": "send"} | {
            f"{service}-receive-{topic.name}": "receive" for service in topic.consumers
        }


def test_topics_of_a_run_carry_its_prefix_and_shared_ones_do_not():
    channels = document(version="1.0.0")["channels"]
    assert channels["scored-groups-v1"]["address"] == "{run}.scored-groups-v1"
    assert channels["started-runs-v1"]["address"] == "started-runs-v1"
    assert "parameters" not in channels["started-runs-v1"]
