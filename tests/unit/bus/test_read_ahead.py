"""The buffer between fetches and reads."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.log import Place, Record
from forgemq_bus.read_ahead import ReadAhead

PLACES = [Place("a", 0), Place("a", 1), Place("b", 0)]


def record(place: Place, offset: int) -> Record:
    return Record(
        topic=place.topic,
        partition=place.partition,
        offset=offset,
        timestamp_ms=0,
        key=b"",
        value=b"",
    )


def test_a_partition_that_was_served_waits_for_the_others() -> None:
    ahead = ReadAhead(PLACES)
    ahead.add(PLACES[0], [record(PLACES[0], offset) for offset in range(3)])
    ahead.add(PLACES[2], [record(PLACES[2], 7)])
    taken = ahead.peek(2, without=set())
    assert [(item.place, item.offset) for item in taken] == [(PLACES[0], 0), (PLACES[0], 1)]
    ahead.drop(taken)
    rest = ahead.peek(9, without=set())
    assert [(item.place, item.offset) for item in rest] == [(PLACES[2], 7), (PLACES[0], 2)]


def test_paused_partitions_keep_their_records() -> None:
    ahead = ReadAhead(PLACES)
    ahead.add(PLACES[0], [record(PLACES[0], 4)])
    assert ahead.peek(9, without={PLACES[0]}) == []
    assert ahead.first_offset(PLACES[0]) == 4
    ahead.clear(PLACES[0])
    assert ahead.first_offset(PLACES[0]) is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 5)),
            st.tuples(st.just("read"), st.sets(st.integers(0, 2)), st.integers(1, 6)),
        ),
        max_size=40,
    )
)
def test_every_record_is_handed_out_once_in_order_and_never_of_a_paused_partition(
    actions: list[tuple[str, object, int]],
) -> None:
    ahead = ReadAhead(PLACES)
    added = dict.fromkeys(PLACES, 0)
    read = dict.fromkeys(PLACES, 0)

    def take(paused: set[Place], records_max: int) -> int:
        taken = ahead.peek(records_max, without=paused)
        assert len(taken) <= records_max
        for item in taken:
            assert item.place not in paused
            assert item.offset == read[item.place]
            read[item.place] += 1
        ahead.drop(taken)
        return len(taken)

    for kind, which, number in actions:
        if kind == "add":
            assert isinstance(which, int)
            place = PLACES[which]
            ahead.add(place, [record(place, added[place] + index) for index in range(number)])
            added[place] += number
        else:
            assert isinstance(which, set)
            take({PLACES[index] for index in which}, number)
    while take(set(), 3):
        pass
    assert read == added
