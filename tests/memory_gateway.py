"""A gateway in memory: the state behind the group and episode API, without log, lanes and tokens.

One method for each route of the contract, with the contract's structs; memory_gateway_http.py
serves them. The suite in tests/conformance/admin holds it to what the real gateway answers. The
scheduler's and the trainer's part is done by `admit`, `retire` and `train`.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from aiohttp import web

from forgemq_contracts.admin import (
    RESULTS_MAX,
    AbortRequest,
    Claim,
    ClaimRequest,
    DomainResults,
    FinishRequest,
    GroupQuery,
    GroupRequest,
    GroupStatus,
    Lease,
    Recorded,
    Released,
    ResultsQuery,
    RewardRequest,
    RunStatus,
)
from forgemq_contracts.asked_keys import number_of
from forgemq_contracts.curriculum import TaskResult
from forgemq_contracts.groups import RetireReason

ADMIN_KEY = "admin"
COMPLETION_ID = "a" * 32
POLL_S = 0.02
Found = TypeVar("Found")


class RefusedError(Exception):
    """Answer this status, with this reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.retry_after_s = param, retry_after_s


@dataclass(kw_only=True)
class Attempt:
    """The newest attempt at one episode."""

    episode_id: str
    number: int
    lease_until_s: float
    state: str = "open"
    is_released: bool = False
    rewards: dict[str, RewardRequest] = field(default_factory=dict)
    completions: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class Group:
    """One group; `ended` has what ended each episode, None for the last lease that lapsed."""

    group_id: str
    request: GroupRequest
    size: int
    state: str = "requested"
    retire_reason: RetireReason | str = ""
    queue_index: int | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    ended: dict[int, FinishRequest | AbortRequest | None] = field(default_factory=dict)

    @property
    def open_count(self) -> int:
        return sum(a.state == "open" and i not in self.ended for i, a in self.attempts.items())

    def solved_count(self) -> int:
        """Episodes whose result is {"solved": true}."""
        results = (end.result for end in self.ended.values() if isinstance(end, FinishRequest))
        return sum(msgspec.json.decode(result) == {"solved": True} for result in results)

    def free(self) -> tuple[int, int] | None:
        """The lowest (index, attempt) that may be claimed."""
        for index in range(self.size if self.state == "admitted" else 0):
            attempt = self.attempts.get(index)
            if attempt is None:
                return index, 0
            if attempt.state == "lapsed":
                return index, attempt.number + 1
        return None


class MemoryGateway:
    """The API's state and answers.

    Args:
        group_size: Episodes of a group that does not say how many.
        groups_requested_max: Training or evaluation groups that may wait for a slot.
        attempts_max: Attempts at one episode before it fails.
        scheduler: Called after every change; it may admit, retire and train.
    """

    def __init__(
        self,
        *,
        domain: str = "count",
        group_size: int = 2,
        groups_requested_max: int = 100,
        attempts_max: int = 3,
        lease_s: float = 0.6,
        steps: int = 4,
        scheduler: Callable[["MemoryGateway"], None] = lambda _: None,
    ) -> None:
        self.domain, self.group_size, self.lease_s = domain, group_size, lease_s
        self.groups_requested_max, self.attempts_max = groups_requested_max, attempts_max
        self.run = RunStatus(
            run="r", steps=steps, steps_trained=0, training_ended=False, domains=(domain,)
        )
        self.groups: dict[str, Group] = {}
        self.results: list[TaskResult] = []
        self.url = ""
        self.answers: list[web.Response] = []
        """Given instead of the next answers to POST /v1/groups and to chat completions."""
        self.asked_keys: list[str] = []
        """Idempotency key of each request for a group, in order."""
        self.requests: list[str] = []
        """Name of each route that was called, in order."""
        self.chats: list[bytes] = []
        self.heartbeats: list[str] = []
        self.rewards: list[RewardRequest] = []
        self.scheduler = scheduler

    def in_order(self) -> list[Group]:
        return list(self.groups.values())

    def admit(self, group_id: str) -> None:
        group = self.groups[group_id]
        group.state = "admitted"
        if group.request.purpose == "train":
            group.queue_index = sum(g.queue_index is not None for g in self.in_order())

    def retire(self, group_id: str, reason: RetireReason) -> None:
        group = self.groups[group_id]
        group.state, group.retire_reason = "retired", reason
        number = number_of(group.request.idempotency_key, source=self.domain)
        if group.request.task_number is not None and number is not None:
            self.results.append(
                TaskResult(
                    index=len(self.results),
                    number=number,
                    task_number=group.request.task_number,
                    version=self.run.steps_trained,
                    scored=group.size,
                    solved=group.solved_count(),
                )
            )

    def train(self, steps: int, *, is_last: bool) -> None:
        """So many steps are trained."""
        self.run = msgspec.structs.replace(self.run, steps_trained=steps, training_ended=is_last)

    def lapse(self, episode_id: str) -> None:
        """The lease of this episode lapses now."""
        group_id, index, _ = episode_id.rsplit(".", 2)
        self._lapse(self.groups[group_id], int(index))

    def lapse_due(self) -> None:
        """Lapse the leases whose time is over."""
        now_s = asyncio.get_running_loop().time()
        for group in self.in_order():
            for index, attempt in group.attempts.items():
                if attempt.state == "open" and attempt.lease_until_s < now_s:
                    self._lapse(group, index)

    def renew(self, attempt: Attempt) -> None:
        """Begin another lease, unless the agent gave the episode back."""
        if attempt.is_released:
            return
        attempt.state = "open"
        attempt.lease_until_s = asyncio.get_running_loop().time() + self.lease_s

    def open_attempt(self, episode_id: str) -> Attempt:
        """The attempt with this id, unless it has ended."""
        _, attempt = self._known(episode_id)
        if attempt.state == "ended":
            raise RefusedError(409, f"episode {episode_id} has ended")
        return attempt

    async def request_group(self, asked: GroupRequest) -> GroupStatus:
        self.asked_keys.append(asked.idempotency_key)
        if asked.domain != self.domain:
            raise RefusedError(400, f"there is no domain {asked.domain!r}", param="domain")
        is_supervised = asked.domain in self.run.supervised_domains
        if asked.purpose == "train" and (asked.source == "import") != is_supervised:
            rule = f"purpose must be eval: imports of {asked.domain} never train"
            raise RefusedError(400, rule, param="purpose")
        group_id = "g-" + asked.idempotency_key.replace("/", "-").replace("_", "-")
        if group_id not in self.groups:
            if asked.purpose == "train" and self.run.training_ended:
                raise RefusedError(410, "training has ended")
            if sum(g.state == "requested" for g in self.in_order()) >= self.groups_requested_max:
                raise RefusedError(429, "too many groups wait for a slot", retry_after_s=1)
            self.groups[group_id] = Group(
                group_id=group_id, request=asked, size=asked.group_size or self.group_size
            )
            self.scheduler(self)
        known = self.groups[group_id]
        if known.state != "retired" and not asked.takes_known:
            self._check_same(known, asked)
        return self._status(group_id)

    def _check_same(self, known: Group, asked: GroupRequest) -> None:
        for name in ("purpose", "temperature", "round_name", "source", "task"):
            if getattr(known.request, name) != getattr(asked, name):
                raise RefusedError(409, f"{name}: it is another group's key", param=name)
        if known.size != (asked.group_size or self.group_size):
            raise RefusedError(409, "group_size: it is another group's key", param="group_size")

    async def read_group(self, group_id: str, asked: GroupQuery) -> GroupStatus:
        before = asked.state or self._status(group_id).state

        def look() -> GroupStatus | None:
            status = self._status(group_id)
            return status if status.state != before or status.state == "retired" else None

        return await self._until(look, wait_s=asked.wait_s) or self._status(group_id)

    async def claim_episode(self, group_id: str, asked: ClaimRequest) -> Claim | None:
        self._status(group_id)

        def look() -> tuple[int, int] | None:
            group = self.groups[group_id]
            if group.state == "retired" or len(group.ended) >= group.size:
                raise RefusedError(410, f"group {group_id} is over")
            return group.free()

        found = await self._until(look, wait_s=asked.wait_s)
        return None if found is None else self._open(self.groups[group_id], *found)

    async def renew_lease(self, episode_id: str) -> Lease:
        self.renew(self.open_attempt(episode_id))
        self.heartbeats.append(episode_id)
        return Lease(lease_s=self.lease_s)

    async def release_episode(self, episode_id: str) -> Released:
        attempt = self.open_attempt(episode_id)
        if not attempt.is_released:
            attempt.is_released = True
            self.lapse(episode_id)
        return Released()

    async def report_reward(self, episode_id: str, asked: RewardRequest) -> Recorded:
        _, attempt = self._known(episode_id)
        self.rewards.append(asked)
        if asked.reward_id in attempt.rewards:
            return Recorded()
        self.open_attempt(episode_id)
        completion = asked.completion_id
        if completion and completion.removeprefix("chatcmpl-") not in attempt.completions:
            raise RefusedError(400, f"{completion} is unknown", param="completion_id")
        attempt.rewards[asked.reward_id] = asked
        return Recorded()

    async def finish_episode(self, episode_id: str, asked: FinishRequest) -> Recorded:
        return self._end(episode_id, asked)

    async def abort_episode(self, episode_id: str, asked: AbortRequest) -> Recorded:
        return self._end(episode_id, asked)

    async def read_run(self) -> RunStatus:
        return msgspec.structs.replace(self.run, first_tasks={self.domain: self._first_task()})

    async def read_results(self, domain: str, asked: ResultsQuery) -> DomainResults:
        if domain != self.domain:
            raise RefusedError(404, f"there is no domain {domain!r}")
        return DomainResults(results=tuple(self.results[asked.after :][:RESULTS_MAX]))

    def _first_task(self) -> int:
        over = {g.request.idempotency_key for g in self.in_order() if g.state == "retired"}
        return next(n for n in itertools.count() if f"{self.domain}/{n}" not in over)

    def _open(self, group: Group, index: int, number: int) -> Claim:
        episode_id = f"{group.group_id}.{index}.{number}"
        attempt = Attempt(episode_id=episode_id, number=number, lease_until_s=0)
        group.attempts[index] = attempt
        self.renew(attempt)
        self.scheduler(self)
        key = f"key-{episode_id}"
        temperature = group.request.temperature
        return Claim(
            episode_id=episode_id,
            group_id=group.group_id,
            index=index,
            attempt=number,
            key=key,
            base_url=f"{self.url}/v1",
            session_url=f"{self.url}/s/{key}/v1",
            lease_s=self.lease_s,
            task=group.request.task,
            temperature=1.0 if temperature is None else temperature,
        )

    def _end(self, episode_id: str, end: FinishRequest | AbortRequest) -> Recorded:
        group, attempt = self._known(episode_id)
        if attempt.state != "ended":
            attempt.state = "ended"
            group.ended[self._index(episode_id)] = end
            self.scheduler(self)
        return Recorded()

    def _lapse(self, group: Group, index: int) -> None:
        attempt = group.attempts[index]
        if attempt.number + 1 < self.attempts_max:
            attempt.state = "lapsed"
        else:
            attempt.state, group.ended[index] = "ended", None
        self.scheduler(self)

    def _status(self, group_id: str) -> GroupStatus:
        group = self.groups.get(group_id)
        if group is None:
            raise RefusedError(404, f"there is no group {group_id}")
        return msgspec.convert(
            {
                "group_id": group_id,
                "state": group.state,
                "retire_reason": group.retire_reason,
                "group_size": group.size,
                "queue_index": group.queue_index,
                "open": 0 if group.state == "retired" else group.open_count,
                "finished": len(group.ended),
                "task_number": None if group.state == "retired" else group.request.task_number,
            },
            GroupStatus,
        )

    def _known(self, episode_id: str) -> tuple[Group, Attempt]:
        """The group and the attempt with this id, ended or not."""
        group_id, _, rest = episode_id.partition(".")
        group = self.groups.get(group_id)
        if group is None or rest.count(".") != 1:
            raise RefusedError(404, f"there is no episode {episode_id}")
        if group.state == "retired":
            raise RefusedError(410, f"group {group_id} is over")
        index, _, number = rest.partition(".")
        attempt = group.attempts.get(int(index))
        if attempt is None or attempt.number < int(number):
            raise RefusedError(404, f"there is no episode {episode_id}")
        if attempt.number > int(number):
            raise RefusedError(409, f"{episode_id} was replaced by {attempt.episode_id}")
        return group, attempt

    @staticmethod
    def _index(episode_id: str) -> int:
        return int(episode_id.split(".")[1])

    async def _until(self, look: Callable[[], Found | None], *, wait_s: float) -> Found | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while (found := look()) is None and loop.time() < until_s:
            await asyncio.sleep(POLL_S)
            self.lapse_due()
            self.scheduler(self)
        return found
