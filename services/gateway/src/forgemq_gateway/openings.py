"""Opens episodes: writes the record that lets somebody play an attempt, and then applies it.

An agent that will not go on gives its episode back.
"""

from msgspec import Struct

from forgemq_contracts.domains import (
    context_tokens_max_of,
    history_of,
    sampling_of,
    stream_of,
)
from forgemq_contracts.episodes import OpenedEpisode
from forgemq_contracts.partitions import episode_id
from forgemq_gateway.access import Access
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import conflict
from forgemq_gateway.core.group import Group
from forgemq_gateway.core.keys import AdminKeys, key_sha256
from forgemq_gateway.core.sampling import pinned_sampling


class FreeEpisode(Struct, frozen=True):
    """An episode that may be opened, and the number of its next attempt."""

    group: Group
    index: int
    attempt: int


class Openings:
    """Opens episodes for agents that claim them, and for the callers of live keys."""

    def __init__(self, *, access: Access, keys: AdminKeys, context: GatewayContext) -> None:
        self._access = access
        self._keys = keys
        self._configuration = context.configuration
        self._registry = context.registry
        self._outbox = context.outbox
        self._clock = context.clock
        self._changed = context.changed
        self._telemetry = context.telemetry

    async def open(
        self, free: FreeEpisode, *, lease_s: float | None = None, session: str = ""
    ) -> tuple[OpenedEpisode, str]:
        """Open an episode; returns its record, which is on the log, and its key.

        Args:
            free: Nobody else may take it meanwhile.
            lease_s: None: as the run's episodes have it.
            session: As the record has it.
        """
        group, index = free.group, free.index
        tenure = self._access.tenure(group.facts.group_id)
        record, key = self._opening(
            group, index=index, attempt=free.attempt, lease_s=lease_s, session=session
        )
        group.claiming.add(index)
        try:
            await self._outbox.promise(record, tenure=tenure)
        finally:
            # Also on an error or a cancellation: the episode is free again then.
            group.claiming.discard(index)
            self._changed.notify(record.group_id)
        if self._access.is_still(tenure, record.group_id):
            now_s = self._clock.now_s()
            self._registry.apply_opened_episode(record, lease_until_s=now_s + record.lease_s)
        self._telemetry.count("gateway.episodes_opened")
        return record, key

    def release(self, episode_id: str) -> None:
        """Let the lease of an episode lapse at the next tick, as its agent asks.

        Raises:
            RefusedError: 409, it has ended, or as `Access.known_episode`.
        """
        episode = self._access.known_episode(episode_id)
        if episode.state == "ended":
            raise conflict(f"episode {episode_id} has ended")
        self._registry.release(episode, now_s=self._clock.now_s())

    def unopened(self, group: Group, index: int) -> HeldEpisode:
        """An episode that nobody has opened, to be ended."""
        opened, _ = self._opening(group, index=index, attempt=0)
        return HeldEpisode(opened, lease_until_s=0.0)

    def _opening(
        self,
        group: Group,
        *,
        index: int,
        attempt: int,
        lease_s: float | None = None,
        session: str = "",
    ) -> tuple[OpenedEpisode, str]:
        """The record that opens this attempt, and the attempt's key."""
        facts, configuration = group.facts, self._configuration
        sampling = sampling_of(configuration, domain=facts.domain, stage=facts.stage)
        identifier = episode_id(group=facts.group_id, index=index, attempt=attempt)
        key = self._keys.key_of(identifier)
        opened = OpenedEpisode(
            episode_id=identifier,
            group_id=facts.group_id,
            index=index,
            attempt=attempt,
            key_sha256=key_sha256(key),
            sampling=pinned_sampling(sampling, temperature=facts.temperature),
            history=history_of(configuration, domain=facts.domain),
            stream=stream_of(configuration, domain=facts.domain),
            context_tokens_max=context_tokens_max_of(
                configuration, domain=facts.domain, stage=facts.stage
            ),
            lease_s=configuration.episodes.lease_s if lease_s is None else lease_s,
            opened_ms=self._clock.wall_ms(),
            session=session,
        )
        return opened, key
