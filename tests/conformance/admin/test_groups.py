"""Groups and claims: what every gateway answers and refuses."""

import asyncio

import msgspec
import pytest

from forgemq_contracts import admin_routes
from forgemq_contracts.admin import GroupQuery, GroupStatus, RunStatus
from tests.conformance.admin.stages import (
    DOMAIN,
    GROUP_SIZE,
    GROUPS_REQUESTED_MAX,
    STEPS,
    Caller,
    error_of,
    group_request,
)

MISSING = "g-0123456789abcdef"
EPISODE = f"{MISSING}.0.0"
CALLS = [
    (admin_routes.REQUEST_GROUP, (), group_request()),
    (admin_routes.READ_GROUP, (MISSING,), None),
    (admin_routes.CLAIM_EPISODE, (MISSING,), None),
    (admin_routes.RENEW_LEASE, (EPISODE,), None),
    (admin_routes.RELEASE_EPISODE, (EPISODE,), None),
    (admin_routes.REPORT_REWARD, (EPISODE,), {"reward_id": "r", "name": "n", "value": 1}),
    (admin_routes.FINISH_EPISODE, (EPISODE,), None),
    (admin_routes.ABORT_EPISODE, (EPISODE,), None),
    (admin_routes.READ_RUN, (), None),
    (admin_routes.READ_RESULTS, ("other",), None),
]


def name_of(value: object) -> str:
    return getattr(value, "name", "")


def test_every_route_is_called():
    assert tuple(route for route, *_ in CALLS) == admin_routes.ALL


@pytest.mark.parametrize(("route", "ids", "body"), CALLS, ids=name_of)
async def test_a_wrong_key_opens_no_route(caller: Caller, route, ids, body):
    answer = await caller.call(route, *ids, body=body, key="not-the-admin-key")
    assert answer.status_code == 401
    assert error_of(answer).type == "authentication_error"


@pytest.mark.parametrize(
    ("route", "ids", "body"),
    [call for call in CALLS if call[1]],
    ids=name_of,
)
async def test_what_does_not_exist_is_404(caller: Caller, route, ids, body):
    answer = await caller.call(route, *ids, body=body)
    assert answer.status_code == 404
    assert error_of(answer).type == "not_found_error"


@pytest.mark.parametrize("episode_id", ["abc", "g-0.0", "g-0.x.0", "g-0.0.0.0"])
async def test_an_id_that_no_episode_can_have_is_404(caller: Caller, episode_id):
    assert (await caller.call(admin_routes.RENEW_LEASE, episode_id)).status_code == 404


async def test_the_same_key_asks_for_the_same_group(caller: Caller):
    first = await caller.request_group("k")
    again = await caller.request_group("k")
    taken = await caller.request_group("k", group_size=7, takes_known=True)
    other = await caller.request_group("other")
    assert first == again == taken
    assert other.group_id != first.group_id
    assert first == GroupStatus(
        group_id=first.group_id,
        state="requested",
        retire_reason="",
        group_size=GROUP_SIZE,
        queue_index=None,
        open=0,
        finished=0,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"n": 99}},
        {"group_size": 7},
        {"purpose": "eval"},
        {"temperature": 0.5},
        {"round_name": "x"},
    ],
)
async def test_a_key_of_another_open_group_is_refused_by_the_field(caller: Caller, change):
    await caller.request_group("k")
    same = msgspec.json.decode(msgspec.json.encode(group_request("k")))
    answer = await caller.call(admin_routes.REQUEST_GROUP, body=same | change)
    error = error_of(answer)
    assert (answer.status_code, error.type, error.param) == (409, "conflict_error", *change)


async def test_a_key_of_another_source_is_refused_by_the_field(caller: Caller):
    body = msgspec.json.decode(msgspec.json.encode(group_request("k"))) | {"purpose": "eval"}
    await caller.call(admin_routes.REQUEST_GROUP, body=body)
    answer = await caller.call(admin_routes.REQUEST_GROUP, body=body | {"source": "import"})
    assert (answer.status_code, error_of(answer).param) == (409, "source")


async def test_an_import_that_asks_to_be_trained_is_refused_by_the_purpose(caller: Caller):
    body = msgspec.json.decode(msgspec.json.encode(group_request("k"))) | {"source": "import"}
    answer = await caller.call(admin_routes.REQUEST_GROUP, body=body)
    assert answer.status_code == 400
    assert error_of(answer).param == "purpose"
    assert error_of(answer).message.startswith("purpose must be eval: imports of ")
    taken = await caller.call(admin_routes.REQUEST_GROUP, body=body | {"purpose": "eval"})
    assert taken.status_code == 200


async def test_a_group_of_live_traffic_is_the_gateways_own(caller: Caller):
    body = msgspec.json.decode(msgspec.json.encode(group_request("k"))) | {"purpose": "eval"}
    answer = await caller.call(admin_routes.REQUEST_GROUP, body=body | {"source": "live"})
    assert answer.status_code == 400
    assert error_of(answer).message.startswith("source: must be agent or import")


async def test_a_run_says_which_task_is_the_first_that_is_not_over(caller: Caller):
    async def first() -> dict[str, int]:
        status = (await caller.call(admin_routes.READ_RUN)).json()
        return status["first_tasks"]

    firsts = [await first()]
    for number in (0, 1):
        await caller.request_group(f"{DOMAIN}/{number}")
    await caller.request_group("another/7")
    firsts.append(await first())
    for key in (f"{DOMAIN}/0", "another/7", f"{DOMAIN}/1"):
        group_id = (await caller.request_group(key)).group_id
        await caller.stage.retire(group_id, "trained")
        await caller.read_group(group_id, GroupQuery(wait_s=20, state="requested"))
        firsts.append(await first())
    assert [one[DOMAIN] for one in firsts] == [0, 0, 1, 1, 2]


async def test_a_group_may_have_its_own_size(caller: Caller):
    assert (await caller.request_group(group_size=5)).group_size == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"idempotency_key": "k", "task": {}}, "domain"),
        ({"domain": "moon", "idempotency_key": "k", "task": {}}, "domain"),
        ({"domain": DOMAIN, "idempotency_key": "k"}, "task"),
        ({"domain": DOMAIN, "idempotency_key": "", "task": {}}, "idempotency_key"),
        ({"domain": DOMAIN, "idempotency_key": "k", "task": {}, "purpose": "fun"}, "purpose"),
        ({"domain": DOMAIN, "idempotency_key": "k", "task": {}, "source": "dream"}, "source"),
        ({"domain": DOMAIN, "idempotency_key": "k", "task": {}, "group_size": 0}, "group_size"),
        ({"domain": DOMAIN, "idempotency_key": "k", "task": {}, "temperature": 11}, "temperature"),
        (b'{"domain": "shop"', None),
        (b'{"domain": "shop", "idempotency_key": "k", "task": "\xff"}', None),
    ],
)
async def test_a_bad_group_is_refused_by_its_field(caller: Caller, body, param):
    answer = await caller.call(admin_routes.REQUEST_GROUP, body=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error.type, error.param) == ("invalid_request_error", param)


async def test_a_body_over_the_limit_is_413(caller: Caller):
    body = b'{"domain": "shop", "idempotency_key": "k", "task": "%s"}' % (b"x" * 2**24)
    assert (await caller.call(admin_routes.REQUEST_GROUP, body=body)).status_code == 413


async def test_groups_beyond_those_that_may_wait_are_429(caller: Caller):
    for number in range(GROUPS_REQUESTED_MAX):
        await caller.request_group(f"k{number}")
    refused = await caller.call(admin_routes.REQUEST_GROUP, body=group_request("k"))
    known = await caller.call(admin_routes.REQUEST_GROUP, body=group_request("k0"))
    assert (refused.status_code, known.status_code) == (429, 200)
    assert refused.headers["retry-after"] == "1"


async def test_after_the_last_step_only_training_groups_are_410(caller: Caller):
    await caller.request_group("before")
    running = (await caller.call(admin_routes.READ_RUN)).content
    await caller.stage.end_training()
    async with asyncio.timeout(10):
        while True:
            ended = msgspec.json.decode(
                (await caller.call(admin_routes.READ_RUN)).content, type=RunStatus
            )
            if ended.training_ended:
                break
            await asyncio.sleep(0.02)
    assert msgspec.json.decode(running, type=RunStatus) == RunStatus(
        run="r",
        steps=STEPS,
        steps_trained=0,
        training_ended=False,
        domains=(DOMAIN,),
        first_tasks={DOMAIN: 0},
    )
    assert ended.steps_trained == STEPS
    statuses = [
        (await caller.call(admin_routes.REQUEST_GROUP, body=body)).status_code
        for body in (
            group_request("late"),
            group_request("before"),
            group_request("late", purpose="eval"),
        )
    ]
    assert statuses == [410, 200, 200]


async def test_a_long_poll_answers_when_the_state_changes(caller: Caller):
    group_id = (await caller.request_group()).group_id
    waiting = asyncio.ensure_future(caller.read_group(group_id, GroupQuery(wait_s=20)))
    await asyncio.sleep(0.1)
    was_waiting = not waiting.done()
    await caller.stage.admit(group_id)
    async with asyncio.timeout(5):
        admitted = await waiting
    assert was_waiting
    assert (admitted.state, admitted.queue_index) == ("admitted", 0)


async def test_a_long_poll_answers_at_once_if_the_named_state_is_over(caller: Caller):
    group_id = await caller.admitted_group()
    async with asyncio.timeout(5):
        status = await caller.read_group(group_id, GroupQuery(wait_s=20, state="requested"))
    assert status.state == "admitted"


async def test_a_long_poll_ends_with_the_state_as_it_is(caller: Caller):
    group_id = (await caller.request_group()).group_id
    assert (await caller.read_group(group_id, GroupQuery(wait_s=0.2))).state == "requested"


async def test_a_retired_group_is_answered_at_once_with_its_reason(caller: Caller):
    group_id = await caller.admitted_group()
    await caller.stage.retire(group_id, "stale")
    async with asyncio.timeout(5):
        retired = await caller.read_group(group_id, GroupQuery(wait_s=20, state="admitted"))
        again = await caller.read_group(group_id, GroupQuery(wait_s=20, state="retired"))
    assert (retired.state, retired.retire_reason, retired.group_size) == (
        "retired",
        "stale",
        GROUP_SIZE,
    )
    assert again == retired


@pytest.mark.parametrize(
    ("query", "param"),
    [({"wait_s": "soon"}, "wait_s"), ({"wait_s": "-1"}, "wait_s"), ({"state": "asleep"}, "state")],
)
async def test_a_bad_query_is_refused_by_its_name(caller: Caller, query, param):
    group_id = (await caller.request_group()).group_id
    answer = await caller.call(admin_routes.READ_GROUP, group_id, query=query)
    assert (answer.status_code, error_of(answer).param) == (400, param)


async def test_nothing_can_be_claimed_before_the_group_has_its_slot(caller: Caller):
    group_id = (await caller.request_group()).group_id
    assert await caller.claim_status(group_id) == 204


async def test_claims_hand_out_each_episode_once_and_then_nothing(caller: Caller):
    group_id = await caller.admitted_group(temperature=0.5)
    first, second = await asyncio.gather(caller.claim(group_id), caller.claim(group_id))
    status = await caller.read_group(group_id)
    assert await caller.claim_status(group_id) == 204
    assert {(claim.index, claim.attempt) for claim in (first, second)} == {(0, 0), (1, 0)}
    assert {claim.episode_id for claim in (first, second)} == {
        f"{group_id}.0.0",
        f"{group_id}.1.0",
    }
    assert (bytes(first.task), first.temperature) == (b'{"n":1}', 0.5)
    assert first.key != second.key
    assert first.key in first.session_url
    assert first.base_url.startswith(caller.stage.url)
    assert (status.open, status.finished) == (2, 0)


async def test_a_claim_waits_for_the_slot(caller: Caller):
    group_id = (await caller.request_group()).group_id
    waiting = asyncio.ensure_future(caller.claim(group_id))
    await asyncio.sleep(0.1)
    await caller.stage.admit(group_id)
    async with asyncio.timeout(5):
        assert (await waiting).index == 0


@pytest.mark.parametrize("wait_s", [-1, "long"])
async def test_a_claim_with_a_bad_wait_is_refused(caller: Caller, wait_s):
    group_id = await caller.admitted_group()
    body = {"wait_s": wait_s}
    answer = await caller.call(admin_routes.CLAIM_EPISODE, group_id, body=body)
    assert (answer.status_code, error_of(answer).param) == (400, "wait_s")


async def test_a_group_whose_episodes_have_all_ended_is_over(caller: Caller):
    group_id = await caller.admitted_group()
    for _ in range(GROUP_SIZE):
        claim = await caller.claim(group_id)
        await caller.call(admin_routes.FINISH_EPISODE, claim.episode_id)
    status = await caller.read_group(group_id)
    assert await caller.claim_status(group_id) == 410
    assert (status.open, status.finished) == (0, GROUP_SIZE)


async def test_a_retired_group_is_over_for_claims_and_episodes(caller: Caller):
    claim = await caller.episode()
    await caller.stage.retire(claim.group_id, "stale")
    await caller.read_group(claim.group_id, GroupQuery(wait_s=10, state="admitted"))
    assert await caller.claim_status(claim.group_id) == 410
    statuses = [
        (await caller.call(route, claim.episode_id, body=body)).status_code
        for route, body in (
            (admin_routes.RENEW_LEASE, None),
            (admin_routes.RELEASE_EPISODE, None),
            (admin_routes.REPORT_REWARD, {"reward_id": "r", "name": "n", "value": 1}),
            (admin_routes.FINISH_EPISODE, None),
            (admin_routes.ABORT_EPISODE, None),
        )
    ]
    assert statuses == [410] * 5
