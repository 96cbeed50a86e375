"""Lanes, sampling, keys, turns and manifests: the gateway's decisions without I/O."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.completions import TurnPart
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.keys import KeyMint, key_sha256
from forgemq_gateway.core.lane_caches import LaneCache
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.manifest import counted, critical_path_s, manifest
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.sampling import pinned_sampling, used_sampling
from forgemq_gateway.core.turns import requested, restored
from forgemq_gateway.protocols.chat_body import request_of
from tests.unit.gateway.completions import completion_of


def report(
    lane: int, *, epoch: int = 1, version: int = 0, is_serving: bool = True
) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=epoch,
        url="",
        is_serving=is_serving,
        lineage=1,
        version=version,
        running=0,
        queued=0,
        reported_ms=0,
    )


def admitted(*, version: int) -> AdmittedGroup:
    return AdmittedGroup(
        group_id="g-1",
        domain="d",
        purpose="train",
        group_size=4,
        task=b"{}",
        version_at_admission=version,
        lineage_at_admission=1,
    )


def lanes_of(*reports: ReportedEngine, heard_s: float = 0.0) -> Lanes:
    lanes = Lanes()
    for record in reports:
        lanes.report(record, heard_s=heard_s)
    return lanes


def chosen(
    lanes: Lanes,
    *,
    cached: dict[int, int] | None = None,
    versions: Sequence[int] = range(9),
    now_s: float = 0.0,
) -> int | None:
    """The lane of a request of which some have cached this much, under each of these versions."""
    known = cached or {}
    lane = lanes.choose(
        context_tokens=2000,
        cached=lambda: {
            (number, 1, (1, version)): tokens
            for number, tokens in known.items()
            for version in versions
        },
        now_s=now_s,
    )
    return None if lane is None else lane.lane


def test_an_episode_stays_where_its_prefix_is_until_that_costs_more() -> None:
    """Of the assumed rates: 0.237 s to read 1,900 tokens elsewhere, here 0.084 s for each other."""
    lanes = lanes_of(report(0), report(1))
    assert chosen(lanes, cached={1: 1900}) == 1
    for _ in range(2):
        lanes.enter(1, 1)
    assert chosen(lanes, cached={1: 1900}) == 1
    lanes.enter(1, 1)
    assert chosen(lanes, cached={1: 1900}) == 0
    lanes.leave(1, 1)
    assert chosen(lanes, cached={1: 1900}) == 1


def test_an_update_of_a_lane_leaves_nothing_cached_there() -> None:
    lanes = lanes_of(report(0), report(1))
    lanes.enter(1, 1)
    assert chosen(lanes, cached={1: 1900}, versions=[0]) == 1
    lanes.report(report(1, version=1), heard_s=0.0)
    assert chosen(lanes, cached={1: 1900}, versions=[0]) == 0


def test_what_lanes_have_cached_is_asked_once_for_all_and_not_if_there_is_none() -> None:
    asked = []

    def cached() -> dict[LaneCache, int]:
        asked.append(1)
        return {}

    assert Lanes().choose(context_tokens=2000, cached=cached, now_s=0.0) is None
    assert asked == []
    lanes = lanes_of(*(report(lane) for lane in range(100)))
    assert lanes.choose(context_tokens=2000, cached=cached, now_s=0.0) is not None
    assert asked == [1]


def test_dead_silent_and_leaving_lanes_take_nothing() -> None:
    lanes = lanes_of(report(0), report(1, is_serving=False))
    assert chosen(lanes, now_s=5.0) == 0
    assert chosen(lanes, now_s=5.1) is None
    for second in range(1, 6):
        lanes.report(report(1, is_serving=False), heard_s=second)
    assert lanes.holds(0, 1, now_s=5.0)
    assert not lanes.holds(0, 1, now_s=5.1)


def test_a_lane_behind_the_weights_that_all_had_loaded_takes_nothing() -> None:
    lanes = lanes_of(report(0, version=3))
    assert chosen(lanes) == 0
    lanes.report(report(1, version=2), heard_s=0)
    assert chosen(lanes, cached={1: 2000}) == 0
    lanes.report(report(1, version=3), heard_s=0)
    assert chosen(lanes, cached={1: 2000}) == 1


def test_a_lane_behind_the_weights_of_a_groups_admission_takes_nothing() -> None:
    lanes = lanes_of(report(1, version=3), report(0, version=4))
    assert chosen(lanes, cached={1: 2000}) == 1
    lanes.admit(admitted(version=4))
    assert chosen(lanes, cached={1: 2000}) == 0
    lanes.report(report(1, version=4), heard_s=0)
    assert chosen(lanes, cached={1: 2000}) == 1


def test_while_lanes_load_new_weights_one_by_one_both_take_requests() -> None:
    lanes = lanes_of(report(0, version=3), report(1, version=3))
    lanes.report(report(1, version=4), heard_s=0)
    assert chosen(lanes, cached={0: 2000}) == 0
    assert chosen(lanes, cached={1: 2000}) == 1


def test_a_new_epoch_starts_empty_and_an_older_one_is_not_believed() -> None:
    lanes = lanes_of(report(0))
    lanes.enter(0, 1)
    assert lanes.report(report(0, epoch=2), heard_s=1.0)
    assert lanes.in_flight() == {0: 0}
    assert not lanes.holds(0, 1, now_s=1.0)
    for second in range(2, 10):
        lanes.report(report(1), heard_s=second)
    assert not lanes.report(report(0, epoch=1), heard_s=9.0)
    assert not lanes.holds(0, 2, now_s=9.0)


@given(
    asked=st.none() | st.integers(1, 5000),
    pinned=st.integers(1, 3000),
    context=st.integers(1, 5000),
)
def test_the_answers_length_fits_what_was_asked_pinned_and_left(
    asked: int | None, pinned: int, context: int
) -> None:
    def use() -> Sampling:
        return used_sampling(
            Sampling(temperature=0.7, max_tokens=pinned),
            max_tokens=asked,
            stop=("a",),
            stop_token_ids=(2,),
            context_tokens=context,
            context_tokens_max=4096,
        )

    if context >= 4096:
        with pytest.raises(RefusedError) as caught:
            use()
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        return
    used = use()
    assert used.max_tokens == min(asked or pinned, pinned, 4096 - context)
    assert (used.temperature, used.stop, used.stop_token_ids) == (0.7, ("a",), (2,))


def test_a_groups_temperature_replaces_the_runs() -> None:
    assert pinned_sampling(Sampling(temperature=1.0), temperature=0.0).temperature == 0.0
    assert pinned_sampling(Sampling(temperature=0.9), temperature=None).temperature == 0.9


@given(key=st.text(max_size=80))
def test_only_the_minted_text_is_a_key(key: str) -> None:
    mint = KeyMint("an-admin-key-of-some-length", run="r")
    assert mint.episode_of(key) is None


def test_keys_are_the_same_after_a_restart_and_belong_to_one_run_and_secret() -> None:
    first, again = KeyMint("secret-secret-16", run="r"), KeyMint("secret-secret-16", run="r")
    key = first.key_of("g-1.0.0")
    assert again.key_of("g-1.0.0") == key
    assert again.episode_of(key) == "g-1.0.0"
    assert KeyMint("secret-secret-16", run="q").episode_of(key) is None
    assert KeyMint("secret-secret-17", run="r").episode_of(key) is None
    assert first.episode_of(key.replace("g-1.0.0", "g-1.0.1")) is None
    assert len(key_sha256(key)) == 64


def episode() -> HeldEpisode:
    opened = OpenedEpisode(
        episode_id="g-1.0.0",
        group_id="g-1",
        index=0,
        attempt=0,
        key_sha256="0" * 64,
        sampling=Sampling(),
        history="append_only",
        lease_s=10,
        opened_ms=0,
    )
    return HeldEpisode(opened, lease_until_s=10.0)


def test_ordinals_count_up_after_delivery_and_a_withdrawn_turn_leaves_no_trace() -> None:
    held = episode()
    first = held.begin("d", matched=None, requested_ms=0, deadline_ms=1)
    assert held.known(["d"]) == [first.request_id]
    held.delivered.add(first.request_id)
    assert held.known(["d"]) == [None]
    second = held.begin("d", matched=None, requested_ms=0, deadline_ms=1)
    assert (second.ordinal, second.sequence) == (1, 1)
    held.forget(second)
    assert held.known(["d"]) == [None]
    third = held.begin("d", matched=None, requested_ms=0, deadline_ms=1)
    assert third.request_id == second.request_id
    other = held.begin("e", matched=None, requested_ms=0, deadline_ms=1)
    held.forget(other)
    assert held.known(["e"]) == [None]


def test_a_retry_of_a_sample_that_was_refused_is_not_the_sample_before_it() -> None:
    held = episode()
    first = held.begin("d", matched=None, requested_ms=0, deadline_ms=1)
    completion = completion_of(1, context=[1], output=[2])
    held.history.completions[first.request_id] = completion
    held.delivered.add(first.request_id)
    assert held.known(["d"], is_retry=True) == [first.request_id]
    held.forget(held.begin("d", matched=None, requested_ms=0, deadline_ms=1))
    assert held.known(["d"], is_retry=True) == [None]


def test_a_lease_lapses_only_while_its_agent_is_silent_and_comes_back_afterwards() -> None:
    held = episode()
    assert not held.has_lapsed(9.9)
    assert held.has_lapsed(10.0)
    held.clients = 1
    assert not held.has_lapsed(99.0)
    held.clients = 0
    held.state = "lapsed"
    held.renew(20.0)
    assert (held.state, held.has_lapsed(29.9), held.has_lapsed(30.0)) == ("open", False, True)


@given(is_delta=st.booleans())
def test_a_turn_is_the_same_after_it_went_through_the_log(is_delta: bool) -> None:
    parent = completion_of(1, context=[1, 2, 3], output=[4], lane=0, epoch=1)
    held = episode()
    turn = held.begin("d", matched=parent.request_id, requested_ms=5, deadline_ms=9)
    turn.prepared = Prepared(
        parent=parent,
        shared_tokens=4,
        context=b"\x07\0\0\0",
        context_tokens=5,
        sampling=Sampling(),
        part=TurnPart(sequence=0, protocol="chat_completions", body_digest="d"),
    )
    turn.needs_full_context = not is_delta
    record = requested(turn, lane=0, epoch=1)
    assert record.is_delta == is_delta
    assert len(record.context) == (4 if is_delta else 20)
    back = restored(record, parent=parent)
    assert back.prepared == turn.prepared
    assert (back.episode_id, back.group_id) == ("g-1.0.0", "g-1")
    assert (back.sent, back.lane, back.epoch, back.waiting) == (1, 0, 1, 0)


def test_overlapping_completions_count_once_in_the_engine_time() -> None:
    ran = [(-1, 1.0), (0, 1.5), (0, 2.0), (2, 0.5)]
    completions = [
        completion_of(offset, context=[1], output=[1], after_offset=after, engine_s=engine_s)
        for offset, (after, engine_s) in enumerate(ran)
    ]
    assert critical_path_s(completions) == 3.5
    assert critical_path_s(completions[:1]) == 1.0
    assert critical_path_s([]) == 0.0
    # Alone in its engine the third is shorter than the second, which then decides.
    third = completion_of(2, context=[1], output=[1], after_offset=0, engine_s=2.0, alone_s=0.25)
    alone = [*completions[:2], third, completions[3]]
    assert critical_path_s(alone) == 3.5
    assert critical_path_s(alone, alone=True) == 3.0


def test_a_manifest_holds_what_was_delivered_or_built_on_in_order() -> None:
    first = completion_of(0, context=[1], output=[1, 2])
    second = completion_of(1, parent=first, context=[1], output=[1])
    third = completion_of(2, context=[1], output=[1])
    first.echoed = True
    kept = counted([third, second, first], delivered={second.request_id})
    assert [
        (e.completion_id, e.sequence, e.output_tokens, e.parent_id) for e in manifest(kept)
    ] == [
        (first.request_id, 0, 2, None),
        (second.request_id, 1, 1, first.request_id),
    ]


def test_the_body_digest_ignores_how_an_answer_is_delivered_and_nothing_else() -> None:
    def digest(**fields: object) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
        return request_of(msgspec.json.encode(body)).body_digest

    assert digest(stream=True, stream_options={"include_usage": True}) == digest()
    assert (
        digest(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == digest()
    )
    assert digest(seed=1) != digest()
    assert digest(user="x") != digest()
    assert digest(messages=[{"role": "user", "content": "b"}]) != digest()
