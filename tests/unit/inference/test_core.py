"""The pure decisions of a lane."""

import hashlib
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.arrays import pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.completions import (
    CancelledCompletion,
    FailureKind,
    RequestedCompletion,
    WeightSpan,
)
from forgemq_contracts.episodes import Sampling
from forgemq_contracts.weights import PublishedWeights, Rendezvous
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.engine_answer import (
    EngineAnswer,
    EngineFinish,
    EngineMeta,
    EngineSpan,
    InvalidAnswerError,
)
from forgemq_inference.core.engine_limits import EngineLimits
from forgemq_inference.core.generation import (
    Timing,
    finished_completion,
    generate_body,
    sampling_parameters,
    spans_of,
)
from forgemq_inference.core.lane import (
    CANCELLED,
    CONTEXT_MISSING,
    DEADLINE,
    Attempt,
    LaneState,
    Refused,
    Run,
    Skipped,
)
from forgemq_inference.core.support import support_of
from forgemq_inference.core.weights import (
    BASE,
    DurableLoad,
    FastLoad,
    Rename,
    Weights,
    WeightsState,
    served_by,
    weights_of_name,
)
from tests.lane_scene import TURN, request_id

LIMITS = EngineLimits(context_tokens_max=100, input_tokens_max=94, vocabulary_size=50)
TIMING = Timing(0.5, 2.0)


def requested(number: int = 1, **fields: object) -> RequestedCompletion:
    values: dict[str, object] = {
        "request_id": request_id(number),
        "attempt": 0,
        "episode_id": "g-0.0.0",
        "group_id": "g-0",
        "lane": 0,
        "epoch": 3,
        "sampling": Sampling(),
        "deadline_ms": 1000,
        "requested_ms": 0,
        "turn": TURN,
        "context": pack_ids([1, 2, 3]),
    }
    return RequestedCompletion(**(values | fields))  # type: ignore[arg-type]


def lane_state(*, remembered_bytes_max: int = 1000) -> LaneState:
    return LaneState(lane=0, epoch=3, remembered_bytes_max=remembered_bytes_max)


def published(lineage: int, version: int, **fields: object) -> PublishedWeights:
    sha256 = hashlib.sha256(f"{lineage}.{version}".encode()).hexdigest()
    values: dict[str, object] = {
        "lineage": lineage,
        "version": version,
        "sha256": sha256,
        "uri": "/w",
        "size_bytes": 1,
    }
    return PublishedWeights(**(values | fields))  # type: ignore[arg-type]


def offer(**fields: object) -> Rendezvous:
    values: dict[str, object] = {
        "lane": 0,
        "epoch": 3,
        "host": "h",
        "port": 1,
        "group_name": "g",
        "backend": "gloo",
        "is_new": True,
    }
    return Rendezvous(**(values | fields))  # type: ignore[arg-type]


def answer(spans: list[EngineSpan] | None = None, **meta: object) -> EngineAnswer:
    values: dict[str, object] = {
        "finish_reason": EngineFinish("stop"),
        "weight_version": "1.2",
        "weight_versions": spans,
        "output_token_logprobs": [(-0.5, 7, None), (-1.5, 8, None)],
    }
    return EngineAnswer([7, 8], EngineMeta(**(values | meta)))  # type: ignore[arg-type]


def context_of(ids: list[int]) -> TokenContext:
    return TokenContext().extended(pack_ids(ids))


# What runs


def test_a_request_runs_once_in_its_own_lane_and_epoch() -> None:
    state = lane_state()
    first = state.take(requested(), now_ms=0)
    assert first == Run(Attempt(request_id(1), 0), context_of([1, 2, 3]))
    assert state.take(requested(), now_ms=0) == Skipped("duplicate")
    assert isinstance(state.take(requested(attempt=1), now_ms=0), Run)
    assert state.take(requested(2, epoch=2), now_ms=0) == Skipped("other_epoch")
    assert state.take(requested(2, lane=1), now_ms=0) == Skipped("other_epoch")


def test_a_deadline_is_checked_when_read_and_when_its_turn_comes() -> None:
    state = lane_state()
    assert state.take(requested(1), now_ms=1000) == DEADLINE
    run = state.take(requested(2), now_ms=999)
    assert isinstance(run, Run)
    assert state.before_start(run.attempt, deadline_ms=1000, now_ms=999) is None
    assert state.before_start(run.attempt, deadline_ms=1000, now_ms=1000) == DEADLINE


def test_a_cancellation_ends_its_attempt_and_earlier_ones_but_no_later_one() -> None:
    state = lane_state()
    for attempt in (0, 1, 2):
        state.take(requested(attempt=attempt), now_ms=0)
    cancelled = CancelledCompletion(request_id=request_id(1), attempt=1, lane=0)
    assert [attempt.number for attempt in state.cancel(cancelled)] == [0, 1]
    assert state.before_start(Attempt(request_id(1), 1), deadline_ms=9, now_ms=0) == CANCELLED
    assert state.before_start(Attempt(request_id(1), 2), deadline_ms=9, now_ms=0) is None
    assert isinstance(state.take(requested(attempt=3), now_ms=0), Run)


def test_an_ended_attempt_is_not_aborted_by_a_late_cancellation() -> None:
    state = lane_state()
    state.take(requested(), now_ms=0)
    state.end(Attempt(request_id(1), 0))
    cancelled = CancelledCompletion(request_id=request_id(1), attempt=0, lane=0)
    assert state.cancel(cancelled) == []


def test_a_delta_is_resolved_against_the_parent_or_missing() -> None:
    state = lane_state()
    state.remembered.remember(request_id(9), context_of([4, 5, 6]))
    delta = {"is_delta": True, "parent_id": request_id(9), "context": pack_ids([8])}
    run = state.take(requested(1, shared_prefix_tokens=2, **delta), now_ms=0)
    assert isinstance(run, Run)
    assert run.context == context_of([4, 5, 8])
    assert state.take(requested(2, shared_prefix_tokens=4, **delta), now_ms=0) == CONTEXT_MISSING
    orphan = delta | {"parent_id": None}
    assert state.take(requested(3, **orphan), now_ms=0) == CONTEXT_MISSING


# What the engine is asked and what its answer says


def test_the_body_carries_the_sampling_and_leaves_room_in_the_context() -> None:
    request = requested(sampling=Sampling(temperature=0.7, max_tokens=500, stop=("x",)))
    body = generate_body(
        request, rid="r", context=context_of([1] * 90), limits=LIMITS, weights=BASE
    )
    assert isinstance(body, dict)
    assert body["sampling_params"]["max_new_tokens"] == 10
    assert body["sampling_params"]["temperature"] == 0.7
    sent = msgspec.json.decode(msgspec.json.encode(body))
    assert (sent["rid"], sent["return_logprob"], sent["input_ids"]) == ("r", True, [1] * 90)
    assert sent["extra_key"] == "0.0"  # K/V of other weights is not found.


@pytest.mark.parametrize(
    ("context", "failure", "error"),
    [
        ([], "engine", "engine: the context is empty"),
        (
            [1] * 95,
            "context_overflow",
            "context_overflow: a context of 95 tokens is over the engine's limit of 94",
        ),
        ([1, 50], "engine", "engine: a token id is outside the vocabulary of 50"),
    ],
)
def test_what_the_engine_could_not_take_is_refused(
    context: list[int], failure: FailureKind, error: str
) -> None:
    asked, read = requested(context=pack_ids(context)), context_of(context)
    refused = generate_body(asked, rid="r", context=read, limits=LIMITS, weights=BASE)
    assert refused == Refused("error", failure, error)


def test_no_top_k_is_minus_one_for_the_engine() -> None:
    assert sampling_parameters(Sampling(top_k=0), tokens_max=5)["top_k"] == -1
    assert sampling_parameters(Sampling(top_k=3), tokens_max=5)["top_k"] == 3


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(), "full"),
        (Sampling(temperature=2.0), "full"),
        (Sampling(temperature=0.0, top_p=0.5), "greedy"),
        (Sampling(temperature=1e-7), "greedy"),
        (Sampling(presence_penalty=0.1), "penalty"),
        (Sampling(top_k=5, top_p=0.5), "top_k"),
        (Sampling(top_p=0.99), "top_p"),
    ],
)
def test_support_is_full_only_where_nothing_truncates(sampling: Sampling, support: str) -> None:
    assert support_of(sampling) == support


def test_an_answer_becomes_a_record_with_exactly_its_numbers_and_its_stop_string() -> None:
    request = requested(shared_prefix_tokens=2, parent_id=request_id(9), attempt=4)
    finish = EngineFinish("stop", matched="END")
    spans = [EngineSpan("1.2", 0, 1), EngineSpan("1.3", 1, 2)]
    record = finished_completion(
        request,
        answer(spans, cached_tokens=2, finish_reason=finish),
        limits=LIMITS,
        timing=TIMING,
        is_cancelled=False,
    )
    assert unpack_ids(record.context) == [3]
    assert (unpack_ids(record.output), record.stop_string) == ([7, 8], "END")
    assert unpack_floats(record.logprobs) == [-0.5, -1.5]
    assert record.spans == (
        WeightSpan(start=0, end=1, lineage=1, version=2),
        WeightSpan(start=1, end=2, lineage=1, version=3),
    )
    assert (record.attempt, record.parent_id, record.cached_tokens) == (4, request_id(9), 2)
    assert (record.queued_s, record.engine_s) == TIMING[:2]


def test_an_aborted_generation_is_no_completion() -> None:
    aborted = answer(finish_reason=EngineFinish("abort", "out of memory"))
    ours, theirs = (
        finished_completion(
            requested(), aborted, limits=LIMITS, timing=TIMING, is_cancelled=is_cancelled
        )
        for is_cancelled in (True, False)
    )
    assert (ours.finish_reason, ours.error, ours.output) == ("abort", "cancelled", b"")
    assert (theirs.finish_reason, theirs.error) == ("abort", "engine: out of memory")
    assert (ours.failure, theirs.failure) == ("cancelled", "engine")


@pytest.mark.parametrize(
    "broken",
    [
        {"output_token_logprobs": [(-0.5, 7, None), (float("nan"), 8, None)]},
        {"output_token_logprobs": [(-0.5, 7, None), (-1.5, 9, None)]},
        {"weight_version": "default"},
        {"spans": [EngineSpan("1.2", 0, 1)]},
        {"spans": [EngineSpan("1.2", 1, 2)]},
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(InvalidAnswerError):
        finished_completion(
            requested(),
            answer(**broken),  # type: ignore[arg-type]
            limits=LIMITS,
            timing=TIMING,
            is_cancelled=False,
        )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=8))
def test_spans_cover_the_output_with_alternating_versions(pieces: list[tuple[int, int]]) -> None:
    position, spans, expected = 0, [], []
    for version, length in pieces:
        spans.append(EngineSpan(f"1.{version}", position, position + length))
        expected += [version] * length
        position += length
    meta = EngineMeta(EngineFinish("stop"), weight_version="1.0", weight_versions=spans)
    joined = spans_of(meta, tokens_count=position)
    assert [span.version for span in joined for _ in range(span.start, span.end)] == expected
    pairs = list(pairwise(joined))
    assert all(left.version != right.version for left, right in pairs)
    assert all(left.end == right.start for left, right in pairs)


# Which weights come next


def state_serving(weights: Weights = BASE, sha256: str | None = None) -> WeightsState:
    served = msgspec.structs.replace(served_by(weights.name, base_sha256=None), sha256=sha256)
    return WeightsState(lane=0, epoch=3, served=served)


@given(st.permutations([(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]))
def test_the_newest_lineage_wins_in_any_order_of_publication(
    order: list[tuple[int, int]],
) -> None:
    state = state_serving()
    for lineage, version in order:
        state.observe(published(lineage, version))
    load = state.next_load()
    assert isinstance(load, DurableLoad)
    assert (load.published.lineage, load.published.version) == (2, 2)
    state.note_loaded(load.published)
    assert state.next_load() is None


def test_a_new_lineage_with_fewer_steps_is_loaded() -> None:
    state = state_serving(Weights(1, 9))
    state.observe(published(2, 4))
    assert isinstance(state.next_load(), DurableLoad)


def test_bytes_that_are_there_are_only_renamed() -> None:
    publication = published(1, 0)
    state = state_serving(sha256=publication.sha256)
    state.observe(publication)
    assert state.next_load() == Rename(publication)


@pytest.mark.parametrize(
    ("rendezvous", "is_fast"),
    [
        (offer(), True),
        (offer(lane=1), False),
        (offer(epoch=2), False),
        (offer(is_new=False), False),
        (offer(is_new=False, group_name="joined"), True),
    ],
)
def test_a_fast_path_is_taken_where_it_is_ours_and_its_group_can_be_there(
    rendezvous: Rendezvous, is_fast: bool
) -> None:
    state = state_serving()
    state.note_joined("joined")
    state.observe(published(1, 1, fast_paths=(rendezvous,)))
    assert isinstance(state.next_load(), FastLoad) == is_fast


def test_after_a_broken_update_only_the_durable_copy_helps() -> None:
    publication = published(1, 1, fast_paths=(offer(),))
    state = state_serving()
    state.observe(publication)
    state.note_broken()
    assert state.next_load() == DurableLoad(publication)
    state.note_loaded(publication)
    assert state.next_load() is None


def test_a_restarted_engine_is_in_no_group() -> None:
    state = state_serving()
    state.note_joined("g")
    state.note_restarted(served_by("0.0", base_sha256="b"))
    state.observe(published(1, 1, fast_paths=(offer(is_new=False),)))
    assert isinstance(state.next_load(), DurableLoad)


@pytest.mark.parametrize(
    ("name", "weights", "is_dirty"),
    [
        ("0.0", BASE, False),
        ("default", BASE, False),
        ("2.7", Weights(2, 7), False),
        ("broken", BASE, True),
    ],
)
def test_an_engines_name_for_its_weights_says_what_it_holds(
    name: str, weights: Weights, is_dirty: bool
) -> None:
    served = served_by(name, base_sha256="b")
    assert (served.weights, served.is_dirty) == (weights, is_dirty)
    assert served.sha256 == ("b" if weights == BASE and not is_dirty else None)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_name_says_lineage_and_version(lineage: int, version: int) -> None:
    assert weights_of_name(Weights(lineage, version).name) == (lineage, version)


@pytest.mark.parametrize("name", ["", "1", "1.", "01.2", "1.2.3", "a.b", "-1.2"])
def test_other_names_are_no_weights(name: str) -> None:
    assert weights_of_name(name) is None
