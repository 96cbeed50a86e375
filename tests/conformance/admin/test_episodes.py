"""Leases, rewards and ends of episodes: what every gateway answers and refuses."""

import pytest

from forgemq_contracts import admin_routes
from forgemq_contracts.admin import DETAIL_CHARACTERS_MAX, RewardRequest
from tests.conformance.admin.conftest import LEASE_S, SHORT_LEASE_S
from tests.conformance.admin.stages import GROUP_SIZE, Caller, error_of

REWARD = RewardRequest(reward_id="r", name="style", value=0.5)


async def test_a_heartbeat_tells_the_length_of_the_lease(caller: Caller):
    claim = await caller.episode()
    answer = await caller.call(admin_routes.RENEW_LEASE, claim.episode_id)
    assert answer.json() == {"lease_s": LEASE_S}
    assert claim.lease_s == LEASE_S


async def test_an_ended_episode_has_no_lease(caller: Caller):
    claim = await caller.episode()
    await caller.call(admin_routes.FINISH_EPISODE, claim.episode_id)
    answer = await caller.call(admin_routes.RENEW_LEASE, claim.episode_id)
    assert (answer.status_code, error_of(answer).type) == (409, "conflict_error")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (admin_routes.FINISH_EPISODE, admin_routes.FINISH_EPISODE),
        (admin_routes.ABORT_EPISODE, admin_routes.ABORT_EPISODE),
        (admin_routes.FINISH_EPISODE, admin_routes.ABORT_EPISODE),
        (admin_routes.ABORT_EPISODE, admin_routes.FINISH_EPISODE),
    ],
)
async def test_a_second_end_is_answered_and_changes_nothing(caller: Caller, first, second):
    claim = await caller.episode()
    answers = [await caller.call(route, claim.episode_id) for route in (first, second)]
    assert [answer.json() for answer in answers] == [{}, {}]
    assert (await caller.read_group(claim.group_id)).finished == 1


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (admin_routes.FINISH_EPISODE, {"tool_s": -1}, "tool_s"),
        (admin_routes.FINISH_EPISODE, {"virtual_s": "late"}, "virtual_s"),
        (admin_routes.FINISH_EPISODE, b'{"result": }', None),
        (admin_routes.ABORT_EPISODE, {"detail": 3}, "detail"),
        (admin_routes.ABORT_EPISODE, {"detail": "x" * (DETAIL_CHARACTERS_MAX + 1)}, "detail"),
    ],
)
async def test_a_bad_end_is_refused_and_the_episode_goes_on(caller: Caller, route, body, param):
    claim = await caller.episode()
    refused = await caller.call(route, claim.episode_id, body=body)
    status = await caller.read_group(claim.group_id)
    assert (refused.status_code, error_of(refused).param) == (400, param)
    assert (status.open, status.finished) == (1, 0)


async def test_an_end_takes_any_result_and_the_longest_detail(caller: Caller):
    group_id = await caller.admitted_group()
    first, second = await caller.claim(group_id), await caller.claim(group_id)
    finish = {"result": [1, {"a": None}], "tool_s": 0.5, "virtual_s": 3}
    abort = {"detail": "x" * DETAIL_CHARACTERS_MAX}
    answers = [
        await caller.call(admin_routes.FINISH_EPISODE, first.episode_id, body=finish),
        await caller.call(admin_routes.ABORT_EPISODE, second.episode_id, body=abort),
    ]
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_reward_is_idempotent_by_its_id_even_after_the_end(caller: Caller):
    claim = await caller.episode()
    statuses = [
        (await caller.call(route, claim.episode_id, body=body)).status_code
        for route, body in (
            (admin_routes.REPORT_REWARD, REWARD),
            (admin_routes.REPORT_REWARD, REWARD),
            (admin_routes.FINISH_EPISODE, None),
            (admin_routes.REPORT_REWARD, REWARD),
            (admin_routes.REPORT_REWARD, {"reward_id": "late", "name": "n", "value": 1}),
        )
    ]
    assert statuses == [200, 200, 200, 200, 409]


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
async def test_a_reward_names_a_completion_of_the_episode(caller: Caller, prefix):
    claim = await caller.episode()
    completion = str((await caller.chat(claim)).json()["id"]).removeprefix("chatcmpl-")
    body = {"reward_id": "r", "name": "n", "value": 1, "completion_id": prefix + completion}
    answer = await caller.call(admin_routes.REPORT_REWARD, claim.episode_id, body=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"completion_id": "0" * 32}, "completion_id"),
        ({"completion_id": "the first one"}, "completion_id"),
        ({"reward_id": ""}, "reward_id"),
        ({"name": "n" * 81}, "name"),
        ({"value": 1.1e12}, "value"),
        ({"value": "high"}, "value"),
    ],
)
async def test_a_bad_reward_is_refused_by_its_field(caller: Caller, change, param):
    claim = await caller.episode()
    body = {"reward_id": "r", "name": "n", "value": 1} | change
    answer = await caller.call(admin_routes.REPORT_REWARD, claim.episode_id, body=body)
    assert (answer.status_code, error_of(answer).param) == (400, param)


async def test_an_ended_episode_samples_nothing(caller: Caller):
    claim = await caller.episode()
    before = await caller.chat(claim)
    await caller.call(admin_routes.ABORT_EPISODE, claim.episode_id)
    after = await caller.chat(claim)
    assert (before.status_code, after.status_code) == (200, 409)


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_lapsed_lease_opens_the_next_attempt_and_the_last_one_fails(hasty: Caller):
    group_id = await hasty.admitted_group(group_size=1)
    first = await hasty.claim(group_id)
    second = await hasty.claim(group_id)
    late = [
        (await hasty.call(route, first.episode_id, body=body)).status_code
        for route, body in (
            (admin_routes.RENEW_LEASE, None),
            (admin_routes.REPORT_REWARD, REWARD),
            (admin_routes.FINISH_EPISODE, None),
            (admin_routes.ABORT_EPISODE, None),
        )
    ]
    over = await hasty.call(admin_routes.CLAIM_EPISODE, group_id, body={"wait_s": 10})
    status = await hasty.read_group(group_id)
    assert (first.attempt, second.attempt, second.index) == (0, 1, 0)
    assert first.key != second.key
    assert late == [409] * 4
    assert over.status_code == 410
    assert (status.open, status.finished) == (0, 1)


async def test_an_episode_that_is_given_back_is_free_at_once_and_stays_so(caller: Caller):
    """Its lease would last for longer than the test."""
    group_id = await caller.admitted_group(group_size=1)
    first = await caller.claim(group_id)
    given = await caller.call(admin_routes.RELEASE_EPISODE, first.episode_id)
    late = await caller.call(admin_routes.RENEW_LEASE, first.episode_id)
    second = await caller.claim(group_id)
    again = await caller.call(admin_routes.RELEASE_EPISODE, first.episode_id)
    await caller.call(admin_routes.FINISH_EPISODE, second.episode_id)
    ended = await caller.call(admin_routes.RELEASE_EPISODE, second.episode_id)
    assert (given.status_code, given.json()) == (200, {})
    assert late.status_code in (200, 409)
    assert (second.index, second.attempt) == (0, 1)
    assert (again.status_code, ended.status_code) == (409, 409)


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_heartbeats_keep_the_episode(hasty: Caller):
    group_id = await hasty.admitted_group(group_size=1)
    claim = await hasty.claim(group_id)
    for _ in range(6):
        body = {"wait_s": SHORT_LEASE_S / 4}
        free = await hasty.call(admin_routes.CLAIM_EPISODE, group_id, body=body)
        kept = await hasty.call(admin_routes.RENEW_LEASE, claim.episode_id)
        assert (free.status_code, kept.status_code) == (204, 200)


async def test_episodes_of_one_group_end_apart(caller: Caller):
    group_id = await caller.admitted_group()
    claims = [await caller.claim(group_id) for _ in range(GROUP_SIZE)]
    await caller.call(admin_routes.FINISH_EPISODE, claims[0].episode_id)
    status = await caller.read_group(group_id)
    kept = await caller.call(admin_routes.RENEW_LEASE, claims[1].episode_id)
    assert (status.open, status.finished, kept.status_code) == (1, 1, 200)
