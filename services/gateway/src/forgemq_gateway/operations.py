"""What the routes of the admin API do: groups, claims, leases, rewards and ends of episodes."""

import asyncio
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw, UnsetType

from forgemq_bus.errors import UNSENT_ERRORS, LogError
from forgemq_contracts.admin import (
    RESULTS_MAX,
    AbortRequest,
    Claim,
    DomainResults,
    FinishRequest,
    GroupRequest,
    GroupState,
    GroupStatus,
    Lease,
    RewardRequest,
    RunStatus,
)
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.fields import TruncationCause
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.partitions import group_id
from forgemq_contracts.queues import supervised_fractions
from forgemq_contracts.run import Queue
from forgemq_contracts.stages import stage_at
from forgemq_gateway.access import Access
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.episodes import Ending, HeldEpisode, reported_reward
from forgemq_gateway.core.errors import busy, conflict, gone, invalid, unknown
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.core.registry import RETIRED_STATUSES_MAX
from forgemq_gateway.core.repeated import check_new, first_task, known_group
from forgemq_gateway.core.supervised_groups import check_trains
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.openings import FreeEpisode, Openings
from forgemq_gateway.wire import ClientGoneError, HasLeft

# Found by a claim if every episode of the group has ended, or this gateway is about to end.
_OVER, _ENDING = "over", "ending"

# A second request to end an episode waits for the first one this much longer than its drain: the
# final record is still to be written then.
_WRITE_S = 5.0


class Operations:
    """One method for each route. A change is a record on the log before the registry has it."""

    def __init__(
        self, *, access: Access, keys: AdminKeys, dispatcher: Dispatcher, context: GatewayContext
    ) -> None:
        self._access = access
        self.openings = Openings(access=access, keys=keys, context=context)
        self._dispatcher = dispatcher
        self._configuration = context.configuration
        self._settings = context.settings
        self._registry = context.registry
        self._outbox = context.outbox
        self._clock = context.clock
        self._changed = context.changed
        self._telemetry = context.telemetry
        self.public_url = context.settings.public_url
        self.held_bytes = 0
        self._is_ending = False
        # A lock lives as long as someone waits for it or holds it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Groups whose record is being written, and the domain of each.
        self._requesting: dict[str, str] = {}

    def answer_long_polls(self) -> None:
        """Answer every long poll with the present state, because this gateway is about to end."""
        self._is_ending = True
        self._changed.notify_all()

    async def request_group(self, request: GroupRequest) -> GroupStatus:
        """Request the group of this idempotency key, unless it is known; returns its status.

        Raises:
            RefusedError: 400 unknown domain or wrong source for it, or no more keys of this kind
                are remembered; 409 the key asked for another group; 410 training has ended; 429.
        """
        queue = self._queue(request.domain)
        check_trains(request, queue)
        group = group_id(
            run=self._configuration.run,
            domain=request.domain,
            idempotency_key=request.idempotency_key,
        )
        record = RequestedGroup(
            group_id=group,
            domain=request.domain,
            purpose=request.purpose,
            group_size=request.group_size or queue.group_size,
            task=bytes(request.task),
            idempotency_key=request.idempotency_key,
            requested_ms=self._clock.wall_ms(),
            temperature=request.temperature,
            round_name=request.round_name,
            source=request.source,
            stage=self._stage(request),
            task_number=request.task_number,
            results_known=request.results_known,
        )
        tenure = self._access.tenure(group)
        async with self._alone(group):
            known = known_group(self._registry, record, takes_any=request.takes_known)
            if known is not None:
                return known
            self._check_room(queue, is_train=request.purpose == "train")
            check_new(self._registry.asked, record)
            self._requesting[group] = request.domain
            try:
                await self._outbox.promise(record, tenure=tenure)
            finally:
                del self._requesting[group]
            self._registry.apply_requested_group(record)
        self._telemetry.count("gateway.groups_requested")
        return self.group(group)

    def _stage(self, request: GroupRequest) -> int | None:
        """The stage that the group belongs to; None if it has none."""
        if request.stage is not None and request.stage >= len(self._configuration.stages):
            count = len(self._configuration.stages)
            raise invalid(f"stage: the run has {count} stages, got {request.stage}", param="stage")
        if request.stage is None and request.purpose == "train":
            return stage_at(self._configuration.stages, self._registry.steps_trained)
        return request.stage

    def _alone(self, identifier: str) -> asyncio.Lock:
        """Held while one request that must not meet another about this id is served."""
        return self._locks.setdefault(identifier, asyncio.Lock())

    def _queue(self, domain: str) -> Queue:
        for queue in self._configuration.queues:
            if queue.domain == domain:
                return queue
        domains = ", ".join(queue.domain for queue in self._configuration.queues)
        raise invalid(f"there is no domain {domain!r}; there are {domains}", param="domain")

    def _check_room(self, queue: Queue, *, is_train: bool) -> None:
        if is_train and self._registry.training_ended:
            raise gone("training has ended")
        # The feed may have applied a record that is still being written here.
        waiting = self._registry.waiting_count(queue.domain) + sum(
            domain == queue.domain and group not in self._registry.groups
            for group, domain in self._requesting.items()
        )
        if waiting >= queue.groups_requested_max:
            raise busy(f"{waiting} groups of {queue.domain} wait for a slot already")
        if self.held_bytes > self._settings.memory_bytes_max:
            raise busy("the histories of open groups fill the gateway's memory")

    def group(self, group_id: str) -> GroupStatus:
        """The group's present status.

        Raises:
            RefusedError: 404, or another gateway owns it.
        """
        self._access.check_here(group_id)
        view = self._registry.view(group_id)
        if view is None:
            raise unknown(
                f"there is no group {group_id}, or it retired before the newest "
                f"{RETIRED_STATUSES_MAX}"
            )
        return view

    async def changed_group(
        self, group_id: str, *, wait_s: float, known: GroupState | None
    ) -> GroupStatus:
        """Wait until the group's state differs from `known`, at most `wait_s`; returns its status.

        Args:
            group_id: Id of a requested group.
            wait_s: A retired group is answered at once: it changes no further.
            known: The state that the caller knows. None stands for the present one, and so misses
                a change between the caller's previous answer and this question.
        """
        before = known or self.group(group_id).state

        def look() -> GroupStatus | None:
            view = self.group(group_id)
            is_news = view.state != before or view.state == "retired"
            return view if is_news or self._is_ending else None

        changed = await self._changed.until(
            look, group_id=group_id, timeout_s=min(wait_s, self._settings.long_poll_s_max)
        )
        return changed or self.group(group_id)

    async def claim(self, group_id: str, *, wait_s: float, has_left: HasLeft) -> Claim | None:
        """Open an episode of the group for this agent; None if none is free.

        Raises:
            RefusedError: 404 unknown group, 410 group over.
            ClientGoneError: the agent `has_left` while it waited; nothing is opened.
        """
        self.group(group_id)

        def look() -> FreeEpisode | str | None:
            self._access.check_here(group_id)
            group = self._registry.groups.get(group_id)
            if group is None or len(group.finished) >= group.facts.group_size:
                return _OVER
            free = group.claimable()
            if free is not None:
                return FreeEpisode(group, *free)
            return _ENDING if self._is_ending else None

        found: FreeEpisode | str | None = await self._changed.until(
            look, group_id=group_id, timeout_s=min(wait_s, self._settings.long_poll_s_max)
        )
        if isinstance(found, FreeEpisode):
            if has_left():
                raise ClientGoneError
            return await self._open(found)
        if found == _OVER:
            raise gone(f"group {group_id} is over")
        return None

    async def _open(self, free: FreeEpisode) -> Claim:
        record, key = await self.openings.open(free)
        return Claim(
            episode_id=record.episode_id,
            group_id=record.group_id,
            index=record.index,
            attempt=record.attempt,
            key=key,
            base_url=f"{self.public_url}/v1",
            session_url=f"{self.public_url}/s/{key}/v1",
            lease_s=record.lease_s,
            task=Raw(free.group.facts.task),
            temperature=record.sampling.temperature,
            context_tokens_max=record.context_tokens_max,
        )

    def renew_lease(self, episode_id: str) -> Lease:
        """Keep the episode for its agent, which has just sent a request."""
        episode = self._access.known_episode(episode_id)
        if episode.state == "ended":
            raise conflict(f"episode {episode_id} has ended")
        episode.renew(self._clock.now_s())
        return Lease(lease_s=episode.opened.lease_s)

    async def reward(self, episode_id: str, request: RewardRequest) -> None:
        """Add a reward to the episode's record; a known id changes nothing.

        One at a time, since each record counts the rewards before it. The end of the episode
        waits for them too: its record contains every reward that was answered with 200.
        """
        async with self._alone(episode_id):
            episode = self._access.known_episode(episode_id)
            tenure = self._access.tenure(episode.opened.group_id)
            reward = reported_reward(request)
            record = episode.with_reward(reward)
            if record is None:
                return
            if episode.is_closed:
                raise conflict(f"episode {episode_id} has ended")
            completions = episode.history.completions
            if reward.completion_id is not None and reward.completion_id not in completions:
                raise invalid(
                    f"{reward.completion_id} is not a completion of this episode",
                    param="completion_id",
                )
            await self._outbox.promise(record, tenure=tenure)
            if self._access.is_still(tenure, record.group_id):
                self._registry.apply_opened_episode(record, lease_until_s=episode.lease_until_s)
        episode.renew(self._clock.now_s())

    async def finish(self, episode_id: str, request: FinishRequest) -> None:
        """Wait for the episode's open requests, then write its final record as completed."""
        ending = Ending(
            status="completed",
            result=bytes(request.result),
            tool_s=request.tool_s,
            virtual_s=request.virtual_s,
            detail=request.detail,
        )
        await self._end(episode_id, ending, said=request.truncated_by)

    async def abort(self, episode_id: str, request: AbortRequest) -> None:
        """Write the final record as aborted, or as completed if a limit ended the episode."""
        ending = Ending(status="aborted", detail=request.detail)
        await self._end(episode_id, ending, said=request.truncated_by)

    async def _end(
        self, episode_id: str, ending: Ending, *, said: TruncationCause | UnsetType | None
    ) -> None:
        episode = await self._unclaimed(episode_id)
        if episode.state not in ("finishing", "ended"):
            cause = episode.truncated_by(said)
            if cause is not None:
                ending = msgspec.structs.replace(ending, status="completed", truncated_by=cause)
            await self.end(episode, ending)
            return
        # A repeated request: answer when the first one has written the final record.
        state = await self._changed.until(
            lambda: None if episode.state == "finishing" else episode.state,
            group_id=episode.opened.group_id,
            timeout_s=self._settings.drain_s + _WRITE_S,
        )
        if state != "ended":
            raise busy(f"the end of episode {episode_id} is not written yet", status=503)

    async def _unclaimed(self, episode_id: str) -> HeldEpisode:
        """The episode, once nobody else is about to have it: its lease may have lapsed.

        Raises:
            RefusedError: 409 replaced, or as `Access.known_episode`; 503, the log takes too long.
        """
        opened = self._access.known_episode(episode_id).opened
        group = self._registry.groups[opened.group_id]
        is_decided = await self._changed.until(
            lambda: None if opened.index in group.claiming else True,
            group_id=opened.group_id,
            timeout_s=_WRITE_S,
        )
        if is_decided is None:
            raise busy(f"another agent is about to have episode {episode_id}", status=503)
        return self._access.known_episode(episode_id)

    async def end(self, episode: HeldEpisode, ending: Ending) -> None:
        """Write the final record of an episode; if completed, its open requests may end before.

        If the record cannot be written, the episode is as it was: it can be ended again, or lapse.
        If the log may have it all the same, the next end writes the same record again.
        """
        tenure = self._access.tenure(group_id := episode.opened.group_id)
        before, episode.state = episode.state, "finishing"
        try:
            record = episode.given or await self._final_record(episode, ending)
            await self._write_end(episode, record, tenure)
        except BaseException:
            # Also on a cancellation: while it is finishing, no other end could follow.
            episode.state = before
            self._changed.notify(group_id)
            raise
        if self._access.is_still(tenure, group_id):
            self._registry.apply_finished_episode(record)
        self._changed.notify(group_id)
        self._telemetry.count("gateway.episodes_finished", status=record.status)

    async def _write_end(self, episode: HeldEpisode, record: FinishedEpisode, tenure: int) -> None:
        try:
            await self._outbox.promise(record, tenure=tenure)
        except (LogError, asyncio.CancelledError) as error:
            if not isinstance(error, UNSENT_ERRORS):
                episode.given = record
            raise

    async def _final_record(self, episode: HeldEpisode, ending: Ending) -> FinishedEpisode:
        """End the episode's turns; returns its record, if its group is open."""
        if ending.status == "completed":
            await self._changed.until(
                lambda: None if episode.clients else True,
                group_id=episode.opened.group_id,
                timeout_s=self._settings.drain_s,
            )
        ended = conflict(f"episode {episode.episode_id} has ended")
        self._access.check_here(episode.opened.group_id)
        if episode.has_undelivered():
            await self._outbox.read_deliveries(episode.opened.group_id)
        await self._dispatcher.end_turns(episode, ended)
        group = self._registry.groups.get(episode.opened.group_id)
        if group is None:
            raise gone(f"group {episode.opened.group_id} is over")
        async with self._alone(episode.episode_id):
            return episode.final_record(
                ending, group=group.facts, finished_ms=self._clock.wall_ms()
            )

    def run(self) -> RunStatus:
        """How far the run is."""
        domains = tuple(queue.domain for queue in self._configuration.queues)
        return RunStatus(
            run=self._configuration.run,
            steps=self._configuration.trainer.steps,
            steps_trained=self._registry.steps_trained,
            training_ended=self._registry.training_ended,
            domains=domains,
            supervised_domains=tuple(supervised_fractions(self._configuration)),
            first_tasks={d: first_task(self._registry, domain=d) for d in domains},
        )

    def results(self, domain: str, *, after: int) -> DomainResults:
        """Results of the domain's curriculum from this index on, at most `RESULTS_MAX`.

        Raises:
            RefusedError: 404, there is no such domain.
        """
        if all(queue.domain != domain for queue in self._configuration.queues):
            raise unknown(f"there is no domain {domain!r}")
        known = self._registry.results.get(domain)
        found = () if known is None else known.after(after, count_max=RESULTS_MAX)
        return DomainResults(results=tuple(found))
