"""The gateway's group and episode API, as the agent side uses it."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from forgemq_agents.errors import EpisodeOverError, TrainingEndedError
from forgemq_agents.requests import JsonReply, JsonRequests, Method
from forgemq_contracts.fields import Purpose


class GroupRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group of episodes of one task; the same key always asks for the same group."""

    domain: str
    idempotency_key: str
    task: Any
    purpose: Purpose
    group_size: int | None = None
    temperature: float | None = None
    round_name: str = ""


class GroupStatus(Struct, frozen=True, kw_only=True):
    """Where a group stands."""

    group_id: str
    state: Literal["requested", "admitted", "retired"]
    group_size: int
    retire_reason: str | None = None
    queue_index: int | None = None
    open: int = 0
    finished: int = 0


class Claim(Struct, frozen=True, kw_only=True):
    """One episode that is ours until its lease lapses."""

    episode_id: str
    group_id: str
    index: int
    attempt: int
    key: str
    base_url: str
    session_url: str
    lease_s: float
    task: Any
    temperature: float | None = None


class RunStatus(Struct, frozen=True, kw_only=True):
    """How far the run is."""

    run: str
    steps: int
    steps_trained: int
    training_ended: bool


class Gateway:
    """Admin calls; each may be retried.

    All but `claim` are idempotent. A claim that is asked again is another claim: where the first
    answer was lost, its episode waits for its lease to lapse and is then free for the next attempt.
    """

    def __init__(self, requests: JsonRequests, *, url: str, admin_key: str) -> None:
        self._requests = requests
        self._url = url.rstrip("/")
        self._admin_key = admin_key

    async def request_group(self, group: GroupRequest) -> GroupStatus:
        """Ask for a group.

        Raises:
            TrainingEndedError: it is a training group and training is over.
        """
        try:
            reply = await self._send("POST", "/v1/groups", group)
        except EpisodeOverError as error:
            if error.status != 410:
                raise
            raise TrainingEndedError(str(error), status=410) from error
        return msgspec.json.decode(reply.body, type=GroupStatus)

    async def group(self, known: GroupStatus, *, wait_s: float) -> GroupStatus:
        """Where the group stands, as soon as it is another state than known, or after `wait_s`."""
        path = f"/v1/groups/{known.group_id}?wait_s={wait_s:g}&state={known.state}"
        reply = await self._send("GET", path, wait_s=wait_s)
        return msgspec.json.decode(reply.body, type=GroupStatus)

    async def claim(self, group_id: str) -> Claim | None:
        """An episode of the group to play, None where all are taken; another one at every call.

        Raises:
            EpisodeOverError: the group is over.
        """
        reply = await self._send("POST", f"/v1/groups/{group_id}/claim", {"wait_s": 0})
        return None if reply.status == 204 else msgspec.json.decode(reply.body, type=Claim)

    async def heartbeat(self, episode_id: str) -> None:
        """Renew the lease."""
        await self._send("POST", f"/v1/episodes/{episode_id}/heartbeat", {})

    async def report_reward(
        self, episode_id: str, *, reward_id: str, name: str, value: float, completion_id: str | None
    ) -> None:
        """Add a reward to the episode or to one completion of it; idempotent by reward_id."""
        fields = {"reward_id": reward_id, "name": name, "value": value}
        if completion_id is not None:
            fields["completion_id"] = completion_id
        await self._send("POST", f"/v1/episodes/{episode_id}/rewards", fields)

    async def finish(
        self, episode_id: str, *, result: object, tool_s: float, virtual_s: float | None
    ) -> None:
        """The agent is done."""
        fields: dict[str, object] = {"result": result, "tool_s": tool_s}
        if virtual_s is not None:
            fields["virtual_s"] = virtual_s
        await self._send("POST", f"/v1/episodes/{episode_id}/finish", fields)

    async def abort(self, episode_id: str, *, detail: str) -> None:
        """The agent gave up; the episode is masked, never scored as zero."""
        await self._send("POST", f"/v1/episodes/{episode_id}/abort", {"detail": detail})

    async def run(self) -> RunStatus:
        """How far the run is."""
        return msgspec.json.decode((await self._send("GET", "/v1/run")).body, type=RunStatus)

    async def _send(
        self, method: Method, path: str, fields: object = None, *, wait_s: float = 0
    ) -> JsonReply:
        return await self._requests.send(
            method, self._url + path, key=self._admin_key, fields=fields, wait_s=wait_s
        )
