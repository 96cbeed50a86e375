"""The generated document against the specification's own schema, and against the structs.

`openapi-3.1.schema.json` is schemas/v3.1/schema.json of the npm package
@seriousme/openapi-schema-validator 2.11.0: the official schema (Apache-2.0), with `$dynamicRef`
replaced by `$ref`.
"""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from forgemq_contracts import openapi
from forgemq_contracts.admin import GroupRequest, RewardRequest
from tests.contracts.test_asyncapi import references

OFFICIAL = Path(__file__).parent / "openapi-3.1.schema.json"
COMMITTED = Path(__file__).parents[2] / "contracts" / "openapi.json"


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(OFFICIAL.read_text(encoding="utf-8")))


def operations() -> dict[str, dict[str, Any]]:
    return {
        operation["operationId"]: operation
        for methods in openapi.document()["paths"].values()
        for operation in methods.values()
    }


def component(name: str) -> Draft202012Validator:
    document = openapi.document()
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document})


def test_the_committed_document_matches_the_structs():
    assert COMMITTED.read_text(encoding="utf-8") == openapi.text(), "run `make contracts`"


def test_the_document_is_valid(validator: Draft202012Validator):
    assert [error.message for error in validator.iter_errors(openapi.document())] == []


@pytest.mark.parametrize("misspelt", ["requestBdy", "parametres"])
def test_a_misspelt_key_is_found(validator: Draft202012Validator, misspelt: str):
    broken = copy.deepcopy(openapi.document())
    broken["paths"]["/v1/groups"]["post"][misspelt] = {}
    assert list(validator.iter_errors(broken))


def test_every_schema_in_the_document_is_a_valid_json_schema():
    for schema in openapi.document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_reference_leads_somewhere():
    whole = openapi.document()
    for reference in references(whole):
        node = whole
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, f"{reference} leads nowhere"
            node = node[part]


def test_every_route_has_its_statuses_and_each_refusal_the_same_body():
    assert set(operations()) == {route.name for route in openapi.ROUTES}
    for route in openapi.ROUTES:
        responses = operations()[route.name]["responses"]
        expected = {"200", *map(str, route.all_refusals)} | ({"204"} if route.nothing else set())
        assert set(responses) == expected
        for status in map(str, route.all_refusals):
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Refusal"}


def test_a_claim_with_nothing_left_is_204_and_a_gone_group_410():
    responses = operations()["claim_episode"]["responses"]
    assert {"200", "204", "401", "404", "410"} <= set(responses)


def test_a_body_is_required_only_if_one_of_its_fields_is():
    required = {
        name: operation["requestBody"]["required"]
        for name, operation in operations().items()
        if "requestBody" in operation
    }
    assert required == {
        "request_group": True,
        "claim_episode": False,
        "report_reward": True,
        "finish_episode": False,
        "abort_episode": False,
        "add_lane": False,
    }


GROUP = {"domain": "shop", "idempotency_key": "k", "task": {}}
REWARD = {"reward_id": "r", "name": "n", "value": 1.0}


@pytest.mark.parametrize(
    ("kind", "body", "is_valid"),
    [
        (GroupRequest, GROUP, True),
        (GroupRequest, {**GROUP, "temperature": 0, "group_size": 4096}, True),
        (GroupRequest, {**GROUP, "task": None}, True),
        (GroupRequest, {**GROUP, "temperature": 10.5}, False),
        (GroupRequest, {**GROUP, "group_size": 0}, False),
        (GroupRequest, {**GROUP, "idempotency_key": ""}, False),
        (GroupRequest, {**GROUP, "domain": "Shop"}, False),
        (GroupRequest, {"domain": "shop", "idempotency_key": "k"}, False),
        (RewardRequest, {**REWARD, "completion_id": "chatcmpl-" + "0" * 32}, True),
        (RewardRequest, {**REWARD, "completion_id": "0" * 32}, True),
        (RewardRequest, {**REWARD, "completion_id": "0" * 31}, False),
        (RewardRequest, {**REWARD, "value": 1.1e12}, False),
    ],
)
def test_the_document_accepts_what_the_struct_accepts(kind, body, is_valid):
    assert component(kind.__name__).is_valid(body) is is_valid
    try:
        msgspec.json.decode(msgspec.json.encode(body), type=kind)
    except msgspec.ValidationError:
        assert not is_valid
    else:
        assert is_valid
