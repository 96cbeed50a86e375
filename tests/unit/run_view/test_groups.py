"""The book of groups keeps its totals when it forgets groups."""

import random
from typing import get_args

import msgspec
import pytest

from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.episodes import FinishedEpisode, ForkCount
from forgemq_contracts.fields import ForkReason
from forgemq_contracts.groups import (
    ScoredGroup,
)
from forgemq_contracts.messages import Message
from forgemq_contracts.topics import FINISHED_COMPLETIONS, RETIRED_GROUPS
from forgemq_run_view.forks import MEANINGS
from forgemq_run_view.groups import GroupBook
from forgemq_run_view.shown_groups import GROUPS_SHOWN_MAX, UNTRAINED_SHOWN_MAX
from forgemq_run_view.trajectory import trajectories
from tests.unit.run_view.imported import imports
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun, configuration


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun().play(steps=10)


def book_of(messages: list[Message], *, groups_kept_max: int) -> GroupBook:
    book = GroupBook(groups_kept_max=groups_kept_max)
    for message in messages:
        book.apply(message)
    return book


def totals(book: GroupBook) -> tuple[object, ...]:
    (queue,) = configuration().queues
    return (
        book.admitted,
        book.open,
        dict(book.retired),
        book.episodes_finished,
        book.forks(),
        dict(book.episode_ends),
        book.versions([queue]),
        book.evaluations(),
        book.queue(queue, groups=8, bound=2, limit=2, staleness=0).waiting,
        book.queue(queue, groups=8, bound=2, limit=2, staleness=0).in_flight,
    )


def test_a_group_that_waits_for_its_slot_has_its_domain_and_size():
    run = SyntheticRun()
    run.request("g-0")
    book = book_of(run.messages, groups_kept_max=4)
    (row,) = book.rows(rows_max=9)
    assert (row.domain, row.purpose, row.group_size) == (DOMAIN, "train", 2)
    assert (row.position, row.queue_index) == ("waiting", None)


def test_a_group_that_retires_without_a_slot_waits_no_more():
    """Its request cannot be read; topics come in any order, so it may be known to retire first."""
    run = SyntheticRun()
    run.request("g-0")
    run.request("g-1")
    run.retire("g-0", reason="failed")
    (queue,) = configuration().queues
    for messages in (run.messages, run.messages[::-1]):
        book = book_of(messages, groups_kept_max=4)
        assert book.queue(queue, groups=8, bound=2, limit=2, staleness=0).waiting == 1


def test_a_book_of_few_groups_has_the_totals_of_all(run):
    small = book_of(run.messages, groups_kept_max=4)
    assert totals(small) == totals(book_of(run.messages, groups_kept_max=1_000))
    assert [f"g-{i}" for i in range(20) if small.knows(f"g-{i}")] == [
        "g-16", "g-17", "g-18", "g-19",
    ]  # fmt: skip
    assert [row.group_id for row in small.rows(rows_max=9)] == ["g-19", "g-18", "g-17", "g-16"]


def test_a_truncated_episode_is_counted_as_such_and_a_completed_one_is_not():
    run = SyntheticRun()
    run.admit("g-1", index=0, version=0)
    for index in range(2):
        run.episode("g-1", index, version=0)
    ends = [m.record for m in run.messages if isinstance(m.record, FinishedEpisode)]
    truncated = msgspec.structs.replace(ends[0], truncated_by="context_full")
    lapsed = msgspec.structs.replace(ends[1], status="failed")
    book = GroupBook()
    for record in (truncated, truncated, lapsed):
        book.apply(Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record))
    assert dict(book.episode_ends) == {"truncated": 1, "failed": 1}
    [row] = book.rows(rows_max=9)
    assert row.truncated == 1


def book_of_forks(*reasons):
    """A book of one group whose episodes forked for these reasons; each end is read twice."""
    run = SyntheticRun()
    run.admit("g-1", index=0, version=0)
    for index in range(len(reasons)):
        run.episode("g-1", index, version=0)
    ends = [m.record for m in run.messages if isinstance(m.record, FinishedEpisode)]
    book = GroupBook()
    for end, counts in [*zip(ends, reasons, strict=True)] * 2:
        record = msgspec.structs.replace(end, fork_reasons=counts)
        book.apply(Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record))
    return book


def test_forks_are_added_up_by_reason_with_the_share_of_episodes_that_have_one():
    compactions = ForkCount(reason="compaction", count=2)
    edits = ForkCount(reason="edited", count=5)
    book = book_of_forks((compactions,), (compactions, edits), (), ())
    assert [(f.reason, f.forks, f.episodes, f.episodes_share) for f in book.forks()] == [
        ("edited", 5, 1, 0.25),
        ("compaction", 4, 2, 0.5),
    ]


def test_episodes_without_a_fork_give_an_empty_table():
    assert book_of_forks((), ()).forks() == ()
    assert GroupBook().forks() == ()


def test_each_reason_of_the_contracts_has_a_meaning_and_no_two_have_the_same():
    assert set(MEANINGS) == set(get_args(get_args(ForkReason)[0]))
    assert len(set(MEANINGS.values())) == len(MEANINGS)


def test_records_of_a_forgotten_group_that_come_again_change_nothing(run):
    small = book_of(run.messages, groups_kept_max=4)
    before = totals(small)
    for message in run.messages:
        small.apply(message)
    assert totals(small) == before
    assert not small.knows("g-0")


@pytest.mark.parametrize("source", ["import", "live"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_what_never_trains_is_in_a_row_of_its_own_and_in_no_number_of_the_policy(
    is_reversed, source
):
    messages = imports(3, outcomes=2, source=source)
    book = book_of(messages[::-1] if is_reversed else messages, groups_kept_max=1_000)
    [row] = book.untrained(source)
    assert book.untrained("live" if source == "import" else "import") == ()
    assert (row.domain, row.conversations, row.ended) == (DOMAIN, 3, 3)
    assert (row.tally.episodes, row.tally.success) == (2, 1.0)
    assert (book.evaluations(), book.versions(configuration().queues)) == ((), ())
    assert (book.episodes_finished, dict(book.episode_ends)) == (0, {})
    assert (book.admitted, book.open, dict(book.retired)) == (3, 0, {"evaluated": 3})
    assert {row.source for row in book.rows(rows_max=9)} == {source}


def test_imports_that_are_forgotten_stay_counted():
    small = book_of(imports(30, outcomes=10), groups_kept_max=4)
    assert [small.knows("i-0"), small.knows("i-29")] == [False, True]
    [row] = small.untrained("import")
    assert (row.conversations, row.ended, row.tally.episodes) == (30, 30, 10)


def test_many_imports_hide_no_group_that_was_played(run):
    flood = imports(UNTRAINED_SHOWN_MAX + 20, outcomes=0)
    book = book_of([*run.messages, *flood], groups_kept_max=20_000)
    shown = [row.group_id for row in book.rows(rows_max=40)]
    assert shown[:10] == [f"i-{UNTRAINED_SHOWN_MAX + 19 - number}" for number in range(10)]
    assert shown[10:] == [f"g-{19 - number}" for number in range(20)]
    assert len(book.record_offsets("g-0")) == len(run_offsets(run, "g-0"))
    assert book.record_offsets("i-0") == ()
    assert len(book.record_offsets("i-20")) == 2


@pytest.mark.parametrize("first", [RETIRED_GROUPS, FINISHED_COMPLETIONS])
def test_groups_are_listed_by_the_time_they_began_whichever_topic_is_read_first(run, first):
    ordered = sorted(run.messages, key=lambda m: (m.topic != first.name, m.topic, m.partition))
    rows = book_of(ordered, groups_kept_max=20_000).rows(rows_max=15)
    assert [row.group_id for row in rows] == [f"g-{19 - number}" for number in range(15)]


def test_a_group_that_is_too_old_for_a_list_keeps_no_places_of_its_turns():
    run = SyntheticRun()
    for number in range(GROUPS_SHOWN_MAX + 1):
        run.request(f"g-{number}")
    oldest, kept = (run.episode(f"g-{number}", 0, version=0) for number in (0, 1))
    book = book_of(run.messages, groups_kept_max=20_000)
    assert (len(oldest), len(kept)) == (2, 2)
    assert (book.record_offsets("g-0"), len(book.record_offsets("g-1"))) == ((), 2)


def run_offsets(run: SyntheticRun, group_id: str) -> list[Message]:
    shown = (FinishedCompletion, ScoredGroup)
    return [
        m for m in run.messages if isinstance(m.record, shown) and m.record.group_id == group_id
    ]


def test_an_imported_conversation_is_shown_by_its_messages():
    messages = imports(1, outcomes=1)
    book = book_of(messages, groups_kept_max=9)
    offsets = book.record_offsets("i-0")
    assert [topic for topic, _, _ in offsets] == ["finished-episodes-v1", "scored-groups-v1"]
    [shown] = trajectories(m for m in messages if (m.topic, m.partition, m.offset) in offsets)
    assert (shown.episode_id, shown.turns) == ("i-0.0.0", ())
    assert [(message.role, message.text) for message in shown.messages] == [
        ("user", "2 + 2?"),
        ("assistant", '{"content":null,"tool_calls":[{"id":"c"}]}'),
    ]
    assert shown.reward is not None
    assert shown.reward.outcome == 1.0


def test_an_imported_task_of_another_form_is_shown_whole():
    [end] = [m for m in imports(1, outcomes=1) if isinstance(m.record, FinishedEpisode)]
    other = msgspec.structs.replace(end.record, task=b'{"talk":"a"}')
    [shown] = trajectories([msgspec.structs.replace(end, record=other)])
    assert [(message.role, message.text) for message in shown.messages] == [
        ("task", '{"talk":"a"}')
    ]


def test_an_open_group_is_never_forgotten(run):
    alone = SyntheticRun()
    alone.admit("g-99", index=99, version=0)
    alone.play(steps=10)
    small = book_of(alone.messages, groups_kept_max=4)
    assert small.knows("g-99")
    assert small.open == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_group_whose_retirement_is_read_first_is_still_counted_whole(run, seed):
    """As on a start from the first record: one topic comes before the other."""
    topics = sorted({message.topic for message in run.messages})
    random.Random(seed).shuffle(topics)
    ordered = sorted(run.messages, key=lambda message: topics.index(message.topic))
    small = book_of(ordered, groups_kept_max=16)
    assert totals(small) == totals(book_of(run.messages, groups_kept_max=1_000))


def test_groups_that_were_broken_off_are_forgotten_too():
    run = SyntheticRun()
    for index in range(20):
        run.admit(f"g-{index}", index=index, version=0)
        run.retire(f"g-{index}", reason="expired")
    small = book_of(run.messages, groups_kept_max=4)
    assert sum(small.knows(f"g-{index}") for index in range(20)) <= 2 * 4
    assert small.retired == {"expired": 20}
