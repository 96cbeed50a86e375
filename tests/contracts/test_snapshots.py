"""The gate for the cores' snapshots: a new build goes on from the state that an older one kept."""

import copy
import json
from pathlib import Path

import msgspec
import pytest

from forgemq_contracts.compatibility import breaking_changes, keeps, renamed
from tests.contracts.frozen_snapshots import FOLDER, SNAPSHOTS, fresh_core, schema_of, transform_of

FROZEN = sorted(FOLDER.glob("*.json"))


def service_of(path: Path) -> str:
    return path.stem.rpartition("-")[0]


@pytest.mark.parametrize("service", SNAPSHOTS)
def test_every_logic_version_up_to_the_present_one_is_frozen(service: str):
    versions = sorted(int(p.stem.rpartition("-")[2]) for p in FROZEN if service_of(p) == service)
    assert versions == list(range(1, transform_of(service).logic_version + 1)), (
        "run `python -m tests.contracts.frozen_snapshots`"
    )


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_every_frozen_snapshot_has_a_schema_that_is_still_readable(path: Path):
    frozen = renamed(json.loads(path.read_text(encoding="utf-8")))
    assert SNAPSHOTS[service_of(path)].__name__ in frozen
    assert breaking_changes(frozen, schema_of(service_of(path))) == [], (
        "give a new field a default, and keep the old ones (contracts/README.md, Snapshots)"
    )


@pytest.mark.parametrize("service", SNAPSHOTS)
def test_the_files_of_the_present_version_have_every_field_of_its_snapshot(service: str):
    """So that a field that was added since may not be removed unnoticed either."""
    stem = f"{service}-{transform_of(service).logic_version}"
    frozen = renamed(json.loads((FOLDER / f"{stem}.json").read_text(encoding="utf-8")))
    assert breaking_changes(schema_of(service), frozen) == [], (
        "run `python -m tests.contracts.frozen_snapshots`"
    )


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_a_core_goes_on_from_every_frozen_snapshot_and_keeps_all_of_it(path: Path):
    stored = path.with_suffix(".msgpack").read_bytes()
    core = fresh_core(service_of(path))
    core.restore(stored)
    assert keeps(msgspec.msgpack.decode(stored), msgspec.msgpack.decode(core.snapshot()))
    assert len(stored) > len(fresh_core(service_of(path)).snapshot())


def test_a_breaking_change_of_a_snapshot_is_named():
    schema = schema_of("scheduler")
    changed = copy.deepcopy(schema)
    del changed["SchedulerSnapshot"]["properties"]["lineage"]
    changed["OpenGroup"]["properties"]["deadline_ms"] = {"type": "string"}
    changed["QueueSnapshot"]["properties"]["added"] = {"type": "integer"}
    changed["QueueSnapshot"]["required"].append("added")
    assert sorted(breaking_changes(schema, changed)) == [
        "OpenGroup.deadline_ms: type changed",
        "QueueSnapshot.added: added without a default",
        "SchedulerSnapshot.lineage: removed or renamed",
    ]
