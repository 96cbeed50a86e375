"""A record whose bytes break a rule does not decode."""

import json
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.examples import full, minimal

IDS = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=20)
FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20)


def fields_of(topic: topics.Topic, record: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(topics.encode(record))
    assert topics.decode(topic, topics.encode(record)) == record
    return fields


def decoded(topic: topics.Topic, fields: dict[str, Any]) -> msgspec.Struct:
    return topics.decode(topic, msgspec.msgpack.encode(fields))


COMPLETION = fields_of(topics.FINISHED_COMPLETIONS, minimal(topics.FINISHED_COMPLETIONS.record))
REQUEST = fields_of(topics.REQUESTED_COMPLETIONS, minimal(topics.REQUESTED_COMPLETIONS.record))
TREE = fields_of(topics.MERGED_TREES, full(topics.MERGED_TREES.record))


def is_ids(data: bytes) -> bool:
    """The same rule, token by token."""
    return len(data) % 4 == 0 and all(value >= 0 for value in unpack_ids(data))


@given(ids=IDS)
def test_token_ids_come_back_as_they_were_packed(ids: list[int]):
    assert unpack_ids(pack_ids(ids)) == ids


@given(context=st.binary(max_size=13) | IDS.map(pack_ids))
def test_a_context_decodes_exactly_where_it_is_token_ids(context: bytes):
    for topic, fields in (
        (topics.FINISHED_COMPLETIONS, COMPLETION),
        (topics.REQUESTED_COMPLETIONS, REQUEST),
    ):
        if is_ids(context):
            assert decoded(topic, {**fields, "context": context}).context == context
        else:
            with pytest.raises(msgspec.ValidationError, match="context: "):
                decoded(topic, {**fields, "context": context})


@given(
    output=st.binary(max_size=9) | IDS.map(pack_ids),
    logprobs=st.binary(max_size=9) | FLOATS.map(pack_floats),
)
def test_an_output_decodes_exactly_with_one_finite_log_probability_a_token(
    output: bytes, logprobs: bytes
):
    fields = {**COMPLETION, "output": output, "logprobs": logprobs}
    is_sound = (
        is_ids(output)
        and len(logprobs) == len(output)
        and all(map(math.isfinite, unpack_floats(logprobs)))
    )
    if is_sound:
        assert decoded(topics.FINISHED_COMPLETIONS, fields).logprobs == logprobs
    else:
        with pytest.raises(msgspec.ValidationError, match=r"output: |logprobs: "):
            decoded(topics.FINISHED_COMPLETIONS, fields)


@given(
    bounds=st.lists(
        st.tuples(st.integers(min_value=0, max_value=5), st.integers(min_value=0, max_value=5)),
        min_size=1,
        max_size=4,
    )
)
def test_weight_spans_decode_exactly_where_they_cover_the_output(bounds: list[tuple[int, int]]):
    spans = [{"start": a, "end": b, "lineage": 1, "version": 0} for a, b in bounds]
    fields = {
        **COMPLETION,
        "output": pack_ids([1] * 4),
        "logprobs": pack_floats([-1.0] * 4),
        "spans": spans,
    }
    covered = [token for a, b in bounds for token in range(a, b)]
    if covered == [0, 1, 2, 3] and all(a < b for a, b in bounds):
        assert len(decoded(topics.FINISHED_COMPLETIONS, fields).spans) == len(bounds)
    else:
        with pytest.raises(msgspec.ValidationError, match="spans: "):
            decoded(topics.FINISHED_COMPLETIONS, fields)


@given(tokens=st.integers(0, 3), routes=st.binary(max_size=13))
def test_routes_decode_exactly_with_as_many_experts_for_every_token(tokens: int, routes: bytes):
    fields = {
        **COMPLETION,
        "output": pack_ids([1] * tokens),
        "logprobs": pack_floats([-1.0] * tokens),
        "routes": routes,
    }
    is_whole = not routes or (tokens > 0 and len(routes) % (2 * tokens) == 0)
    if is_whole and all(expert >= 0 for (expert,) in struct.iter_unpack("<h", routes)):
        assert decoded(topics.FINISHED_COMPLETIONS, fields).routes == routes
    else:
        with pytest.raises(msgspec.ValidationError, match="routes: "):
            decoded(topics.FINISHED_COMPLETIONS, fields)


def test_shared_tokens_need_a_parent_and_a_whole_context_holds_them():
    with pytest.raises(msgspec.ValidationError, match="shared with no parent"):
        decoded(topics.FINISHED_COMPLETIONS, {**COMPLETION, "shared_prefix_tokens": 1})
    asked = {**REQUEST, "parent_id": "0" * 32, "shared_prefix_tokens": 2, "context": pack_ids([1])}
    with pytest.raises(msgspec.ValidationError, match="has 1 tokens, 2 are shared already"):
        decoded(topics.REQUESTED_COMPLETIONS, asked)
    assert decoded(topics.REQUESTED_COMPLETIONS, {**asked, "is_delta": True})


ARRAYS = [name for name, value in TREE.items() if isinstance(value, bytes)]


@pytest.mark.parametrize("array", ARRAYS)
@given(more=st.binary(min_size=1, max_size=9))
def test_a_tree_decodes_only_where_all_its_arrays_fit_together(array: str, more: bytes):
    """Each array but `tokens` must have the length that N, M, E or S gives it."""
    fields = {**TREE, array: TREE[array] + more}
    alone = {"tokens": is_ids(more), "entry_route": len(more) % 2 == 0}
    if alone.get(array, False):
        assert decoded(topics.MERGED_TREES, fields)
    else:
        with pytest.raises(msgspec.ValidationError):
            decoded(topics.MERGED_TREES, fields)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "array",
    ["entry_logprob", "entry_reference_logprob", "sample_advantage", "sample_temperature"],
)
def test_a_tree_with_a_number_that_is_none_does_not_decode(array: str, value: float):
    with pytest.raises(msgspec.ValidationError, match=f"{array}: an item is not finite"):
        decoded(topics.MERGED_TREES, {**TREE, array: struct.pack("<f", value)})


def is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


@given(
    document=st.binary(max_size=12)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    ).map(lambda value: json.dumps(value, ensure_ascii=False).encode())
)
def test_a_task_decodes_only_where_it_is_json(document: bytes):
    fields = fields_of(topics.REQUESTED_GROUPS, minimal(topics.REQUESTED_GROUPS.record))
    if is_json(document):
        assert decoded(topics.REQUESTED_GROUPS, {**fields, "task": document}).task == document
    else:
        with pytest.raises(msgspec.ValidationError, match="task: no JSON document"):
            decoded(topics.REQUESTED_GROUPS, {**fields, "task": document})


@pytest.mark.parametrize(
    ("field", "document"),
    [
        ("tools", b"{}"),
        ("tools", b"[1]"),
        ("tools", b'[{"a": %s}]' % (b"9" * 5000)),
        ("messages", b""),
        ("messages", b'[{"role": "\xff"}]'),
        ("asked", b"[]"),
        ("asked", b'{"seed": "\xff"}'),
    ],
)
def test_the_turn_that_a_gateway_rebuilds_its_state_from_is_json(field: str, document: bytes):
    turn = {**COMPLETION["turn"], field: document}
    with pytest.raises(msgspec.ValidationError, match=f"{field}: no JSON"):
        decoded(topics.FINISHED_COMPLETIONS, {**COMPLETION, "turn": turn})


@pytest.mark.parametrize("field", ["outcome", "speed"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_grade_is_a_finite_number(field: str, value: float):
    fields = fields_of(topics.GRADED_EPISODES, full(topics.GRADED_EPISODES.record))
    with pytest.raises(msgspec.ValidationError, match=f"{field}: must be finite"):
        decoded(topics.GRADED_EPISODES, {**fields, field: value})
