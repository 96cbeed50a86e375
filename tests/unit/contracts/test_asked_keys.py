"""Requested groups are recognised by their keys exactly, and what cannot be kept is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts import asked_keys
from forgemq_contracts.asked_keys import KEYS_MAX, RANGES_MAX, AskedKeys, number_of

INLINE_BYTES_MAX = 900_000  # The default of `log.inline_bytes_max`: above it, a value is a blob.

KEYS = st.one_of(
    st.builds("{}/{}".format, st.sampled_from(["d", "e", "d/x"]), st.integers(0, 12)),
    st.sampled_from(["", "d", "d/", "d/01", "d/-1", "/1", "d/1 ", "d/" + "9" * 16]),
)
ASKED = st.lists(st.tuples(KEYS, st.sampled_from(["d", "e"])))


@pytest.mark.slow
@given(asked=ASKED, others=ASKED)
def test_exactly_the_keys_that_were_added_are_known(asked, others):
    keys, model = AskedKeys(), set()
    for key, domain in asked:
        assert keys.add(key, domain=domain) == ((key, domain) not in model)
        model.add((key, domain))
        keys._check()
    restored = AskedKeys()
    restored.restore(keys.to_bytes())
    restored._check()
    assert restored.to_bytes() == keys.to_bytes()
    for key, domain in (*asked, *others):
        is_known = (key, domain) in model
        assert keys.has(key, domain=domain) == restored.has(key, domain=domain) == is_known
    assert keys.added_count == len(model)


@given(numbers=st.lists(st.integers(0, 12)), start=st.integers(0, 14))
def test_the_first_unasked_number_follows_what_was_asked(numbers, start):
    keys = AskedKeys()
    for number in numbers:
        keys.add(f"d/{number}", domain="d")
    keys.add("d/0", domain="other")
    expected = next(n for n in range(start, 100) if n not in numbers)
    assert keys.first_unasked("d", domain="d", start=start) == expected


@pytest.mark.slow
def test_a_source_that_counts_up_costs_the_same_however_far_it_is():
    keys = AskedKeys()
    sizes = set()
    for number in range(300_000):
        assert keys.add(f"d/{number}", domain="d")
        if number % 50_000 == 49_999:
            sizes.add(len(keys.to_bytes()))
            assert not keys.add(f"d/{number // 2}", domain="d")
    assert max(sizes) < 40
    assert keys.has("d/0", domain="d")
    assert keys.first_unasked("d", domain="d") == 300_000


def test_keys_without_a_number_have_a_limit_and_numbered_ones_go_on():
    keys = AskedKeys()
    for number in range(KEYS_MAX):
        assert keys.limit_reached(f"k{number}", domain="d") == ""
        keys.add(f"k{number}", domain="d")
    assert str(KEYS_MAX) in keys.limit_reached("one more", domain="d")
    assert keys.limit_reached("d/0", domain="d") == ""
    assert keys.has("k0", domain="d")


def test_ranges_have_a_limit_and_those_that_are_there_may_grow():
    keys = AskedKeys()
    for number in range(RANGES_MAX):
        keys.add(f"d/{10 * number}", domain="d")
    assert str(RANGES_MAX) in keys.limit_reached("d/5", domain="d")
    assert [keys.limit_reached(f"d/{n}", domain="d") for n in (1, 9, 0)] == ["", "", ""]
    assert keys.limit_reached("key", domain="d") == ""


def test_a_snapshot_at_both_limits_fits_into_a_record():
    keys = AskedKeys()
    for number in range(KEYS_MAX):
        keys.add(f"k{number}", domain="d")
    for number in range(RANGES_MAX):
        keys.add(f"{number}/{10**14 + number}", domain="d")
    assert asked_keys._DIGEST_BYTES * KEYS_MAX < len(keys.to_bytes()) < INLINE_BYTES_MAX


def test_the_number_of_a_key_is_that_of_its_own_source():
    assert [number_of(key, source="d") for key in ("d/3", "e/d/3", "d/03", "d")] == [
        3,
        None,
        None,
        None,
    ]
