"""Gateways agree who owns which partitions, share them evenly and move as few as possible."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.ownership import OwnedRun, PartitionOwner, ReportedGateway
from forgemq_gateway.core.gateways import LAPSE_S, Gateways, shared_out, with_fenced, with_owner

GATEWAYS = ["a", "b", "c", "d", "e"]


def gateways(name: str = "a", *, partitions: int = 4) -> Gateways:
    return Gateways(name, url=f"http://{name}", partitions=partitions)


def report(name: str, *, at_ms: int = 1, url: str = "", started_ms: int = 1) -> ReportedGateway:
    return ReportedGateway(
        run="r",
        gateway=name,
        url=url or f"http://{name}",
        started_ms=started_ms,
        reported_ms=at_ms,
    )


def owned(number: int, **partitions: tuple[int, ...]) -> OwnedRun:
    owners = tuple(
        PartitionOwner(gateway=name, url=f"http://{name}", partitions=numbers)
        for name, numbers in partitions.items()
    )
    return OwnedRun(run="r", owner=number, owned_ms=1, owners=owners)


@given(
    partitions=st.integers(1, 40),
    gateways=st.sets(st.sampled_from(GATEWAYS), min_size=1),
    held=st.dictionaries(st.integers(0, 39), st.sampled_from(GATEWAYS)),
)
def test_shares_are_even_and_as_few_partitions_as_possible_change_hands(
    partitions: int, gateways: set[str], held: dict[int, str]
) -> None:
    owners = {number: name for number, name in held.items() if number < partitions}
    shares = shared_out(partitions, owners=owners, gateways=sorted(gateways))
    counts = [list(shares.values()).count(name) for name in gateways]
    assert sorted(shares) == list(range(partitions))
    assert max(counts) - min(counts) <= 1
    before = sorted(
        (sum(owners.get(number) == name for number in range(partitions)) for name in gateways),
        reverse=True,
    )
    least, more = divmod(partitions, len(gateways))
    kept = sum(min(count, least + (place < more)) for place, count in enumerate(before))
    assert sum(shares[number] == name for number, name in owners.items()) == kept


@given(held=st.dictionaries(st.integers(0, 9), st.sampled_from(GATEWAYS)), seed=st.randoms())
def test_gateways_that_take_their_shares_one_after_the_other_come_to_rest(
    held: dict[int, str], seed: "object"
) -> None:
    order = list(GATEWAYS)
    seed.shuffle(order)  # type: ignore[attr-defined]
    owners = dict(held)
    for name in order:
        shares = shared_out(10, owners=owners, gateways=GATEWAYS)
        owners |= {number: each for number, each in shares.items() if each == name}
    assert shared_out(10, owners=owners, gateways=GATEWAYS) == owners


def test_with_no_gateway_there_are_no_shares() -> None:
    assert shared_out(3, owners={0: "a"}, gateways=[]) == {}


def test_a_gateway_alone_takes_every_partition() -> None:
    alone = gateways()
    alone.hear(report("a"), heard_s=0.0)
    assert alone.wanted() == {0, 1, 2, 3}
    assert alone.take_owners(owned(1, a=(0, 1, 2, 3))) == ({0, 1, 2, 3}, frozenset())
    assert alone.wanted() == frozenset()


def test_one_that_comes_wants_its_share_and_the_other_one_nothing() -> None:
    first, second = gateways("a"), gateways("b")
    for each in (first, second):
        each.hear(report("a"), heard_s=0.0)
        each.hear(report("b"), heard_s=0.0)
        each.take_owners(owned(1, a=(0, 1, 2, 3)))
    assert (first.wanted(), second.wanted()) == (frozenset(), {2, 3})
    assert first.take_owners(owned(2, a=(0, 1), b=(2, 3))) == (frozenset(), {2, 3})


def test_an_older_record_of_owners_changes_nothing() -> None:
    mine = gateways()
    mine.take_owners(owned(3, b=(0, 1, 2, 3)))
    assert mine.take_owners(owned(2, a=(0,))) == (frozenset(), frozenset())
    assert mine.owner == 3


def test_what_is_lost_is_not_served_any_longer() -> None:
    mine = gateways()
    mine.take_owners(owned(1, a=(0, 1, 2, 3)))
    mine.serving |= {0, 1, 2, 3}
    mine.take_owners(owned(2, a=(0, 1), b=(2, 3)))
    assert mine.serving == {0, 1}
    owner = mine.owner_of(2)
    assert owner is not None
    assert owner.gateway == "b"


def test_a_peer_lapses_by_this_gateways_own_reports_and_not_by_the_clock() -> None:
    mine = gateways()
    mine.take_owners(owned(1, a=(0, 1), b=(2, 3)))
    mine.hear(report("b"), heard_s=0.0)
    mine.hear(report("a"), heard_s=LAPSE_S)
    assert mine.wanted() == frozenset()  # However late it is: the log was away from both.
    mine.hear(report("a", at_ms=2), heard_s=math.nextafter(LAPSE_S, 9.0))
    assert mine.wanted() == {2, 3}


def test_one_that_refuses_connections_is_gone_until_it_is_heard_again() -> None:
    mine = gateways()
    mine.take_owners(owned(1, a=(0, 1), b=(2, 3)))
    mine.hear(report("a"), heard_s=0.0)
    mine.hear(report("b"), heard_s=0.0)
    mine.note_gone("b")
    assert mine.wanted() == {2, 3}
    assert not mine.has_peer("b")
    mine.hear(report("b", at_ms=2), heard_s=0.1)
    assert mine.wanted() == frozenset()


def test_of_two_processes_at_one_address_the_one_that_started_last_counts() -> None:
    mine = gateways("c")
    mine.hear(report("c"), heard_s=0.0)
    mine.hear(report("old", url="http://b", at_ms=9), heard_s=0.0)
    mine.hear(report("new", url="http://b", started_ms=5), heard_s=0.0)
    assert [peer.gateway for peer in mine.peers()] == ["new"]


def test_a_dead_process_whose_clock_was_ahead_does_not_hide_the_next_one_at_its_address() -> None:
    mine = gateways("c")
    mine.hear(report("dead", url="http://b", started_ms=9), heard_s=0.0)
    mine.hear(report("next", url="http://b", started_ms=5), heard_s=LAPSE_S)
    mine.hear(report("c"), heard_s=LAPSE_S)
    assert [peer.gateway for peer in mine.peers()] == ["dead"]
    mine.hear(report("c", at_ms=2), heard_s=math.nextafter(LAPSE_S, 9.0))
    assert [peer.gateway for peer in mine.peers()] == ["next"]


def test_the_older_of_two_at_one_address_learns_that_it_has_a_successor() -> None:
    older, newer = gateways("old"), gateways("new")
    own = report("old"), report("new", url=older.url, started_ms=2)
    for each in (older, newer):
        each.url = older.url
        for one in own:
            each.hear(one, heard_s=0.0)
    assert (older.successor(), newer.successor()) == (own[1], None)


def test_the_process_before_this_one_at_its_address_is_gone() -> None:
    mine = gateways("new")
    mine.take_owners(owned(1, old=(0, 1, 2, 3)))
    mine.hear(report("old", url=mine.url), heard_s=0.0)
    mine.hear(report("new"), heard_s=0.0)
    assert mine.wanted() == {0, 1, 2, 3}


def test_one_that_leaves_wants_nothing_and_the_others_want_what_it_has() -> None:
    mine, leaving = gateways("a"), gateways("b")
    goodbye = msgspec.structs.replace(report("b", at_ms=2), is_leaving=True)
    for each in (mine, leaving):
        each.take_owners(owned(1, a=(0, 1), b=(2, 3)))
        each.hear(report("a"), heard_s=0.0)
        each.hear(goodbye, heard_s=0.0)
    leaving.is_leaving = True
    assert (mine.wanted(), leaving.wanted()) == ({2, 3}, frozenset())


def test_gateways_that_lapsed_long_ago_are_forgotten() -> None:
    mine = gateways()
    mine.hear(report("b"), heard_s=0.0)
    mine.note_gone("b")
    mine.hear(report("a"), heard_s=61 * LAPSE_S)
    mine.forget_lapsed()
    assert (mine._peers.keys(), mine._gone) == ({"a"}, set())


def test_who_has_no_partition_left_is_no_owner() -> None:
    before = owned(1, a=(0, 1), b=(2,)).owners
    after = with_owner(before, {2, 0}, gateway="a", url="http://a")
    assert [(each.gateway, each.partitions) for each in after] == [("a", (0, 1, 2))]


def test_an_owner_is_to_fence_all_who_may_not_have_been_fenced_when_the_last_one_died() -> None:
    first = owned(1, a=(0, 1), b=(2,)).owners
    second = with_owner(first, {0, 2}, gateway="c", url="http://c")
    third = with_owner(second, {0}, gateway="d", url="http://d")
    back = with_owner(third, {0}, gateway="a", url="http://a")
    unfenced = [
        {each.gateway: each.unfenced for each in owners} for owners in (second, third, back)
    ]
    assert unfenced == [
        {"a": (), "c": ("a", "b")},
        {"a": (), "c": ("a", "b"), "d": ("a", "b", "c")},
        {"c": ("a", "b"), "a": ("a", "b", "c", "d")},
    ]
    known = with_fenced(back, {"a", "b", "c"}, gateway="a")
    assert [(each.gateway, each.unfenced) for each in known] == [("c", ("a", "b")), ("a", ("d",))]


def test_two_gateways_that_retry_at_the_same_moment_wait_for_different_times() -> None:
    draws = [Gateways(f"g{n}", url=f"http://{n}", partitions=1).draw() for n in range(20)]
    assert len(set(draws)) == 20
    assert max(draws) - min(draws) > 0.5
    assert all(0 <= draw < 1 for draw in draws)
