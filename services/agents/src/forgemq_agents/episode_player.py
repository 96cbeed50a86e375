"""Plays one claimed episode, renews its lease meanwhile, and reports how it ended."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future

import msgspec
from msgspec import UNSET

from forgemq_agents.episode import Episode
from forgemq_agents.errors import (
    ContextFullError,
    EpisodeOverError,
    GatewayError,
    PolicyFailedError,
)
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests
from forgemq_agents.user_code import Play
from forgemq_agents.user_values import in_json
from forgemq_contracts.admin import DETAIL_CHARACTERS_MAX, AbortRequest, Claim, FinishRequest
from forgemq_telemetry.telemetry import Telemetry


class EpisodePlayer:
    """Plays the episodes of one process."""

    def __init__(
        self,
        *,
        gateway: GatewayClient,
        requests: JsonRequests,
        leases: LeaseThread,
        environ: Mapping[str, str],
        telemetry: Telemetry,
    ) -> None:
        self._gateway = gateway
        self._leases = leases
        self._requests = requests
        self._environ = environ
        self._telemetry = telemetry

    async def play(self, claim: Claim, play: Play) -> str:
        """Play to the end, or until the gateway says that the episode is over.

        Returns:
            Why the episode was aborted; "" if it was not.
        """
        episode = Episode(
            claim,
            gateway=self._gateway,
            requests=self._requests,
            environ=self._environ,
            telemetry=self._telemetry,
        )
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(self._play_and_report(episode, play))

            def stop(detail: str) -> None:
                self._telemetry.event("superseded", episode=claim.episode_id, detail=detail)
                playing.cancel()

            def note(detail: str) -> None:
                self._telemetry.event("unheard", episode=claim.episode_id, detail=detail)

            # Awaited here, so that an error that no heartbeat should raise ends this process.
            renewing = self._leases.renew(claim, on_over=stop, on_unheard=note)
            renewal = tasks.create_task(_awaited(renewing))
            playing.add_done_callback(lambda _: renewal.cancel())
        return "" if playing.cancelled() else playing.result()

    async def _play_and_report(self, episode: Episode, play: Play) -> str:
        """Report how the user's code ended; its failure masks the episode, a limit truncates it.

        Returns:
            Why it was aborted, "" if it was not or the gateway does not know of it.
        """
        try:
            end = await _play_to_end(episode, play)
            if isinstance(end, AbortRequest):
                self._telemetry.event("aborted", episode=episode.episode_id, detail=end.detail)
                await self._gateway.abort(episode.episode_id, end)
                return end.detail
            await self._gateway.finish(episode.episode_id, end)
        except EpisodeOverError as error:
            self._telemetry.event("superseded", episode=episode.episode_id, detail=str(error))
        except GatewayError as error:
            # The lease lapses, and this or another process plays the episode again.
            self._telemetry.event("unreported", episode=episode.episode_id, detail=str(error))
        return ""


async def _awaited(renewing: "Future[None]") -> None:
    await asyncio.wrap_future(renewing)


async def _play_to_end(episode: Episode, play: Play) -> FinishRequest | AbortRequest:
    """Run the user's code; returns what to report.

    Raises:
        EpisodeOverError: the gateway refused a request of the agent; there is nothing to report.
    """
    try:
        try:
            await play(episode)
        except ContextFullError:
            if episode.truncated_by is UNSET:
                episode.truncate("context_full")
        except PolicyFailedError as error:
            if episode.truncated_by is UNSET:
                episode.truncate("declared")
            return _finish_of(episode, detail=_detail(error))
        return _finish_of(episode)
    except (EpisodeOverError, GeneratorExit):
        raise
    except BaseException as error:
        # User code: whatever it raises masks its episode.
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        return AbortRequest(detail=_detail(error), truncated_by=episode.truncated_by)


def _is_cancelled() -> bool:
    """Whether this task was asked to stop: user code can also raise `CancelledError` by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _detail(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS_MAX]


def _finish_of(episode: Episode, *, detail: str = "") -> FinishRequest:
    """What the user's code left in the episode, which may be no JSON or out of bounds."""
    fields = {
        "result": episode.result,
        "tool_s": episode.all_tool_s,
        "virtual_s": episode.virtual_s,
    }
    finish = msgspec.json.decode(in_json(fields), type=FinishRequest)
    return msgspec.structs.replace(finish, truncated_by=episode.truncated_by, detail=detail)
