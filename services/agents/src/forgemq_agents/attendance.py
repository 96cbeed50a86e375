"""Plays one claimed episode: heartbeats beside it, and its end reported whatever it is."""

import asyncio
from collections.abc import Mapping

from forgemq_agents.episode import Episode
from forgemq_agents.errors import EpisodeOverError, GatewayError
from forgemq_agents.gateway import Claim, Gateway
from forgemq_agents.requests import JsonRequests
from forgemq_agents.user_code import Play
from forgemq_telemetry.telemetry import Telemetry

# Two heartbeats may be lost before the lease lapses.
HEARTBEATS_PER_LEASE = 3
DETAIL_CHARACTERS_MAX = 2000


class Attendance:
    """Plays episodes of one process."""

    def __init__(
        self,
        *,
        gateway: Gateway,
        requests: JsonRequests,
        environ: Mapping[str, str],
        telemetry: Telemetry,
    ) -> None:
        self._gateway = gateway
        self._requests = requests
        self._environ = environ
        self._telemetry = telemetry

    async def attend(self, claim: Claim, play: Play) -> None:
        """Play to the end, or until the episode is no longer ours."""
        episode = Episode(
            claim,
            gateway=self._gateway,
            requests=self._requests,
            environ=self._environ,
            telemetry=self._telemetry,
        )
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(self._play(episode, play))
            beating = tasks.create_task(self._beat(claim, playing))
            playing.add_done_callback(lambda _: beating.cancel())

    async def _play(self, episode: Episode, play: Play) -> None:
        """Report how the user's code ended; its failure masks the episode."""
        try:
            detail = await _failure(episode, play)
            if detail:
                self._telemetry.event("aborted", episode=episode.episode_id, detail=detail)
                await self._gateway.abort(episode.episode_id, detail=detail)
            else:
                await self._gateway.finish(
                    episode.episode_id,
                    result=episode.result,
                    tool_s=episode.tool_s,
                    virtual_s=episode.virtual_s,
                )
        except EpisodeOverError as error:
            self._telemetry.event("superseded", episode=episode.episode_id, detail=str(error))
        except GatewayError as error:
            # The lease lapses and the episode is played again, by us or by another process.
            self._telemetry.event("unreported", episode=episode.episode_id, detail=str(error))

    async def _beat(self, claim: Claim, playing: "asyncio.Task[None]") -> None:
        while True:
            await asyncio.sleep(claim.lease_s / HEARTBEATS_PER_LEASE)
            try:
                await self._gateway.heartbeat(claim.episode_id)
            except EpisodeOverError as error:
                self._telemetry.event("superseded", episode=claim.episode_id, detail=str(error))
                playing.cancel()
                return
            except GatewayError as error:
                self._telemetry.event("unheard", episode=claim.episode_id, detail=str(error))


async def _failure(episode: Episode, play: Play) -> str:
    """What the user's code raised, "" where it came to its end.

    Raises:
        EpisodeOverError: the episode is no longer ours; there is nothing to report.
    """
    try:
        await play(episode)
    except EpisodeOverError:
        raise
    except Exception as error:  # noqa: BLE001 - user code: whatever it raises masks its episode
        return f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS_MAX]
    return ""
