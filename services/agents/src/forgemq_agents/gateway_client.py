"""The group and episode API of the gateway, as the agent side calls it."""

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from forgemq_agents.admin_key import AdminKeyFile
from forgemq_agents.errors import EpisodeOverError, TrainingEndedError
from forgemq_agents.requests import JsonReply, JsonRequests
from forgemq_contracts import admin_routes
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
    ResultsQuery,
    RewardRequest,
    RunStatus,
)
from forgemq_contracts.admin_routes import Route
from forgemq_contracts.curriculum import TaskResult


class GatewayClient:
    """Calls of the API; each may be retried.

    All but `claim` are idempotent. A repeated claim takes another episode: if the answer to the
    first one was lost, its episode is free for the next attempt when its lease has lapsed.
    """

    def __init__(self, requests: JsonRequests, *, url: str, admin_key: str | AdminKeyFile) -> None:
        self._requests = requests
        self._url = url.rstrip("/")
        self._admin_key = admin_key

    async def request_group(self, group: GroupRequest) -> GroupStatus:
        """Ask for a group.

        Raises:
            TrainingEndedError: it is a training group and training is over.
        """
        try:
            reply = await self._send(admin_routes.REQUEST_GROUP, body=group)
        except EpisodeOverError as error:
            if error.status != 410:
                raise
            raise TrainingEndedError(str(error), status=410) from error
        return msgspec.json.decode(reply.body, type=GroupStatus)

    async def read_group(self, known: GroupStatus, *, wait_s: float) -> GroupStatus:
        """Read the group as soon as its state differs from the known one, or after `wait_s`.

        Raises:
            EpisodeOverError: the gateway does not know the group.
        """
        reply = await self._send(
            admin_routes.READ_GROUP,
            {"group_id": known.group_id},
            query=GroupQuery(wait_s=wait_s, state=known.state),
            wait_s=wait_s,
        )
        return msgspec.json.decode(reply.body, type=GroupStatus)

    async def claim(self, group_id: str) -> Claim | None:
        """Take an episode of the group to play; None if all are taken.

        Raises:
            EpisodeOverError: the group is over.
        """
        ids = {"group_id": group_id}
        reply = await self._send(admin_routes.CLAIM_EPISODE, ids, body=ClaimRequest())
        return None if reply.status == 204 else msgspec.json.decode(reply.body, type=Claim)

    async def renew_lease(self, episode_id: str) -> None:
        """Keep the episode for another lease."""
        await self._send(admin_routes.RENEW_LEASE, {"episode_id": episode_id})

    async def release(self, episode_id: str) -> None:
        """Give the episode back, so that another process may play its next attempt at once."""
        await self._send(admin_routes.RELEASE_EPISODE, {"episode_id": episode_id})

    async def report_reward(self, episode_id: str, reward: RewardRequest) -> None:
        """Add a reward to the episode or to one completion of it; idempotent by its id."""
        await self._send(admin_routes.REPORT_REWARD, {"episode_id": episode_id}, body=reward)

    async def finish(self, episode_id: str, end: FinishRequest) -> None:
        """End the episode: it is graded."""
        await self._send(admin_routes.FINISH_EPISODE, {"episode_id": episode_id}, body=end)

    async def abort(self, episode_id: str, end: AbortRequest) -> None:
        """Give the episode up: it is masked, never scored as zero."""
        await self._send(admin_routes.ABORT_EPISODE, {"episode_id": episode_id}, body=end)

    async def read_run(self) -> RunStatus:
        """Read how far the run is."""
        reply = await self._send(admin_routes.READ_RUN)
        return msgspec.json.decode(reply.body, type=RunStatus)

    async def read_results(self, domain: str, *, after: int) -> tuple[TaskResult, ...]:
        """Read the results of a domain's curriculum from this index on, all that there are."""
        found: list[TaskResult] = []
        while True:
            query = ResultsQuery(after=after + len(found))
            reply = await self._send(admin_routes.READ_RESULTS, {"domain": domain}, query=query)
            answer = msgspec.json.decode(reply.body, type=DomainResults)
            found += answer.results
            if len(answer.results) < RESULTS_MAX:
                return tuple(found)

    async def _send(
        self,
        route: Route,
        ids: Mapping[str, str] | None = None,
        *,
        body: Struct | None = None,
        query: Struct | None = None,
        wait_s: float = 0,
    ) -> JsonReply:
        address = self._url + route.path.format_map(ids or {})
        if query is not None:
            address += "?" + urlencode(msgspec.to_builtins(query))
        key = self._admin_key if isinstance(self._admin_key, str) else self._admin_key.current()
        return await self._requests.send(route.method, address, key=key, fields=body, wait_s=wait_s)
