"""A run that trains while each service is upgraded from the previous release, and taken back.

One after another, in the order of docs/compatibility.md. Groups are in play while a service is
replaced, and a step of groups that began after it is trained before the next one is.
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.compatibility import added_fields, schemas
from tests.compatibility_page import missed_fields, order
from tests.engine_fixture import reset_engine
from tests.integration.run_log import Accounts, accounts, records_of
from tests.integration.upgraded_run import REPLICAS, UpgradedRun, now_ms
from tests.previous_release import PRESENT, Release, previous_contracts, previous_release
from tests.small_run import small_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3000),
]

GROUPS_PER_STEP = 2
GROUP_PARTITIONS = 2
LAYOUT = small_run(group_partitions=GROUP_PARTITIONS)
STEPS_PER_CHANGE = 2
SPARE_STEPS = 18
"""Some are trained while a service has processes of two releases."""

SETTINGS = (
    'queues.0.task_source="gated:task"',
    'queues.0.agent="gated:play"',
    'queues.0.outcome="gated:outcome"',
    "queues.0.group_deadline_s=3600",
    "evaluation.tasks=0",
    "log.keep_for_replay=true",
)
KILLED = "scheduler"
"""Upgraded by kill -9: the new core then takes over a journal without a snapshot at its end."""

WRITTEN = {
    "auditor": (topics.AUDITED_GROUPS,),
    "gateway": (topics.REQUESTED_COMPLETIONS, topics.FINISHED_EPISODES),
    "inference": (topics.FINISHED_COMPLETIONS, topics.LOADED_WEIGHTS),
    "merger": (topics.MERGED_GROUPS, topics.MERGED_TREES, topics.MERGER_JOURNAL),
    "reward": (topics.GRADED_EPISODES, topics.SCORED_GROUPS, topics.REWARD_JOURNAL),
    "scheduler": (topics.ADMITTED_GROUPS, topics.SCHEDULED_STEPS, topics.SCHEDULER_JOURNAL),
    "trainer": (topics.TRAINED_STEPS, topics.PUBLISHED_WEIGHTS),
}


SHARED = {"gateway": topics.FINISHED_EPISODES, "merger": topics.MERGED_GROUPS}
"""Services with several processes, which share the partitions of what they write."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a service had a process of each release, in Unix time."""

    service: str
    began_ms: int
    ended_ms: int


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is over.

    Attributes:
        run: Its processes, all of which have ended.
        previous: The other release.
        steps: That it was to train.
        windows: One for each service of `SHARED` on the way there, and one on the way back.
        report: What `forgemq end` wrote.
        accounts: Its accounting records.
        records: By topic, every record.
    """

    run: UpgradedRun
    previous: Release
    steps: int
    windows: list[Window]
    report: dict[str, Any]
    accounts: Accounts
    records: dict[str, list[Record]]


@pytest.fixture(scope="module")
def played(
    kafka_bootstrap: str,
    engine_url: str,
    engine_model: Path,
    new_run_id,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:
    previous = previous_release(tmp_path_factory.mktemp("previous"))
    reset_engine(engine_url, engine_model)
    folder = tmp_path_factory.mktemp("upgraded")
    run = UpgradedRun(new_run_id(), folder, kafka=kafka_bootstrap, engine_url=engine_url)
    try:
        steps, windows = play(run, previous)
        where = {"bootstrap": kafka_bootstrap, "run": run.run_id, "blobs": str(run.blobs)}
        yield Played(
            run=run,
            previous=previous,
            steps=steps,
            windows=windows,
            report=json.loads((folder / "report" / "report.json").read_text()),
            accounts=accounts(**where),
            records=asyncio.run(written(**where)),
        )
    finally:
        run.close()


def play(run: UpgradedRun, previous: Release) -> tuple[int, list[Window]]:
    """Play the run to its end; returns the number of its steps, and who worked side by side."""
    services = order()
    changes = [(service, PRESENT) for service in services]
    changes += [(service, previous) for service in reversed(services)]
    steps = 1 + STEPS_PER_CHANGE * len(changes) + SPARE_STEPS
    run.create(previous, *SETTINGS, f"trainer.steps={steps}")
    for service in services:
        run.start(service, previous)
    trained = 1
    run.let_train(trained, groups=GROUPS_PER_STEP)
    run.create(PRESENT, *SETTINGS, f"trainer.steps={steps}")
    windows = []
    for service, release in changes:
        run.let_begin(GROUPS_PER_STEP)
        windows += change(run, service, release)
        trained = max(trained, run.steps_trained() - 1) + STEPS_PER_CHANGE
        run.let_train(trained, groups=GROUPS_PER_STEP)
    run.let_end()
    run.tool(PRESENT, "end", run.run_id, "--to", str(run.folder / "report"))
    for name in run.names():
        run.stop(name)
    return steps, windows


def change(run: UpgradedRun, service: str, release: Release) -> list[Window]:
    """Replace a service by that of a release, as the page says; returns when it had two."""
    if service == "trainer" and release is not PRESENT:
        run.stop(service)
        for step in run.checkpoints.glob("step-*"):
            if not (step / "optimizer.safetensors").exists():
                os.link(step / "optimizer/state.safetensors", step / "optimizer.safetensors")
        run.start(service, release)
        return []
    is_killed = service == KILLED and release is PRESENT
    by = signal.SIGKILL if is_killed else signal.SIGTERM
    return [let_both_work(run, service) for _ in run.replace(service, release, by=by)]


def let_both_work(run: UpgradedRun, service: str) -> Window:
    """Let groups begin until every partition of what the service writes has grown."""
    began_ms, before = now_ms(), asyncio.run(ends(run, SHARED[service]))
    while any(
        asyncio.run(ends(run, SHARED[service]))[place] == end for place, end in before.items()
    ):
        run.let_train(run.steps_trained() + 1, groups=GROUPS_PER_STEP)
    return Window(service=service, began_ms=began_ms, ended_ms=now_ms())


async def ends(run: UpgradedRun, topic: topics.Topic) -> dict[Place, int]:
    """Where each partition of a topic ends now."""
    log = KafkaLog(KafkaConnection(bootstrap=run.bootstrap), run=run.run_id)
    try:
        return await log.end_positions(partitions_of(topic, LAYOUT))
    finally:
        await log.close()


async def written(*, bootstrap: str, run: str, blobs: str) -> dict[str, list[Record]]:
    """Every record of the topics that are looked at."""
    connection = KafkaConnection(bootstrap=bootstrap)
    log = KafkaLog(connection, run=run, blobs=BlobStore(blobs, run=run))
    try:
        return {
            topic.name: await records_of(
                log, topic.name, partitions=topics.partition_count(topic, LAYOUT)
            )
            for of_service in (*WRITTEN.values(), (topics.STARTED_RUNS, topics.OWNED_RUNS))
            for topic in of_service
        }
    finally:
        await log.close()


def writers(run: UpgradedRun, service: str, record: Record) -> set[str]:
    """Releases of which a process of the service ran when the record was written."""
    return {
        life.release
        for life in run.lives
        if life.name.startswith(service) and life.began_ms <= record.timestamp_ms <= life.ended_ms
    }


def test_every_step_is_trained_and_every_guarantee_holds(played: Played):
    assert played.report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert (played.report["steps"], played.report["groups_open"]) == (played.steps, 0)
    assert played.report["staleness_max"] <= played.report["staleness_bound"]
    played.accounts.assert_exactly_once()
    assert list(played.accounts.surviving_steps()) == list(range(played.steps))


def test_the_newer_release_creates_what_the_run_lacks_and_leaves_it_announced_as_it_was(
    played: Played,
):
    started = [
        topics.decode(topics.STARTED_RUNS, record.value)
        for record in played.records[topics.STARTED_RUNS.name]
    ]
    assert len([each for each in started if each.run == played.run.run_id]) == 1


@pytest.mark.parametrize("service", SHARED)
def test_a_process_of_each_release_did_its_share_of_the_work_beside_the_other(
    played: Played, service: str
):
    windows = [each for each in played.windows if each.service == service]
    assert len(windows) == 2  # On the way to this release, and back.
    for window in windows:
        beside = [
            life.release
            for life in played.run.lives
            if life.name in REPLICAS[service]
            and life.began_ms < window.began_ms
            and window.ended_ms < life.ended_ms
        ]
        assert sorted(beside) == ["present", "previous"]
        assert sorted(shares(played, service, at_ms=window.began_ms)) == [[0], [1]]
        grown = {
            record.partition
            for record in played.records[SHARED[service].name]
            if window.began_ms <= record.timestamp_ms <= window.ended_ms
        }
        assert grown == {0, 1}


def shares(played: Played, service: str, *, at_ms: int) -> list[list[int]]:
    """Partitions of each process of a service at this time."""
    if service == "gateway":
        records = played.records[topics.OWNED_RUNS.name]
        newest = max((each for each in records if each.timestamp_ms <= at_ms), key=_offset)
        owners = topics.decode(topics.OWNED_RUNS, newest.value).owners
        return [list(owner.partitions) for owner in owners if owner.partitions]
    return [held(played.run, name, at_ms=at_ms) for name in REPLICAS[service]]


def _offset(record: Record) -> int:
    return record.offset


def held(run: UpgradedRun, name: str, *, at_ms: int) -> list[int]:
    """Partitions of a process at this time, as it said itself."""
    said = [*run.events(name, "assigned"), *run.events(name, "revoked")]
    newest = max((each for each in said if each["at_ms"] <= at_ms), key=lambda each: each["at_ms"])
    return list(newest["held"])


@pytest.mark.parametrize("service", WRITTEN)
def test_records_of_both_releases_are_on_the_log(played: Played, service: str):
    for topic in WRITTEN[service]:
        found = [writers(played.run, service, record) for record in played.records[topic.name]]
        assert {"previous"} in found, topic.name
        assert {"present"} in found, topic.name


def test_only_this_release_wrote_the_fields_that_the_previous_one_does_not_know(played: Played):
    added = set(added_fields(previous_contracts()["schemas"], schemas()))
    seen: set[str] = set()
    for service, of_service in WRITTEN.items():
        for topic in of_service:
            for record in played.records[topic.name]:
                written = msgspec.msgpack.decode(record.value)
                new = added & {f"{topic.record.__name__}.{field}" for field in written}
                assert not new or "present" in writers(played.run, service, record), new
                seen |= new
    # Those for which the order matters came to readers of both releases.
    assert {row.field for row in missed_fields() if row.before} <= seen


@pytest.mark.parametrize(
    ("service", "topic"),
    [("merger", topics.MERGER_JOURNAL), ("scheduler", topics.SCHEDULER_JOURNAL)],
)
def test_a_core_whose_logic_changed_goes_on_from_the_others_snapshot_both_ways(
    played: Played, service: str, topic: topics.Topic
):
    before, now = played.previous.logic_version(service), PRESENT.logic_version(service)
    if before == now:
        pytest.skip(f"the logic of {service} is that of the previous release")
    first = [record for record in played.records[topic.name] if record.partition == 0]
    batches = [topics.decode(topic, record.value) for record in first]
    handled = [batch.logic_version for batch in batches if batch.snapshot is None]
    assert [logic for logic, _ in itertools.groupby(handled)] == [before, now, before]
    names = REPLICAS.get(service, (service,))
    taken = [each for name in names for each in played.run.events(name, "taken_over")]
    said = {(each["logic_version_before"], each["logic_version"]) for each in taken}
    assert said == {(before, now)}
    assert (sum(each["batches"] for each in taken) > 0) == (service == KILLED)


def test_no_service_diverged_refused_or_failed(played: Played):
    said = {life.name: played.run.log(life.name) for life in played.run.lives}
    for word in ("DivergedError", "NewerLogicError", '"refused"', "Traceback"):
        assert [name for name, text in said.items() if word in text] == []
    ended = [(life.name, life.release, life.status) for life in played.run.lives if life.status]
    assert ended == [(KILLED, "previous", -signal.SIGKILL)]
