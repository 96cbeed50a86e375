"""What a key opens, and what it does not: an agent's key administers nothing."""

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec

from forgemq_contracts import admin_routes, lane_routes, topics
from forgemq_contracts.admin_routes import Route
from forgemq_contracts.live_key import LiveKey
from forgemq_gateway.core.keys import AdminKeys, KeyMint, key_sha256
from forgemq_gateway.core.live import LiveKeys
from tests.unit.gateway.test_chat import HELLO, log_store, say
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, plain_http, running

ROUTES = [
    each
    for module in (admin_routes, lane_routes)
    for each in vars(module).values()
    if isinstance(each, Route)
]
LIVE = "a-key-of-live-traffic-0"


async def answers(world: World, claim: Any, other: Any, key: str) -> dict[str, httpx.Response]:
    """What each route of the admin API says to this key, about its own and another episode."""
    found = {}
    async with plain_http(timeout_s=30) as client:
        for route in ROUTES:
            for claimed in (claim, other):
                path = route.path.format(
                    group_id=claimed["group_id"],
                    episode_id=claimed["episode_id"],
                    domain="shop",
                    lane=0,
                )
                for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
                    found[f"{route.name} {claimed['episode_id']} {name}"] = await client.request(
                        route.method,
                        world.base_url + path,
                        json={} if route.body else None,
                        headers={name: value},
                    )
                found[f"{route.name} {claimed['episode_id']} /s/"] = await client.request(
                    route.method,
                    f"{world.base_url}/s/{key}{path}",
                    json={} if route.body else None,
                )
    return found


async def test_a_key_of_an_episode_or_of_live_traffic_opens_no_route_of_the_admin_api(
    model: Path,
) -> None:
    configuration = msgspec.structs.replace(
        configuration_of(model),
        live=(LiveKey(name="outside", domain="shop", key_sha256=key_sha256(LIVE)),),
    )
    async with running(log_store(), configuration, say("hello")) as (world, _):
        claim, other = await world.episode(), await world.episode()
        assert claim["episode_id"] != other["episode_id"]
        before = {topic.name: await world.records(topic) for topic in topics.OF_RUN}
        for key in (claim["key"], LIVE):
            said = await answers(world, claim, other, key)
            assert len(said) == 3 * 2 * len(ROUTES)
            assert {name: each.status_code for name, each in said.items()} == dict.fromkeys(
                said, 404
            )
        written = [topics.FINISHED_EPISODES, topics.OPENED_EPISODES, topics.REQUESTED_GROUPS]
        for topic in (*written, topics.REQUESTED_LANES):
            assert await world.records(topic) == before[topic.name]
        assert (await world.admin("GET", "/v1/run", key=ADMIN_KEY)).status_code == 200


async def test_a_key_that_is_changed_or_cut_opens_nothing(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("hello")) as (world, _):
        claim, other = await world.episode(), await world.episode()
        mac = claim["key"].rpartition(".")[2]
        made_up = [
            claim["key"][:-1],
            f"{other['episode_id']}.{mac}",
            f"{claim['episode_id']}.{mac.swapcase()}",
            KeyMint(ADMIN_KEY, run="another-run").key_of(claim["episode_id"]),
            KeyMint("another-admin-key-00", run="r").key_of(claim["episode_id"]),
        ]
        body = {"model": "m", "messages": HELLO}
        async with plain_http() as client:
            for key in (*made_up, claim["key"]):
                said = await client.post(
                    f"{world.base_url}/v1/chat/completions", json=body, headers={"x-api-key": key}
                )
                assert said.status_code == (200 if key == claim["key"] else 401)


def test_an_episodes_key_follows_from_admin_key_run_and_episode_alone() -> None:
    """So no process has to keep it, and a restart gives the same."""
    key = AdminKeys((ADMIN_KEY,), run="r").key_of("g-1.0.0")
    assert key == KeyMint(ADMIN_KEY, run="r").key_of("g-1.0.0")
    others = {
        KeyMint(ADMIN_KEY, run="r").key_of("g-1.0.1").rpartition(".")[2],
        KeyMint(ADMIN_KEY, run="s").key_of("g-1.0.0").rpartition(".")[2],
        KeyMint(ADMIN_KEY + "x", run="r").key_of("g-1.0.0").rpartition(".")[2],
    }
    mac = key.rpartition(".")[2]
    assert len({*others, mac}) == 4
    assert re.fullmatch("[0-9a-f]{32}", mac), "128 bits"


def test_each_of_several_live_keys_has_its_own_policy() -> None:
    keys = {name: f"the-live-key-of-{name}" for name in ("one", "two")}
    found = LiveKeys(
        LiveKey(name=name, domain="shop", key_sha256=key_sha256(key)) for name, key in keys.items()
    )
    assert {name: found.policy(key).name for name, key in keys.items()} == {
        "one": "one",
        "two": "two",
    }
    assert found.policy(keys["one"] + "x") is None
