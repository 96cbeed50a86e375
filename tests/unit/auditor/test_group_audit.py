"""Groups are compared after they retire; then their records may be deleted."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_audit.group_index import COMPARED
from forgemq_audit.unaudited import AUDITOR_NEEDED, unaudited
from forgemq_auditor.group_audit import GroupAudit
from forgemq_bus.blobs import BlobStore, blob_name
from forgemq_bus.errors import FencedError, OutOfRangeError
from forgemq_bus.kept_records import pass_trimmed, read_all, read_at
from forgemq_bus.log import Emit, Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.payloads import reference_of
from forgemq_contracts import topics
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.messages import Message
from forgemq_run_view.view import RunView
from tests.small_run import small_run
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started

PARTITIONS = 2
TRIMMED = (topics.FINISHED_COMPLETIONS, topics.MERGED_TREES)


async def log_with_topics(*, blobs: BlobStore | None = None) -> MemoryLog:
    """An empty log; if it has a blob store, all but the smallest values lie there."""
    log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=100 if blobs else 900_000)
    await log.create_topics(
        {
            topic.name: topics.partition_count(topic, small_run(group_partitions=2))
            for topic in topics.ALL
        }
    )
    return log


async def write(log: Log, messages: Sequence[Message]) -> None:
    writer = await log.writer()
    for message in messages:
        await writer.write(
            Emit(
                topic=message.topic,
                partition=message.partition,
                key=b"",
                value=topics.encode(message.record),
            )
        )
    await writer.close()


def places_of(*which: topics.Topic) -> list[Place]:
    return [Place(topic.name, n) for topic in which for n in range(PARTITIONS)]


async def audited_groups(log: Log) -> list[AuditedGroup]:
    found = []
    async for records in read_all(log, places_of(topics.AUDITED_GROUPS)):
        found += [topics.decode(topics.AUDITED_GROUPS, record.value) for record in records]
    assert all(isinstance(each, AuditedGroup) for each in found)
    return sorted(found, key=lambda each: each.group_id)


async def audit_once(log: Log) -> int:
    """Let one auditor work until it has no more; returns the number of groups."""
    auditor = await GroupAudit.open(log, configuration=configuration())
    rounds = [await auditor.audit()]
    while rounds[-1].has_more:
        rounds.append(await auditor.audit())
    await auditor.close()
    return sum(each.groups for each in rounds)


async def trim(log: Log) -> None:
    """Delete all that the auditor does not need."""
    needed = await log.committed(group=AUDITOR_NEEDED, places=places_of(*TRIMMED))
    await log.trim(needed)


async def kept_ids(log: Log) -> set[str]:
    """Groups of which finished-completions still has records."""
    found = set()
    async for records in read_all(log, places_of(topics.FINISHED_COMPLETIONS)):
        for record in records:
            decoded = topics.decode(topics.FINISHED_COMPLETIONS, record.value)
            assert isinstance(decoded, FinishedCompletion)
            found.add(decoded.group_id)
    return found


async def whole(run: SyntheticRun) -> list[AuditedGroup]:
    """What one audit of a run finds that was never trimmed."""
    log = await log_with_topics()
    await write(log, run.messages)
    await audit_once(log)
    return await audited_groups(log)


async def test_a_retired_group_is_audited_with_all_that_was_sampled_for_it():
    groups = await whole(SyntheticRun().play(steps=2))
    assert [each.group_id for each in groups] == ["g-0", "g-1", "g-2", "g-3"]
    assert {(each.completions, each.output_tokens) for each in groups} == {(4, 12)}
    assert [(each.version_min, each.version_max) for each in groups] == [(0, 0)] * 2 + [(1, 1)] * 2
    for each in groups:
        (facts,) = each.trees
        assert (len(facts.completion_ids), facts.entries) == (4, 12)
        assert facts.differences == facts.lost == facts.unknown == ()


async def test_a_tree_that_is_not_what_was_sampled_is_known_after_everything_is_trimmed():
    run = SyntheticRun().play(steps=1)
    log = await log_with_topics()

    def other(tree: msgspec.Struct) -> msgspec.Struct:
        data = tree.entry_logprob[:-4] + b"\0\0\0\0"
        return msgspec.structs.replace(tree, entry_logprob=data)

    await write(log, run.changed(topics.MERGED_TREES, other))
    await audit_once(log)
    await trim(log)
    assert await kept_ids(log) == set()
    differences = [text for each in await audited_groups(log) for text in each.trees[0].differences]
    assert len(differences) == 2
    assert all(text.endswith("log-probabilities are not the engine's") for text in differences)


async def test_a_completion_whose_blob_is_lost_is_unknown_and_holds_nothing_back(tmp_path):
    run = SyntheticRun().play(steps=1)
    store = BlobStore(str(tmp_path), run="r")
    log = await log_with_topics(blobs=store)
    (first, *_) = run.of(topics.FINISHED_COMPLETIONS)
    await write(log, run.messages)
    minute, name = await blob_of(log, Place(first.topic, first.partition), first.offset)
    await store.delete(minute, [name])
    assert await audit_once(log) == 2
    (lost, whole_one) = await audited_groups(log)
    assert lost.group_id == first.record.group_id
    assert lost.completions == whole_one.completions - 1
    assert f"{first.record.request_id}: no such completion" in " ".join(lost.trees[0].differences)
    await trim(log)
    assert await kept_ids(log) == set()


async def blob_of(log: Log, place: Place, offset: int) -> tuple[str, str]:
    """Minute and name of the blob that this record points at."""
    reader = await log.reader({place: offset}, has_values=False)
    (record,) = await reader.read(timeout_s=1, records_max=1)
    reference = reference_of(record)
    assert reference is not None
    minute, _, name = blob_name(reference).partition("/")
    return minute, name


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=6), st.randoms(use_true_random=False))
async def test_wherever_it_is_killed_each_group_is_audited_once_and_none_loses_a_record(
    pieces, random
):
    """Between any two records a new auditor works, then all that it does not need is deleted."""
    run = SyntheticRun().play(steps=3)
    run.admit("g-6", index=6, version=3)
    run.episode("g-6", 0, version=3)  # Stays open.
    log = await log_with_topics()
    messages = list(run.messages)
    while messages:
        size = pieces.pop() if pieces else len(messages)
        batch, messages = messages[:size], messages[size:]
        await write(log, batch)
        if random.random() < 0.8:
            await audit_once(log)
            await trim(log)
    await audit_once(log)
    await trim(log)
    assert await audited_groups(log) == await whole(run)
    assert await kept_ids(log) <= {"g-6", *(f"g-{n}" for n in range(6))}
    assert "g-6" in await kept_ids(log)


async def test_what_comes_late_for_a_group_that_is_over_holds_nothing_back():
    run = SyntheticRun().play(steps=1)
    late = run.episode("g-0", 0, version=0)
    assert late
    log = await log_with_topics()
    await write(log, run.messages[:-3])
    assert await audit_once(log) == 2
    await write(log, run.messages[-3:])
    run.admit("g-9", index=9, version=1)
    run.retire("g-9", reason="cancelled")
    await write(log, [*run.of(topics.RETIRED_GROUPS)][-1:])
    await audit_once(log)
    await trim(log)
    partition = run.partition("g-9")
    place = Place(topics.FINISHED_COMPLETIONS.name, partition)
    assert await log.first_positions([place]) == await log.end_positions([place])


async def test_a_second_auditor_ends_the_first():
    run = SyntheticRun().play(steps=1)
    log = await log_with_topics()
    first = await GroupAudit.open(log, configuration=configuration())
    await GroupAudit.open(log, configuration=configuration())
    await write(log, run.messages)
    with pytest.raises(FencedError):
        await first.audit()
    assert await audited_groups(log) == []


async def test_trees_of_groups_that_are_open_are_compared_without_an_auditor():
    run = SyntheticRun().play(steps=2)
    log = await log_with_topics()
    await write(log, run.messages)
    await audit_once(log)
    await trim(log)
    written = len(run.messages)
    run.generate(4, version=2)
    await write(log, run.messages[written:])
    (found,) = [facts async for facts in unaudited(log, configuration=configuration())]
    assert (found.group_id, found.differences) == ("g-4", ())


async def test_the_view_of_a_trimmed_run_counts_what_was_sampled_in_it():
    run = SyntheticRun().play(steps=2)
    log = await log_with_topics()
    await write(log, run.messages)
    before = RunView(started())
    for message in run.messages:
        before.apply(message)
    await audit_once(log)
    audits = [
        Message(
            topic=topics.AUDITED_GROUPS.name, partition=0, offset=n, timestamp_ms=0, record=each
        )
        for n, each in enumerate(await audited_groups(log))
    ]
    after, both = RunView(started()), RunView(started())
    left = [m for m in run.messages if m.topic != topics.FINISHED_COMPLETIONS.name]
    for message in (*left, *audits):
        after.apply(message)
    for message in (*audits, *run.messages, *audits):
        both.apply(message)
    expected = before.state(now_ms=0)
    for view in (after, both):
        state = view.state(now_ms=0)
        assert (state.completions, state.tokens_generated) == (16, 48)
        assert (expected.completions, expected.tokens_generated) == (16, 48)
        assert [row.completions for row in view.rows(rows_max=9)] == [4, 4, 4, 4]


async def test_a_reader_that_trimming_overtakes_goes_on_with_what_is_kept():
    run = SyntheticRun().play(steps=2)
    log = await log_with_topics()
    await write(log, run.messages)
    places = places_of(*COMPARED)
    reader = await log.reader(dict.fromkeys(places, 0))
    await log.trim({places[1]: 3})
    with pytest.raises(OutOfRangeError):
        await reader.read(timeout_s=0, records_max=1)
    await pass_trimmed(log, reader, places)
    assert [reader.position(place) for place in places[:2]] == [0, 3]
    with pytest.raises(OutOfRangeError):
        await pass_trimmed(log, reader, places)
    found = await read_at(log, [(places[1], offset) for offset in (1, 2, 3, 4)])
    assert [record.offset for record in found] == [3, 4]
