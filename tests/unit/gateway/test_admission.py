"""Places and queues of requests: limits for each key, and a fair share under overload."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from forgemq_gateway.core.admission import BURST_S, Admission, Limits, Ticket
from forgemq_gateway.core.errors import RefusedError


def limits(
    *, requests: int = 2, waiting: int = 100, of_key: int = 10, rate_per_s: float = 1000.0
) -> Limits:
    return Limits(
        requests_max=requests,
        waiting_max=waiting,
        key_requests_max=of_key,
        key_rate_per_s_max=rate_per_s,
    )


def refused(admission: Admission, key: str, *, now_s: float = 0.0) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        admission.arrive(key, now_s=now_s)
    assert caught.value.status == 429
    return caught.value


def test_a_free_place_goes_to_the_key_that_holds_fewest() -> None:
    admission = Admission(limits())
    first, _, _ = (admission.arrive("a", now_s=0.0) for _ in range(3))
    other = admission.arrive("b", now_s=0.0)
    assert admission.leave(first) == [other]
    assert other.has_place


def test_of_keys_that_hold_as_many_the_one_that_waits_longest_is_next() -> None:
    admission = Admission(limits(requests=1))
    served = admission.arrive("a", now_s=0.0)
    waiting = [admission.arrive(key, now_s=0.0) for key in "bbcb"]
    order: list[Ticket] = []
    while len(order) < 4:
        (served,) = admission.leave(served)
        order.append(served)
    assert order == [waiting[0], waiting[2], waiting[1], waiting[3]]


def test_a_key_has_no_more_requests_than_its_limit_served_or_waiting() -> None:
    admission = Admission(limits(requests=1, of_key=3))
    tickets = [admission.arrive("a", now_s=0.0) for _ in range(3)]
    assert refused(admission, "a").limit == "key_requests"
    assert not admission.arrive("b", now_s=0.0).has_place
    admission.leave(tickets[-1])
    assert not admission.arrive("a", now_s=0.0).has_place


def test_beyond_the_queue_a_request_is_refused_and_changes_nothing() -> None:
    admission = Admission(limits(requests=1, waiting=1))
    served, waiting = admission.arrive("a", now_s=0.0), admission.arrive("b", now_s=0.0)
    assert refused(admission, "c").limit == "requests"
    admission._check()
    assert admission.leave(served) == [waiting]
    assert admission.leave(waiting) == []
    assert (admission.placed, admission.waiting) == (0, 0)


def test_a_full_queue_takes_a_key_with_fewer_in_it_for_the_newest_of_the_key_with_most() -> None:
    admission = Admission(limits(requests=1, waiting=3))
    served, *flood = (admission.arrive("a", now_s=0.0) for _ in range(4))
    other = admission.arrive("b", now_s=0.0)
    assert other.pushed_out is flood[-1]
    assert flood[-1].is_out
    admission._check()
    assert admission.leave(flood[-1]) == []
    # Now a has two in it; a second one of b would only turn the tables.
    assert refused(admission, "b").limit == "requests"
    assert admission.leave(served) == [other]


def test_a_key_is_held_to_its_rate_after_a_burst_and_hears_when_to_come_back() -> None:
    admission = Admission(limits(requests=1000, of_key=1000, rate_per_s=0.5))
    # The burst of one second is half a request at this rate: the second one is 1 s early.
    admission.arrive("a", now_s=10.0)
    early = refused(admission, "a", now_s=10.0)
    assert (early.limit, early.retry_after_s) == ("key_rate", 1)
    admission.arrive("b", now_s=10.0)
    admission.arrive("a", now_s=11.0)
    assert refused(admission, "a", now_s=11.0).retry_after_s == 2


def test_the_rate_holds_over_time() -> None:
    rate = 50
    admission = Admission(limits(requests=100_000, of_key=100_000, rate_per_s=rate))
    taken = 0
    for step in range(10_000):  # 1,000 a second for 10 s
        try:
            admission.arrive("a", now_s=step / 1000)
        except RefusedError:
            continue
        taken += 1
    assert 10 * rate <= taken <= (10 + BURST_S) * rate + 1


def test_a_key_that_floods_leaves_every_other_key_its_share() -> None:
    """Each round 4 places become free; one key asks for 40 places, four others for one each."""
    admission = Admission(limits(requests=4, waiting=1000, of_key=40))
    served: list[Ticket] = []
    given: Counter[str] = Counter()
    for _ in range(50):
        for key in ("flood",) * 40 + ("a", "b", "c", "d"):
            try:
                ticket = admission.arrive(key, now_s=0.0)
            except RefusedError:
                assert key == "flood"
                continue
            served += [ticket] * ticket.has_place
        now, served = served, []
        for ticket in now:
            given[ticket.key] += 1
            served += admission.leave(ticket)
    fair = sum(given.values()) / 5
    assert all(given[key] >= 0.9 * fair for key in "abcd"), given


@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_one_place_or_leaves_and_none_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    admission = Admission(limits(requests=3, waiting=6, of_key=4, rate_per_s=20.0))
    inside: list[Ticket] = []
    for step in range(2000):
        if inside and rng.random() < 0.5:
            gone = inside.pop(rng.randrange(len(inside)))
            given = admission.leave(gone)
            assert all(ticket.has_place and ticket in inside for ticket in given)
        else:
            with suppress(RefusedError):
                ticket = admission.arrive(rng.choice("aaaabcdef"), now_s=step / 100)
                inside.append(ticket)
                if ticket.pushed_out is not None:
                    inside.remove(ticket.pushed_out)
        admission._check()
        assert len(inside) == admission.placed + admission.waiting


def test_keys_that_are_gone_are_forgotten() -> None:
    admission = Admission(limits())
    for number in range(10_000):
        admission.leave(admission.arrive(f"g-{number}.0.0", now_s=number))
    assert len(admission._keys) <= 2048
