"""A gateway in memory behind real HTTP: groups, leases and episodes as agents see them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.autojump import pytest_asyncio_loop_factories  # noqa: F401 - a hook

ADMIN = "admin"


@dataclass
class Group:
    """One group: which attempts were claimed, and which episodes ended how."""

    group_id: str
    body: dict[str, Any]
    size: int
    state: str = "admitted"
    claimed: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    ended: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)


class MemoryGateway:
    """Admits `slots` groups at once; a group is retired when all its episodes have ended."""

    def __init__(self, *, group_size: int, steps: int, groups_to_train: int, slots: int) -> None:
        self.group_size, self.steps, self.slots = group_size, steps, slots
        self.groups_to_train = groups_to_train
        self.groups: dict[str, Group] = {}
        self.lease_s = 0.6
        self.refusals: list[web.Response] = []
        self.heartbeats: list[str] = []
        self.rewards: list[dict[str, Any]] = []
        self.chats: list[bytes] = []
        self.open_max = 0
        self.run_polls = 0
        self.outstanding_max = 0
        self.url = ""
        self.app = web.Application()
        self.app.add_routes(
            [
                web.post("/v1/groups", self.post_group),
                web.get("/v1/groups/{id}", self.get_group),
                web.post("/v1/groups/{id}/claim", self.claim),
                web.post("/v1/episodes/{id}/{verb}", self.episode),
                web.get("/v1/run", self.run),
                web.post("/v1/chat/completions", self.chat),
            ]
        )

    @property
    def trained(self) -> int:
        return sum(g.state == "retired" and g.body["purpose"] == "train" for g in self.in_order())

    @property
    def is_over(self) -> bool:
        return self.trained >= self.groups_to_train

    def in_order(self) -> list[Group]:
        return list(self.groups.values())

    def rounds(self) -> list[str]:
        return list(
            dict.fromkeys(g.body["round_name"] for g in self.in_order() if self._is_eval(g))
        )

    async def post_group(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {ADMIN}"
        if self.refusals:
            return self.refusals.pop(0)
        body = await request.json()
        group_id = "g-" + body["idempotency_key"].replace("/", "-").replace("_", "-")
        if group_id not in self.groups:
            if body["purpose"] == "train" and self.is_over:
                return refused(410, "training has ended")
            size = body.get("group_size", self.group_size)
            self.groups[group_id] = Group(group_id, body, size, "requested", {}, list(range(size)))
        self._admit()
        waiting = [g for g in self.in_order() if g.state != "retired" and not self._is_eval(g)]
        self.outstanding_max = max(self.outstanding_max, len(waiting))
        return web.json_response(self._status(self.groups[group_id]))

    async def get_group(self, request: web.Request) -> web.Response:
        group = self.groups[request.match_info["id"]]
        before = request.query.get("state", group.state)
        for _ in range(int(20 * float(request.query["wait_s"]))):
            self._admit()
            if group.state != before or group.state == "retired":
                break
            await asyncio.sleep(0.05)
        return web.json_response(self._status(group))

    async def claim(self, request: web.Request) -> web.Response:
        group = self.groups[request.match_info["id"]]
        if group.state == "retired":
            return refused(410, "the group is over")
        if not group.free:
            return web.Response(status=204)
        index = group.free.pop(0)
        attempt = group.claimed.get(index, -1) + 1
        group.claimed[index] = attempt
        self.open_max = max(self.open_max, sum(self._open(g) for g in self.in_order()))
        return web.json_response(
            {
                "episode_id": f"{group.group_id}.{index}.{attempt}",
                "group_id": group.group_id,
                "index": index,
                "attempt": attempt,
                "key": f"key-{group.group_id}.{index}.{attempt}",
                "base_url": f"{self.url}/v1",
                "session_url": f"{self.url}/s/key/v1",
                "lease_s": self.lease_s,
                "task": group.body["task"],
                "temperature": group.body.get("temperature"),
            }
        )

    async def episode(self, request: web.Request) -> web.Response:
        episode_id, verb = request.match_info["id"], request.match_info["verb"]
        group_id, index, attempt = episode_id.rsplit(".", 2)
        group = self.groups[group_id]
        if group.claimed.get(int(index)) != int(attempt) or int(index) in group.free:
            return refused(409, "replaced by a later attempt")
        body = await request.json()
        if verb == "heartbeat":
            self.heartbeats.append(episode_id)
        elif verb == "rewards":
            self.rewards.append({"episode_id": episode_id, **body})
        else:
            group.ended[int(index)] = (verb, body)
            if len(group.ended) == group.size:
                group.state = "retired"
        return web.json_response({"lease_s": self.lease_s})

    async def run(self, request: web.Request) -> web.Response:
        self.run_polls += 1
        steps_trained = self.steps if self.is_over else min(self.trained, self.steps - 1)
        return web.json_response(
            {
                "run": "r",
                "steps": self.steps,
                "steps_trained": steps_trained,
                "training_ended": self.is_over,
                "domains": ["count"],
            }
        )

    async def chat(self, request: web.Request) -> web.Response:
        self.chats.append(await request.read())
        if self.refusals:
            return self.refusals.pop(0)
        content = f"{request.headers['Authorization'].removeprefix('Bearer ')} speaking"
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "chatcmpl-" + "a" * 32, "choices": [choice]})

    def lapse(self, episode_id: str) -> None:
        """The lease of this episode lapses: the next attempt is free."""
        group_id, index, _ = episode_id.rsplit(".", 2)
        self.groups[group_id].free.append(int(index))

    def _admit(self) -> None:
        for group in self.in_order():
            admitted = [
                g for g in self.in_order() if g.state == "admitted" and not self._is_eval(g)
            ]
            if group.state == "requested" and self.is_over and not self._is_eval(group):
                continue
            if group.state == "requested" and (self._is_eval(group) or len(admitted) < self.slots):
                group.state = "admitted"

    def _is_eval(self, group: Group) -> bool:
        return group.body["purpose"] == "eval"

    def _open(self, group: Group) -> int:
        return len(group.claimed) - len(group.ended)

    def _status(self, group: Group) -> dict[str, Any]:
        return {
            "group_id": group.group_id,
            "state": group.state,
            "retire_reason": "trained" if group.state == "retired" else None,
            "group_size": group.size,
            "queue_index": None,
            "open": self._open(group),
            "finished": len(group.ended),
        }


def refused(status: int, message: str, *, code: str | None = None, **headers: str) -> web.Response:
    body = {"error": {"type": "t", "message": message, "param": None, "code": code}}
    return web.Response(
        status=status,
        body=json.dumps(body),
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


@pytest.fixture
async def memory_gateway() -> AsyncIterator[Callable[..., Any]]:
    """Starts gateways; their addresses are in `url`."""
    servers: list[TestServer] = []

    async def start(**settings: Any) -> MemoryGateway:
        defaults = {"group_size": 2, "steps": 4, "groups_to_train": 4, "slots": 2}
        gateway = MemoryGateway(**{**defaults, **settings})
        servers.append(TestServer(gateway.app))
        await servers[-1].start_server()
        gateway.url = str(servers[-1].make_url("")).rstrip("/")
        return gateway

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
def refusal() -> Callable[..., web.Response]:
    return refused
