"""Agents in the storm: they claim episodes, play turns, and end them, vanish or hang.

What a gateway answered is what an agent may rely on; the agents write it down for the oracle.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from msgspec import UNSET, Raw, UnsetType

from forgemq_bus.errors import LogUnavailableError
from forgemq_contracts import partitions
from forgemq_contracts.admin import (
    AbortRequest,
    Claim,
    FinishRequest,
    GroupRequest,
    GroupStatus,
    RewardRequest,
)
from forgemq_contracts.fields import TruncationCause
from forgemq_gateway.core.errors import RefusedError
from tests.simulation.storm.gateway import DownError, StormGateway
from tests.simulation.storm.schedule import RUN

Answer = TypeVar("Answer")
Behaviour = Literal["finishes", "truncates", "aborts", "crashes_full", "vanishes", "hangs"]
BEHAVIOURS: Sequence[Behaviour] = (*("finishes",) * 7, *get_args(Behaviour)[1:])

GROUPS_AT_ONCE = 5
"""Two more than there are slots, so that requests wait."""

PATIENCE_S = 2.0
"""An agent that hears nothing for 2 s asks another gateway; the first may still do it."""

_LATE_REWARD_S = 8.0
"""Longer than a gateway stands still: its successor may answer a reward beside an end."""

_BUSY = 429
_SERVER_ERROR = 500


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An end of an episode that a gateway acknowledged."""

    claim: Claim
    status: Literal["completed", "aborted"]
    truncated_by: TruncationCause | None
    is_certain: bool


@dataclass(kw_only=True)
class Heard:
    """What gateways have answered.

    Attributes:
        groups: Group id of each key.
        claims: Agents that hold each episode id, by the gateway that gave it to them.
        unclaimed: Groups that no agent was sent to.
        delivered: Completions that the agent of an episode has.
        unanswered: Group and index of ends that may or may not be on the log.
        rewarded: Ids of the rewards that a gateway took, by episode.
    """

    groups: dict[str, str] = field(default_factory=dict)
    claims: dict[str, list[StormGateway]] = field(default_factory=lambda: defaultdict(list))
    unclaimed: set[str] = field(default_factory=set)
    delivered: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    ended: list[Ended] = field(default_factory=list)
    unanswered: set[tuple[str, int]] = field(default_factory=set)
    rewarded: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


class Agents:
    """Everyone who uses the gateways' API.

    Args:
        gateway: One that an agent reaches now, if any.
        is_owner: Whether the log names this gateway as the owner of a group.
        check_end: Called with each acknowledged end.
    """

    def __init__(
        self,
        *,
        gateway: Callable[[], StormGateway | None],
        is_owner: Callable[[StormGateway, str], bool],
        check_end: Callable[[Ended], None],
        rng: random.Random,
    ) -> None:
        self._gateway = gateway
        self._is_owner = is_owner
        self._check_end = check_end
        self._rng = rng
        self._given_up: set[asyncio.Future[object]] = set()
        self.heard = Heard()

    async def run(self) -> None:
        """Ask for one group after the other until training has ended, and play all of them."""
        room = asyncio.Semaphore(GROUPS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                await room.acquire()
                group = await self._request(f"d/{number}")
                if group is None:
                    return
                self.heard.groups[f"d/{number}"] = group.group_id
                tasks.create_task(self._play_group(group, room))
                if self._rng.random() < 0.2:  # As agents do that start again.
                    await self._request(f"d/{self._rng.randint(0, number)}")
                number += 1

    async def _request(self, key: str) -> GroupStatus | None:
        request = GroupRequest(domain="d", idempotency_key=key, task=Raw(b"{}"))
        group = partitions.group_id(run=RUN, domain="d", idempotency_key=key)
        try:
            return await self._ask(lambda gateway: gateway.operations.request_group(request), group)
        except RefusedError as error:
            if error.status != 410:
                raise
            return None

    async def _ask(
        self,
        ask: Callable[[StormGateway], Awaitable[Answer]],
        group: str | None,
        *,
        index: tuple[str, int] | None = None,
        patience_s: float | None = None,
    ) -> Answer:
        """Ask until a gateway answers.

        Args:
            ask: What the agent wants of the owner of the group.
            group: The group it is about; None: any gateway knows.
            index: What an unanswered call may have changed.
            patience_s: How long the agent waits for one gateway; None: to its end.

        Raises:
            RefusedError: 4xx, or 504.
        """
        while True:
            gateway = self._gateway()
            try:
                if gateway is not None:
                    asked = gateway.call(ask, group_id=group)
                    return await self._heard_of(asked, patience_s=patience_s)
            except (DownError, LogUnavailableError, TimeoutError):
                if index is not None:
                    self.heard.unanswered.add(index)
            except RefusedError as error:
                if error.status != _BUSY and (error.status < _SERVER_ERROR or error.status == 504):
                    raise
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))

    async def _heard_of(self, asked: Awaitable[Answer], *, patience_s: float | None) -> Answer:
        """The answer, if it comes in time; what a client no longer waits for goes on.

        Raises:
            TimeoutError: it does not come.
        """
        if patience_s is None:
            return await asked
        asking = asyncio.ensure_future(asked)
        self._given_up.add(asking)
        asking.add_done_callback(self._forget)
        async with asyncio.timeout(patience_s):
            return await asyncio.shield(asking)

    def _forget(self, asking: "asyncio.Future[Answer]") -> None:
        self._given_up.discard(asking)
        if not asking.cancelled():
            asking.exception()  # asyncio would log one that nobody has waited for.

    async def _play_group(self, group: GroupStatus, room: asyncio.Semaphore) -> None:
        try:
            state = await self._wait(group.group_id, known="requested")
            if state == "retired":
                return
            if self._rng.random() < 0.1:
                self.heard.unclaimed.add(group.group_id)
            else:
                late_s = self._rng.choice((0.0, 0.0, self._rng.uniform(0.0, 20.0)))
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(group.group_size + self._rng.randint(0, 2)):
                        tasks.create_task(self._play_episodes(group.group_id, late_s=late_s))
            await self._wait(group.group_id, known="admitted")
        finally:
            room.release()

    async def _wait(
        self, group_id: str, *, known: Literal["requested", "admitted"]
    ) -> Literal["requested", "admitted", "retired"]:
        """Wait until a group's state is a later one."""
        later = {"requested": ("admitted", "retired"), "admitted": ("retired",)}[known]
        while True:
            try:
                status = await self._ask(
                    lambda gateway: gateway.operations.changed_group(
                        group_id, wait_s=5, known=known
                    ),
                    group_id,
                )
            except RefusedError as error:
                if error.status != 404:
                    raise
                return "retired"  # Before this gateway's restart: it knows open groups alone.
            if status.state in later:
                return status.state
            if status.state == "requested" and await self._ask(_has_ended, None):
                return "retired"  # What waits for a slot then is never admitted.

    async def _play_episodes(self, group_id: str, *, late_s: float) -> None:
        """Play one episode after the other, until the group has none or this agent vanishes."""
        await asyncio.sleep(late_s + self._rng.uniform(0.0, 2.0))
        while True:
            try:
                claim = await self._ask(lambda gateway: self._claim(gateway, group_id), group_id)
                if claim is not None and await self._play(claim) == "vanishes":
                    return
            except RefusedError as error:
                if error.status in (404, 410):
                    return
                if error.status not in (409, 504):
                    raise

    async def _claim(self, gateway: StormGateway, group_id: str) -> Claim | None:
        group = gateway.registry.groups.get(group_id)
        was_closed = group is not None and bool(group.closed)
        claim = await gateway.operations.claim(group_id, wait_s=3, has_left=lambda: False)
        if claim is not None:
            assert not was_closed, f"{claim.episode_id} is claimed of a closed group"
            self.heard.claims[claim.episode_id].append(gateway)
        return claim

    async def _play(self, claim: Claim) -> Behaviour:
        behaviour = self._rng.choice(BEHAVIOURS)
        parent_id = None
        for turn in range(self._rng.choice((1, 1, 2))):
            await asyncio.sleep(self._rng.choice((0.0, 0.3, 2.0)))
            parent_id = await self._complete(claim, f"{turn}", parent_id=parent_id)
        while behaviour == "hangs":
            await self._ask(lambda gateway: _renewed(gateway, claim), claim.group_id)
            await asyncio.sleep(1.0)
        for number in range(self._rng.choice((0, 0, 1, 2))):
            await self._reward(claim, f"r{number}")
        if behaviour != "vanishes":
            late = asyncio.ensure_future(self._reward_late(claim))
            try:
                await self._end(claim, behaviour)
            finally:
                await late
        return behaviour

    async def _reward_late(self, claim: Claim) -> None:
        """Sometimes report a reward beside the end of the episode, which may come first."""
        if self._rng.random() < 0.5:
            return
        await asyncio.sleep(self._rng.uniform(0.0, _LATE_REWARD_S))
        with suppress(RefusedError):
            await self._reward(claim, "late")

    async def _reward(self, claim: Claim, reward_id: str) -> None:
        """Report a reward, sometimes twice."""
        request = RewardRequest(reward_id=reward_id, name="r", value=1.0)
        for _ in range(self._rng.choice((1, 1, 2))):
            await self._ask(
                lambda gateway: gateway.operations.reward(claim.episode_id, request),
                claim.group_id,
                patience_s=PATIENCE_S,
            )
            self.heard.rewarded[claim.episode_id].add(reward_id)

    async def _complete(self, claim: Claim, body: str, *, parent_id: str | None) -> str:
        async def complete(gateway: StormGateway) -> tuple[str, bool]:
            completion = await gateway.complete(claim, body, parent_id=parent_id)
            return completion, self._is_owner(gateway, claim.group_id)

        completion, is_owner = await self._ask(complete, claim.group_id)
        if is_owner:
            self.heard.delivered[claim.episode_id].append(completion)
        return completion

    async def _end(self, claim: Claim, behaviour: Behaviour) -> None:
        index = claim.group_id, claim.index
        cause: TruncationCause | None = None
        if behaviour in ("truncates", "crashes_full"):
            cause = "too_many_turns" if behaviour == "truncates" else "context_full"
        said: TruncationCause | UnsetType = UNSET if cause is None else cause

        async def end(gateway: StormGateway) -> None:
            if behaviour in ("aborts", "crashes_full"):
                abort = AbortRequest(detail="gave up", truncated_by=said)
                await gateway.operations.abort(claim.episode_id, abort)
            else:
                finish = FinishRequest(truncated_by=said)
                await gateway.operations.finish(claim.episode_id, finish)

        await self._ask(end, claim.group_id, index=index, patience_s=PATIENCE_S)
        ended = Ended(
            claim=claim,
            status="aborted" if behaviour == "aborts" else "completed",
            truncated_by=cause,
            is_certain=index not in self.heard.unanswered,
        )
        self.heard.ended.append(ended)
        self._check_end(ended)


async def _renewed(gateway: StormGateway, claim: Claim) -> None:
    gateway.operations.renew_lease(claim.episode_id)


async def _has_ended(gateway: StormGateway) -> bool:
    return gateway.operations.run().training_ended
