"""The gate that compares the contracts with every release and every stored record."""

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts import generate, topics
from forgemq_contracts.compatibility import (
    breaking_changes,
    breaking_topic_changes,
    keeps,
    renamed,
    schemas,
    topic_facts,
)
from forgemq_contracts.examples import full, minimal

CONTRACTS = Path(__file__).parents[2] / "contracts"
RELEASES = sorted((CONTRACTS / "released").glob("*.json"))
EXAMPLES = sorted((CONTRACTS / "examples").glob("*/*.msgpack"))


def with_defaults(value: Any) -> Any:
    """A record as plain values, with the fields that are left out on the wire."""
    if isinstance(value, msgspec.Struct):
        return {name: with_defaults(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, list | tuple):
        return [with_defaults(each) for each in value]
    if isinstance(value, dict):
        return {key: with_defaults(each) for key, each in value.items()}
    return value


def test_committed_schemas_match_the_structs():
    committed = (CONTRACTS / "schemas.json").read_text(encoding="utf-8")
    assert committed == generate.schemas_text(), "run `make contracts`"


def test_committed_asyncapi_matches_the_registry():
    committed = (CONTRACTS / "asyncapi.yaml").read_text(encoding="utf-8")
    assert committed == generate.asyncapi_text(), "run `make contracts`"


def test_releases_are_numbered_without_a_gap():
    assert [path.stem for path in RELEASES] == [f"{n + 1:04d}" for n in range(len(RELEASES))]
    assert RELEASES


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_every_released_schema_is_still_readable_and_writable(path: Path):
    released = json.loads(path.read_text(encoding="utf-8"))
    assert breaking_changes(renamed(released["schemas"]), schemas()) == []
    assert breaking_topic_changes(released["topics"], topic_facts()) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_stored_record_still_decodes_to_the_same_bytes_of_its_fields(path: Path):
    topic = topics.BY_NAME[path.parent.name]
    stored = path.read_bytes()
    record = topics.decode(topic, stored)
    read, again = with_defaults(record), with_defaults(topics.decode(topic, topics.encode(record)))
    assert again == read
    for field, value in msgspec.msgpack.decode(stored).items():
        assert keeps(value, read[field]), f"{field} was {value!r}, is {read[field]!r}"


@pytest.mark.parametrize("topic", topics.ALL, ids=lambda topic: topic.name)
def test_every_topic_has_a_small_and_a_full_example(topic: topics.Topic):
    stored = {path.stem for path in (CONTRACTS / "examples" / topic.name).glob("*.msgpack")}
    assert {"minimal", "full"} <= stored, "run `make contracts`"


@pytest.mark.parametrize("topic", topics.ALL, ids=lambda topic: topic.name)
def test_a_full_example_sets_every_field_on_the_wire(topic: topics.Topic):
    written = msgspec.msgpack.decode(topics.encode(full(topic.record)))
    required = {field.name for field in msgspec.structs.fields(topic.record) if field.required}
    assert set(written) == set(topic.record.__struct_fields__)
    assert required <= set(msgspec.msgpack.decode(topics.encode(minimal(topic.record))))


BEFORE = {"G": {"properties": {"id": {"type": "integer"}}, "required": ["id"]}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"properties": {}, "required": []}, "G.id: removed or renamed"),
        ({"properties": {"id": {"type": "string"}}, "required": ["id"]}, "G.id: type changed"),
        (
            {"properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]},
            "G.id: type changed",
        ),
        ({"properties": {"id": {"type": "integer"}}, "required": []}, "G.id: required changed"),
        (
            {"properties": {"id": {"type": "integer"}, "n": {}}, "required": ["id", "n"]},
            "G.n: added without a default",
        ),
    ],
)
def test_a_breaking_change_is_named(change: dict, problem: str):
    assert breaking_changes(BEFORE, {"G": change}) == [problem]


def test_a_renamed_struct_is_still_held_to_its_released_fields():
    field = {"$ref": "#/$defs/Log"}
    released = {
        "Log": {"properties": {"lanes": {"type": "integer"}}, "required": []},
        "Run": {"properties": {"log": field}, "required": ["log"]},
    }
    present = renamed(released)
    assert present["Run"]["properties"]["log"] == {"$ref": "#/$defs/LogLayout"}
    changed = {**present, "LogLayout": {"properties": {}, "required": []}}
    assert breaking_changes(present, changed) == ["LogLayout.lanes: removed or renamed"]


def test_a_removed_struct_is_named():
    assert breaking_changes(BEFORE, {}) == ["G: removed"]


def test_a_new_default_is_named_because_it_changes_what_stored_records_mean():
    old = {"G": {"properties": {"n": {"type": "integer", "default": 0}}, "required": []}}
    new = {"G": {"properties": {"n": {"type": "integer", "default": 1}}, "required": []}}
    assert breaking_changes(old, new) == ["G.n: default changed"]


@pytest.mark.parametrize(
    ("after", "is_kept"),
    [
        ({"a": 1, "b": [{"c": 2}]}, True),
        ({"a": 1, "b": [{"c": 2, "new": 3}], "newer": 4}, True),
        ({"a": 2, "b": [{"c": 2}]}, False),
        ({"b": [{"c": 2}]}, False),
        ({"a": 1, "b": [{"c": 3}]}, False),
        ({"a": 1, "b": []}, False),
        (None, False),
    ],
)
def test_a_value_is_kept_where_structs_within_it_got_fields_and_nothing_else(
    *, after: object, is_kept: bool
):
    assert keeps({"a": 1, "b": [{"c": 2}]}, after) == is_kept


SETTINGS = {
    "Draft": {
        "properties": {"head": {"type": "string", "minLength": 1}},
        "required": ["head"],
        "additionalProperties": False,
    }
}


def widened(*, is_settings: bool) -> dict:
    schema = {"properties": {"head": {"type": "string", "default": ""}}, "required": []}
    return {"Draft": {**schema, "additionalProperties": False} if is_settings else schema}


def test_a_struct_of_the_run_file_may_take_more_than_before_and_no_other():
    assert breaking_changes(SETTINGS, widened(is_settings=True)) == []
    problems = ["Draft.head: type changed", "Draft.head: required changed"]
    assert breaking_changes(SETTINGS, widened(is_settings=False)) == problems
    # What is narrower than before is named for both.
    assert breaking_changes(widened(is_settings=True), SETTINGS) == problems


def test_a_default_that_is_a_struct_is_compared_with_all_of_its_fields():
    def schemas_with(default: dict, *, tokens: int) -> dict:
        stop = {"type": "integer", "default": tokens}
        field = {"$ref": "#/$defs/Stop", "default": default}
        return {
            "Run": {"properties": {"stop": field}, "required": []},
            "Stop": {"properties": {"tokens": stop}, "required": []},
        }

    whole, short = schemas_with({"tokens": 3}, tokens=3), schemas_with({}, tokens=3)
    assert breaking_changes(whole, short) == breaking_changes(short, whole) == []
    said = schemas_with({"tokens": 5}, tokens=3)
    assert breaking_changes(whole, said) == ["Run.stop: default changed"]


def test_a_new_field_with_a_default_and_new_prose_are_allowed():
    new = copy.deepcopy(BEFORE)
    new["G"]["properties"]["n"] = {"type": "integer", "default": 0}
    new["G"]["properties"]["id"]["description"] = "A better sentence."
    assert breaking_changes(BEFORE, {**new, "H": new["G"]}) == []


@pytest.mark.parametrize(
    ("fact", "value"),
    [("key", "other"), ("partitioned_by", "run"), ("is_transactional", True), ("record", "X")],
)
def test_a_changed_fact_of_a_topic_is_named(fact: str, value: object):
    changed = copy.deepcopy(topic_facts())
    changed["opened-episodes-v1"][fact] = value
    was = topic_facts()["opened-episodes-v1"][fact]
    assert breaking_topic_changes(topic_facts(), changed) == [
        f"opened-episodes-v1: {fact} was {was!r}, is {value!r}"
    ]


def test_a_removed_topic_is_named():
    left = {name: facts for name, facts in topic_facts().items() if name != "ended-runs-v1"}
    assert breaking_topic_changes(topic_facts(), left) == ["ended-runs-v1: removed or renamed"]


def test_an_unknown_field_of_a_newer_writer_is_ignored():
    topic = topics.CANCELLED_COMPLETIONS
    fields = msgspec.msgpack.decode(topics.encode(minimal(topic.record)))
    newer = msgspec.msgpack.encode({**fields, "added_later": 1})
    assert topics.decode(topic, newer) == minimal(topic.record)


@given(st.sampled_from(topics.ALL), st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused_with_a_reason(topic: topics.Topic, value: bytes):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)) as refused:
        topics.decode(topic, value)
    assert str(refused.value)


def test_files_are_generated_where_they_are_committed():
    assert generate.FOLDER == CONTRACTS


@pytest.mark.slow
def test_generating_twice_changes_nothing_and_never_rewrites_an_example(tmp_path: Path):
    assert generate.write_all(tmp_path)
    example = tmp_path / "examples" / "ended-runs-v1" / "minimal.msgpack"
    example.write_bytes(b"as written long ago")
    assert generate.write_all(tmp_path) == []
    assert example.read_bytes() == b"as written long ago"


def test_a_release_takes_the_next_number_breaks_nothing_and_is_the_previous_one(tmp_path: Path):
    assert generate.release(tmp_path, revision="v1.0.0").name == "0001.json"
    second = generate.release(tmp_path, revision="v1.1.0")
    assert second.name == "0002.json"
    frozen = json.loads(second.read_text(encoding="utf-8"))
    assert breaking_changes(frozen["schemas"], schemas()) == []
    assert frozen == generate.frozen()
    named = tomllib.loads((tmp_path / "released" / "previous.toml").read_text())
    assert named == {"revision": "v1.1.0", "contracts": "0002.json"}
