"""Ends the episodes that no agent ends: their lease has lapsed, or their group is closed."""

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.episodes import Ending, HeldEpisode
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.group import Group
from forgemq_gateway.core.live import live_ending
from forgemq_gateway.operations import Operations


class Abandoned:
    """Looks for such episodes; call `end_due` several times a second, one call at a time.

    To write one end may take as long as the log needs, and agents are heard of meanwhile: each
    episode is looked at again before it is ended.
    """

    def __init__(self, operations: Operations, *, context: GatewayContext) -> None:
        self._operations = operations
        self._registry = context.registry
        self._gateways = context.gateways
        self._attempts_max = context.configuration.episodes.attempts_max
        self._clock = context.clock
        self._changed = context.changed
        self._telemetry = context.telemetry

    async def end_due(self) -> None:
        """End what is abandoned now; returns when its records are written or refused."""
        await self.lapse()
        await self.end_closed()

    async def lapse(self) -> None:
        """Free episodes whose lease has lapsed; end live ones, fail those at their last attempt."""
        # One moment for all: if the process stands still between two writes, no agent can be
        # heard of meanwhile, and no lease lapses by that.
        now_s = self._clock.now_s()
        for episode in self._registry.lapsed(now_s):
            if self._is_held(episode) and episode.has_lapsed(now_s):
                await self._lapse(episode)

    def _is_held(self, episode: HeldEpisode) -> bool:
        """Whether this is still the newest attempt of an open group that is served here.

        While a group is restored, its agents are not heard.
        """
        is_known = self._registry.episode(episode.episode_id) is episode
        return is_known and self._gateways.serves(episode.opened.group_id)

    async def _lapse(self, episode: HeldEpisode) -> None:
        if self._registry.groups[episode.opened.group_id].facts.source == "live":
            await self._end(episode, live_ending(episode))
            return
        self._telemetry.count("gateway.leases_lapsed")
        self._telemetry.event("lease_lapsed", episode=episode.episode_id)
        attempts = episode.opened.attempt + 1
        if attempts < self._attempts_max and episode.given is None:
            episode.state = "lapsed"
            self._changed.notify(episode.opened.group_id)
            return
        detail = f"the lease of attempt {attempts} of {attempts} lapsed"
        await self._end(episode, Ending(status="failed", detail=detail))

    async def end_closed(self) -> None:
        """End what is unfinished of groups past their deadline: as failed, so that it is masked.

        A recorded conversation has not failed by that: it ends as if it were idle.
        """
        groups = self._registry.groups.values()
        closed = [each for each in groups if each.closed and self._serves(each)]
        for group in closed:
            for index in group.unfinished():
                if group.is_unfinished(index) and self._serves(group):
                    await self._close(group, index)

    def _serves(self, group: Group) -> bool:
        return self._gateways.serves(group.facts.group_id)

    async def _close(self, group: Group, index: int) -> None:
        episode = group.episodes.get(index) or self._operations.openings.unopened(group, index)
        self._telemetry.event("episode_closed", episode=episode.episode_id)
        is_live = group.facts.source == "live"
        failed = Ending(status="failed", detail=group.closed)
        await self._end(episode, live_ending(episode) if is_live else failed)

    async def _end(self, episode: HeldEpisode, ending: Ending) -> None:
        """End an episode, unless its group retires meanwhile; a later call tries again."""
        try:
            await self._operations.end(episode, ending)
        except RefusedError:
            pass
        except FINAL_ERRORS:
            raise
        except LogError as error:
            self._telemetry.event(
                "end_failed",
                episode=episode.episode_id,
                error=f"{type(error).__name__}: {error}",
            )
