"""Contexts in both forms, and how long a lane remembers them."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.remembered import RememberedCompletions


def context_of(ids: list[int]) -> TokenContext:
    return TokenContext().extended(pack_ids(ids))


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=5), max_size=6), st.integers(0, 30))
def test_both_forms_of_a_context_hold_the_same_ids(parts: list[list[int]], count: int) -> None:
    context = TokenContext()
    for part in parts:
        context = context.extended(pack_ids(part))
    ids = [token for part in parts for token in part]
    assert context.tokens == pack_ids(ids)
    assert msgspec.json.decode(b"[" + context.text + b"]") == ids
    assert context.first(min(count, len(ids))) == context_of(ids[:count])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60), st.integers(0, 80))
def test_remembered_tokens_never_exceed_their_bytes_and_are_never_altered(
    writes: list[tuple[int, int]], bytes_max: int
) -> None:
    remembered = RememberedCompletions(bytes_max=bytes_max)
    newest: dict[int, TokenContext] = {}
    for name, count in writes:
        tokens = context_of([name] * count)
        held = remembered.prefix(str(name), tokens_count=0) is not None
        remembered.remember(str(name), tokens)
        newest[name] = newest[name] if held else tokens
        assert remembered.size_bytes <= bytes_max
    for name, tokens in newest.items():
        assert remembered.prefix(str(name), tokens_count=tokens.tokens_count) in (None, tokens)


def test_the_least_recently_used_completion_is_forgotten_first() -> None:
    remembered = RememberedCompletions(bytes_max=15)
    remembered.remember("a", context_of([1]))
    remembered.remember("b", context_of([2]))
    remembered.remember("c", context_of([3]))
    assert remembered.prefix("a", tokens_count=1) == context_of([1])
    remembered.remember("d", context_of([4]))
    assert remembered.prefix("b", tokens_count=0) is None
    assert remembered.prefix("a", tokens_count=1) == context_of([1])
