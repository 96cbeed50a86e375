"""Two gateways for one suite: the one in memory, and the real one over a log in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
from msgspec import Raw, Struct

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import admin_routes, topics
from forgemq_contracts.admin import (
    Claim,
    ClaimRequest,
    GroupQuery,
    GroupRequest,
    GroupStatus,
    Refusal,
)
from forgemq_contracts.admin_routes import Route
from forgemq_contracts.groups import RetireReason
from forgemq_contracts.steps import TrainedStep, TrainingMetrics
from tests import memory_gateway_http
from tests.memory_gateway import MemoryGateway
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, plain_http, running

DOMAIN = "shop"
GROUP_SIZE = 2
GROUPS_REQUESTED_MAX = 3
ATTEMPTS_MAX = 2
STEPS = 10
LONG_WAIT_S = 10.0

Answer = TypeVar("Answer", bound=Struct)


class Stage(Protocol):
    """A gateway, and the parts of the run that the API cannot play."""

    url: str
    admin_key: str

    async def admit(self, group_id: str) -> None: ...

    async def retire(self, group_id: str, reason: RetireReason) -> None: ...

    async def end_training(self) -> None: ...


class MemoryStage:
    def __init__(self, gateway: MemoryGateway) -> None:
        self.url, self.admin_key = gateway.url, memory_gateway_http.ADMIN_KEY
        self._gateway = gateway

    async def admit(self, group_id: str) -> None:
        self._gateway.admit(group_id)

    async def retire(self, group_id: str, reason: RetireReason) -> None:
        self._gateway.retire(group_id, reason)

    async def end_training(self) -> None:
        self._gateway.train(STEPS, is_last=True)


class RealStage:
    def __init__(self, world: World) -> None:
        self.url, self.admin_key = world.base_url, ADMIN_KEY
        self._world = world

    async def admit(self, group_id: str) -> None:
        await self._world.admit(group_id)

    async def retire(self, group_id: str, reason: RetireReason) -> None:
        await self._world.retire(group_id, reason=reason)

    async def end_training(self) -> None:
        await self._world.write(topics.TRAINED_STEPS, 0, LAST_STEP)


LAST_STEP = TrainedStep(
    step=STEPS - 1,
    lineage=1,
    group_ids=(),
    failed_group_ids=(),
    metrics=TrainingMetrics(
        loss=0,
        grad_norm=0,
        lr=0,
        loss_tokens=0,
        tree_tokens=0,
        request_tokens=0,
        append_tokens=0,
        attention_pairs=0,
        ratio_mean=1,
        ratio_p99=1,
        capped_share=0,
        logprob_gap_mean=0,
        logprob_gap_max=0,
        kl_k3=0,
        entropy=0,
        staleness_max=0,
        forward_backward_s=0,
    ),
    checkpoint_step=STEPS - 1,
    duration_s=1,
    is_last=True,
)


@asynccontextmanager
async def memory_stage(*, lease_s: float) -> AsyncIterator[Stage]:
    gateway = MemoryGateway(
        domain=DOMAIN,
        group_size=GROUP_SIZE,
        groups_requested_max=GROUPS_REQUESTED_MAX,
        attempts_max=ATTEMPTS_MAX,
        lease_s=lease_s,
        steps=STEPS,
    )
    async with memory_gateway_http.served(gateway):
        yield MemoryStage(gateway)


@asynccontextmanager
async def real_stage(model: Path, *, lease_s: float) -> AsyncIterator[Stage]:
    # Its queue has the sizes above.
    configuration = configuration_of(model, lease_s=lease_s)
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, lambda _: "yes") as (world, _):
        yield RealStage(world)


class Caller:
    """Calls routes of the contract, and holds every answer to what its route declares."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def call(
        self,
        route: Route,
        *ids: str,
        body: object = None,
        query: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> httpx.Response:
        """One request; its status is declared, and its body is the struct of that status."""
        names = dict(zip(_names(route), ids, strict=True))
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with plain_http(timeout_s=30) as client:
            answer = await client.request(
                route.method,
                self.stage.url + route.path.format(**names),
                content=b"" if body is None else content,
                params=query,
                headers={"Authorization": f"Bearer {key or self.stage.admin_key}"},
            )
        if answer.status_code == 200:
            msgspec.json.decode(answer.content, type=route.answer)
        elif answer.status_code == 204:
            assert route.nothing
            assert answer.content == b""
        else:
            assert answer.status_code in route.all_refusals, answer.text
            msgspec.json.decode(answer.content, type=Refusal)
            is_retried = answer.status_code in admin_routes.RETRIED
            assert ("retry-after" in answer.headers) is is_retried
        return answer

    async def request_group(self, key: str = "k", **fields: Any) -> GroupStatus:
        answer = await self.call(admin_routes.REQUEST_GROUP, body=group_request(key, **fields))
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=GroupStatus)

    async def read_group(self, group_id: str, query: GroupQuery | None = None) -> GroupStatus:
        fields = msgspec.to_builtins(query or GroupQuery())
        answer = await self.call(admin_routes.READ_GROUP, group_id, query=fields)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=GroupStatus)

    async def admitted_group(self, key: str = "k", **fields: Any) -> str:
        group_id = (await self.request_group(key, **fields)).group_id
        await self.stage.admit(group_id)
        await self.read_group(group_id, GroupQuery(wait_s=LONG_WAIT_S, state="requested"))
        return group_id

    async def claim(self, group_id: str, *, wait_s: float = LONG_WAIT_S) -> Claim:
        body = ClaimRequest(wait_s=wait_s)
        answer = await self.call(admin_routes.CLAIM_EPISODE, group_id, body=body)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=Claim)

    async def claim_status(self, group_id: str) -> int:
        """Status of a claim that does not wait."""
        answer = await self.call(admin_routes.CLAIM_EPISODE, group_id, body=ClaimRequest())
        return answer.status_code

    async def episode(self) -> Claim:
        """An episode of a new group."""
        return await self.claim(await self.admitted_group())

    async def chat(self, claim: Claim) -> httpx.Response:
        async with plain_http(timeout_s=30) as client:
            return await client.post(
                f"{claim.base_url}/chat/completions",
                json={"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
                headers={"Authorization": f"Bearer {claim.key}"},
            )


def group_request(key: str = "k", **fields: Any) -> GroupRequest:
    return GroupRequest(domain=DOMAIN, idempotency_key=key, task=Raw(b'{"n":1}'), **fields)


def error_of(answer: httpx.Response) -> Any:
    return msgspec.json.decode(answer.content, type=Refusal).error


def _names(route: Route) -> list[str]:
    return [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
