"""Only what every reader has committed that it does not need is deleted."""

import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_auditor.app import main
from forgemq_auditor.core import trim_positions
from forgemq_auditor.log_trim import trim_log
from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import AccessError
from forgemq_bus.log import Emit, Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_contracts import topics
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.small_run import small_run

FINISHED = topics.FINISHED_COMPLETIONS
REPORTED = topics.REPORTED_ENGINES
COUNTS = partition_counts(small_run(group_partitions=2))

positions = st.integers(0, 50)


@st.composite
def partitions(draw: st.DrawFn):
    """Partitions of trimmed topics with first and end, and what their readers committed so far."""
    topic = st.sampled_from([topic for topic in topics.OF_RUN if topic.needed_by])
    places = {Place(each.name, 0): each for each in draw(st.lists(topic, max_size=4))}
    first = {place: draw(positions) for place in places}
    ends = {place: first[place] + draw(st.integers(0, 2000)) for place in places}
    needed: dict[str, dict[Place, int]] = {}
    for place, each in places.items():
        for group in each.needed_by:
            known = needed.setdefault(group, {})
            if draw(st.booleans()):
                known[place] = draw(st.integers(0, ends[place]))
    return places, needed, first, ends


@given(partitions())
def test_nothing_that_any_reader_needs_or_that_none_has_spoken_for_is_trimmed(case):
    places, needed, first, ends = case
    before = trim_positions(places, needed=needed, first=first, ends=ends)
    for place, topic in places.items():
        start = before.get(place, first[place])
        assert start >= first[place]
        for group in topic.needed_by:
            assert start <= max(first[place], needed[group].get(place, 0))
        assert start <= max(first[place], ends[place] - topic.newest_kept)


@given(partitions())
def test_all_that_no_reader_needs_is_trimmed(case):
    places, needed, first, ends = case
    before = trim_positions(places, needed=needed, first=first, ends=ends)
    for place, topic in places.items():
        if all(place in needed[group] for group in topic.needed_by):
            lowest = min(needed[group][place] for group in topic.needed_by)
            free = min(lowest, ends[place] - topic.newest_kept)
            assert before.get(place, first[place]) == max(first[place], free)


def configuration(*, keep_for_replay: bool = False) -> RunConfiguration:
    return RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="/model"),
        queues=(Queue(domain="d", task_source="a:b", agent="a:c"),),
        trainer=Trainer(steps=1),
        log=LogLayout(group_partitions=2, keep_for_replay=keep_for_replay),
    )


async def filled(*, records: int) -> MemoryLog:
    """Every trimmed partition holds so many records."""
    log = MemoryLog(run="r")
    await log.create_topics(COUNTS)
    writer = await log.writer()
    for topic in topics.OF_RUN:
        if topic.needed_by:
            for partition in range(COUNTS[topic.name]):
                one = Emit(topic=topic.name, partition=partition, key=b"", value=b"v")
                await writer.write_all([one] * records)
    return log


async def commit(log: Log, group: str, positions: dict[Place, int]) -> None:
    writer = await log.transaction_writer(group)
    await writer.commit(outputs=(), group=group, positions=positions)
    await writer.close()


async def test_each_partition_begins_where_its_last_reader_needs_it_once_all_have_spoken():
    log = await filled(records=20)
    places = [Place(FINISHED.name, 0), Place(FINISHED.name, 1)]
    for number, group in enumerate(FINISHED.needed_by):
        assert await trim_log(log, configuration()) == {}
        await commit(log, group, {places[0]: 10 + number})
    assert await trim_log(log, configuration()) == {FINISHED.name: 10}
    assert await log.first_positions(places) == {places[0]: 10, places[1]: 0}
    assert await trim_log(log, configuration()) == {}


async def test_the_newest_heartbeats_stay_for_a_lane_that_starts_again():
    log = await filled(records=REPORTED.newest_kept + 7)
    place = Place(REPORTED.name, 0)
    await commit(log, "scheduler-needed", {place: REPORTED.newest_kept + 7})
    assert await trim_log(log, configuration()) == {REPORTED.name: 7}


async def test_a_journal_begins_at_its_newest_snapshot():
    log = await filled(records=9)
    place = Place(topics.MERGER_JOURNAL.name, 1)
    await commit(log, "merger-positions", {place: 6})
    assert await trim_log(log, configuration()) == {topics.MERGER_JOURNAL.name: 6}
    assert await log.first_positions([place]) == {place: 6}


async def trimmed_for_a_while(log: Log, run: RunConfiguration, tmp_path: Path) -> list[dict]:
    """What an auditor says that runs for a moment and trims as fast as it can."""
    lines = io.StringIO()
    context = Context(
        started=StartedRun(run="r", configuration=run, blobs=str(tmp_path), started_ms=0),
        log=log,
        blobs=BlobStore(str(tmp_path), run="r"),
        telemetry=Telemetry(service="auditor", stream=lines),
        stop=asyncio.Event(),
        environ={"FORGEMQ_AUDITOR_TRIM_EVERY_S": "0.01"},
    )
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(main(context))
        await asyncio.sleep(0.3)
        context.stop.set()
    return [json.loads(line) for line in lines.getvalue().splitlines()]


@pytest.mark.slow
async def test_a_run_kept_for_replay_keeps_everything(tmp_path: Path):
    log = await filled(records=9)
    place = Place(topics.MERGER_JOURNAL.name, 1)
    await commit(log, "merger-positions", {place: 6})
    await trimmed_for_a_while(log, configuration(keep_for_replay=True), tmp_path)
    assert await log.first_positions([place]) == {place: 0}
    await trimmed_for_a_while(log, configuration(), tmp_path)
    assert await log.first_positions([place]) == {place: 6}


class RefusingLog(MemoryLog):
    """Refuses to delete records, as a broker without the permission does."""

    async def trim(self, before: Mapping[Place, int]) -> None:
        raise AccessError("delete records: not allowed")


async def test_a_log_that_refuses_ends_no_service_and_is_asked_again(tmp_path: Path):
    log = RefusingLog(run="r")
    await log.create_topics(COUNTS)
    lines = await trimmed_for_a_while(log, configuration(), tmp_path)
    failed = [line for line in lines if line["event"] == "trim_failed"]
    assert len(failed) > 1
    assert failed[0]["error"] == "delete records: not allowed"


def test_every_group_that_holds_back_a_topic_is_one_that_a_service_commits():
    """Under another name it would hold records back for the run's life."""
    from forgemq_reward.grading_positions import GROUP

    groups = {group for topic in topics.OF_RUN for group in topic.needed_by}
    transforms = {"merger", "reward", "scheduler"}
    known = {f"{name}-positions" for name in transforms} | {GROUP}
    known |= {topics.needed_group(name) for name in ("auditor", "gateway", "merger", "scheduler")}
    assert groups == known | {topics.needed_group("trainer")}
