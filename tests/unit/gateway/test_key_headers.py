"""Of several headers that may carry a key, the one that does counts."""

from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import ADMIN_KEY, configuration_of, plain_http, running

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}

# KEY stands for the episode's key, ADMIN for the admin key.
AGENTS: list[tuple[dict[str, str], int]] = [
    ({"authorization": "Bearer KEY"}, 200),
    ({"authorization": "KEY"}, 200),
    ({"authorization": "bearer  KEY"}, 200),
    ({"authorization": "Bearer", "x-api-key": "KEY"}, 200),
    ({"authorization": "Basic eA==", "x-api-key": "KEY"}, 200),
    ({"authorization": "Bearer sk-other", "x-api-key": "KEY"}, 200),
    ({"authorization": "Bearer ADMIN", "x-api-key": "KEY"}, 200),
    ({"authorization": "Bearer KEY", "x-api-key": "dummy"}, 200),
    ({"authorization": "Bearer a", "x-api-key": "b", "api-key": "Bearer KEY"}, 200),
    ({"x-api-key": "g-1.0.0.wrong", "api-key": "KEY"}, 200),
    ({"authorization": "Basic KEY"}, 401),
    ({"authorization": "Bearer KEYx", "x-api-key": "other"}, 401),
    ({"authorization": "Bearer"}, 401),
    ({}, 401),
]
ADMINS: list[tuple[dict[str, str], int]] = [
    ({"authorization": "Bearer ADMIN"}, 200),
    ({"authorization": "Basic eA==", "x-api-key": "ADMIN"}, 200),
    ({"authorization": "Bearer ADMIN", "x-api-key": "KEY"}, 200),
    ({"authorization": "Bearer KEY", "api-key": "ADMIN"}, 200),
    ({"authorization": "Bearer KEY", "x-api-key": "other"}, 404),
    ({"authorization": "Basic ADMIN"}, 401),
    ({}, 401),
]


async def test_the_first_proven_key_of_several_headers_counts(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()

        def filled(headers: dict[str, str]) -> dict[str, str]:
            key, admin = str(claim["key"]), ADMIN_KEY
            return {n: v.replace("KEY", key).replace("ADMIN", admin) for n, v in headers.items()}

        async with plain_http() as client:
            for path in ("/v1/chat/completions", "/v1/messages"):
                url = f"{world.base_url}{path}"
                found = [
                    (
                        headers,
                        (await client.post(url, json=HELLO, headers=filled(headers))).status_code,
                    )
                    for headers, _ in AGENTS
                ]
                assert found == AGENTS
            url = f"{world.base_url}/v1/run"
            found = [
                (headers, (await client.get(url, headers=filled(headers))).status_code)
                for headers, _ in ADMINS
            ]
            assert found == ADMINS


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_key_of_an_ended_episode_gives_way_to_no_foreign_key(
    model: Path, *, is_first: bool
) -> None:
    """Its refusal says what happened, whatever else the client sends."""
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        keys = (claim["key"], "sk-other") if is_first else ("sk-other", claim["key"])
        headers = dict(zip(("authorization", "x-api-key"), keys, strict=True))
        async with plain_http() as client:
            url = f"{world.base_url}/v1/chat/completions"
            answer = await client.post(url, json=HELLO, headers=headers)
    assert answer.status_code == 409
    assert "has ended" in answer.json()["error"]["message"]
