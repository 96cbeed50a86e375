"""What a run that does not go on waits for, named from its records alone.

The question is asked from the end: is there a step to train? If not, can lanes sample? If they can,
which group does the next step lack, and who has it? The first that is waited for longer than usual
is the answer. Usual is three times what nearly all such waits of the run took, and at least 2 to 15
minutes; so episodes may be slow, and a run that is only slow is not stalled.
"""

from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts import topics
from forgemq_contracts.messages import Message
from forgemq_contracts.mixture import mixture_of
from forgemq_contracts.queues import window_of
from forgemq_contracts.run import Queue, StartedRun
from forgemq_run_view.state import Stall, StallReason
from forgemq_run_view.watch_book import WatchBook
from forgemq_run_view.watched import WatchedGroup

CONFIRMED_AFTER_MS = 30_000
"""A stall is named once it was seen this long: a reader that catches up sees old gaps as new."""

# The least time after which something is waited for too long.
_LANES_MS = 180_000.0
"""Without a lane that may sample: an engine on a CPU starts in 0.5 to 3 minutes."""
_SERVICE_MS = 120_000.0
"""Reward, merger or scheduler with work before them; graders have their own limit."""
_GROUP_MS = 600_000.0
"""Without a completion or an end of a group that is played."""
_START_MS = 900_000.0
"""Until the first lane reports, or a step is trained."""

_WRITERS = {
    "reward": (topics.GRADED_EPISODES, topics.SCORED_GROUPS),
    "merger": (topics.MERGED_GROUPS,),
    "scheduler": (topics.ADMITTED_GROUPS, topics.SCHEDULED_STEPS, topics.RETIRED_GROUPS),
}


class Wait(Struct, frozen=True, kw_only=True):
    """Something the run waits for, and until when that is nothing unusual."""

    stall: Stall
    ends_ms: float


class StallWatch:
    """Names what a stalled run waits for.

    Lifecycle: `apply` every record; ask `stall` every few seconds.
    """

    def __init__(self, started: StartedRun) -> None:
        self.start_again(started)
        self._book = WatchBook()
        self._behind_since_ms: int | None = None
        self._seen: tuple[StallReason, str] | None = None
        self._seen_since_ms = 0

    def start_again(self, started: StartedRun) -> None:
        """Judge by this start of the run from now on."""
        self._started = started
        self._configuration = started.configuration
        self._mixture = mixture_of(started.configuration)

    def apply(self, message: Message) -> None:
        """Take in one record of the run."""
        self._book.apply(message)

    def stall(self, *, now_ms: int) -> Stall | None:
        """What the run waits for; None while it goes on, and until it was seen for a while."""
        found = self._waited_for(now_ms)
        seen = (found.reason, found.waits_for) if found is not None else None
        if seen != self._seen:
            self._seen, self._seen_since_ms = seen, now_ms
        return found if now_ms - self._seen_since_ms >= CONFIRMED_AFTER_MS else None

    def _waited_for(self, now_ms: int) -> Stall | None:
        if self._book.trained[1] >= self._configuration.trainer.steps:
            return None  # What is left is the evaluation of the last weights.
        waits = [wait for wait in self._waits(now_ms) if now_ms > wait.ends_ms]
        return waits[0].stall if waits else None

    def _waits(self, now_ms: int) -> list[Wait]:
        """What the run waits for: of what comes later, nothing can go on before this does."""
        book = self._book
        gateway = self._gateway_wait()
        is_gateway_silent = gateway is not None and now_ms > gateway.ends_ms
        if is_gateway_silent and book.lanes.known() and not book.lanes.live(now_ms):
            return [self._log_wait()]
        is_measuring = bool(book.scheduled) and self._is_baseline_open()
        if book.scheduled and not is_measuring:
            return [self._trainer_wait(min(book.scheduled))]
        if not book.lanes.live(now_ms):
            return [self._lane_wait()]
        if gateway is not None and is_gateway_silent:
            return [gateway]
        stuck = self._version_wait(now_ms)
        if stuck is not None:
            return [stuck]
        if is_measuring:
            return self._player_waits(now_ms)
        return self._queue_waits(now_ms)

    def _wait(
        self, reason: StallReason, waits_for: str, *, since_ms: int, limit_ms: float, detail: str
    ) -> Wait:
        # Before this start of the run nobody was there to do anything.
        since_ms = max(since_ms, self._started.started_ms)
        stall = Stall(reason=reason, waits_for=waits_for, since_ms=since_ms, detail=detail)
        return Wait(stall=stall, ends_ms=since_ms + limit_ms)

    def _gateway_wait(self) -> Wait | None:
        """Until when a gateway is to report; None before the first report."""
        reported_ms = self._book.written_ms(topics.REPORTED_GATEWAYS)
        if not reported_ms:
            return None
        return self._wait(
            "service_silent",
            "gateway",
            since_ms=reported_ms,
            limit_ms=_SERVICE_MS,
            detail="No gateway reports itself: agents cannot play.",
        )

    def _log_wait(self) -> Wait:
        return self._wait(
            "log_silent",
            "any record",
            since_ms=self._book.newest_ms,
            limit_ms=_SERVICE_MS,
            detail="No service writes to the log, lanes neither: the broker, or the whole run, "
            "is away.",
        )

    def _trainer_wait(self, step: int) -> Wait:
        book = self._book
        # A trainer that starts again trains the steps after its checkpoint again, in a new lineage.
        done_ms = book.written_ms(topics.TRAINED_STEPS, topics.PUBLISHED_WEIGHTS)
        return self._wait(
            "trainer_without_step",
            f"step {step}",
            since_ms=max(book.scheduled[step], done_ms, book.evaluated_ms if step == 0 else 0),
            limit_ms=book.steps.limit_ms(_START_MS),
            detail=f"Step {step} is scheduled, and the trainer does not finish it.",
        )

    def _is_baseline_open(self) -> bool:
        """Whether the weights of the start are still evaluated; the first step waits for that."""
        is_first = self._book.trained == (0, 0)
        return is_first and any(g.purpose == "eval" for g in self._book.groups.values())

    def _lane_wait(self) -> Wait:
        known = ", ".join(str(lane.lane) for lane in self._book.lanes.known())
        has_served = self._book.served_ms >= self._started.started_ms
        return self._wait(
            "lane_silent",
            f"lane {known}" if known else "any lane",
            since_ms=self._book.served_ms,
            limit_ms=_LANES_MS if has_served else _START_MS,
            detail="No lane says that it serves: the engines or the inference processes are away.",
        )

    def _version_wait(self, now_ms: int) -> Wait | None:
        """Lanes are live, and their weights are too old for what is admitted or would be."""
        lanes, published = self._book.lanes, self._book.published
        is_taking = bool(lanes.takes_requests(now_ms))
        if is_taking:
            self._behind_since_ms = None
        elif self._behind_since_ms is None:
            self._behind_since_ms = now_ms
        behind = [each for each in lanes.live(now_ms) if published and each.weights < published[0]]
        if is_taking and not (behind and self._slots_wait_for_weights()):
            return None
        wanted = f"version {published[0][1]}" if published else "the newest version"
        names = ", ".join(f"lane {each.lane} has {each.weights[1]}" for each in behind)
        return self._wait(
            "no_lane_with_version",
            wanted,
            since_ms=max(published[1] if published else 0, self._behind_since_ms or 0),
            limit_ms=_LANES_MS,
            detail=f"Lanes do not load {wanted}: {names or 'all are behind'}.",
        )

    def _slots_wait_for_weights(self) -> bool:
        """Whether groups wait for slots, and nothing is played or graded that could free one.

        A slot is free once all live lanes serve the version that its group's step made.
        """
        domains = [queue.domain for queue in self._configuration.queues]
        is_waiting = any(self._book.requested_ms(domain) is not None for domain in domains)
        return is_waiting and all(
            group.is_ready or group.is_scheduled
            for domain in domains
            for group in self._book.open_groups(domain)
        )

    def _queue_waits(self, now_ms: int) -> list[Wait]:
        book = self._book
        needed = self._mixture.groups(book.steps_scheduled)
        waits = []
        is_complete = True
        for queue, count in zip(self._configuration.queues, needed, strict=True):
            groups = book.open_groups(queue.domain)
            lacking = lacking_groups(groups, window=window_of(queue), count=count)
            if lacking is None:
                continue
            is_complete = False
            waits += (
                self._group_waits(queue, lacking[0], now_ms)
                if lacking
                else [self._admission_wait(queue)]
            )
        if is_complete:
            ready_ms = max((group.merged_ms for group in book.groups.values()), default=0)
            since_ms = max(ready_ms, book.written_ms(topics.TRAINED_STEPS))
            waits.append(
                self._service_wait("scheduler", since_ms, what="the next step is not scheduled")
            )
        return waits

    def _group_waits(self, queue: Queue, head: WatchedGroup, now_ms: int) -> list[Wait]:
        """The next step lacks this group, the oldest of the window that is not ready."""
        book, name = self._book, f"group {head.group_id}"
        if head.merged_ms:
            return [self._service_wait("scheduler", head.merged_ms, what=f"{name} is not retired")]
        if head.scored_ms:
            usual_ms = book.mergings.limit_ms(0)
            what = f"{name} has no tree"
            return [self._service_wait("merger", head.scored_ms, usual_ms=usual_ms, what=what)]
        if head.is_played:
            allowed_ms = 2000 * self._configuration.rewards.grader_timeout_s
            usual_ms = max(allowed_ms, book.gradings.limit_ms(0))
            what = f"{name} is not scored"
            return [self._service_wait("reward", head.sign_ms, usual_ms=usual_ms, what=what)]
        if now_ms - head.heard_ms > self._silence_ms() and not self._is_measured_first(
            head, now_ms
        ):
            return self._player_waits(now_ms) or [self._silent_head_wait(queue, head)]
        groups = book.open_groups(queue.domain)
        is_alone = not any(group.is_playing and group is not head for group in groups)
        return (
            [self._slow_head_wait(queue, head)] if is_alone and len(groups) >= queue.slots else []
        )

    def _silence_ms(self) -> float:
        """Longest time without a completion or an end of a group that is nothing unusual."""
        deadline_s = self._configuration.episodes.request_deadline_s
        return self._book.silences.limit_ms(max(_GROUP_MS, 1000 * deadline_s))

    def _is_measured_first(self, head: WatchedGroup, now_ms: int) -> bool:
        """Whether the agents have not begun with this group, and play an evaluation."""
        return not head.sign_ms and now_ms - self._book.evaluated_ms <= self._silence_ms()

    def _silent_head_wait(self, queue: Queue, head: WatchedGroup) -> Wait:
        return self._wait(
            "head_group",
            f"group {head.group_id}",
            since_ms=head.heard_ms,
            limit_ms=self._silence_ms(),
            detail=f"The next step lacks the head of {queue.domain}, of which nothing comes: "
            f"{len(head.finished)} of {head.group_size} episodes ended.",
        )

    def _slow_head_wait(self, queue: Queue, head: WatchedGroup) -> Wait:
        return self._wait(
            "window_full",
            f"group {head.group_id}",
            since_ms=head.admitted_ms,
            limit_ms=self._book.playings.limit_ms(
                self._silence_ms(), at_first_ms=1000 * queue.group_deadline_s
            ),
            detail=f"Every slot of {queue.domain} is held by a group that waits behind its head, "
            f"which is still played: {len(head.finished)} of {head.group_size} episodes ended.",
        )

    def _admission_wait(self, queue: Queue) -> Wait:
        book = self._book
        asked_ms = book.requested_ms(queue.domain)
        if asked_ms is not None:
            # A slot becomes free when lanes load a version, so admission may begin only then.
            since_ms = max(asked_ms, book.written_ms(topics.LOADED_WEIGHTS, topics.TRAINED_STEPS))
            what = f"a group of {queue.domain} is not admitted"
            return self._service_wait("scheduler", since_ms, what=what)
        return self._wait(
            "service_silent",
            "agents",
            since_ms=max(book.written_ms(topics.REQUESTED_GROUPS), book.sign_ms),
            limit_ms=self._silence_ms(),
            detail=f"Nobody asks for a group of {queue.domain}: no agent plays, or the gateway "
            "is away.",
        )

    def _player_waits(self, now_ms: int) -> list[Wait]:
        """Of several groups that are played nothing comes; [] if something does."""
        playing = [group for group in self._book.groups.values() if group.is_playing]
        newest_ms = max((group.heard_ms for group in playing), default=now_ms)
        if len(playing) < 2 or now_ms - newest_ms <= self._silence_ms():
            return []
        is_sampling = any(self._book.busy.values())
        return [
            self._wait(
                "service_silent",
                "inference" if is_sampling else "agents",
                since_ms=newest_ms,
                limit_ms=self._silence_ms(),
                detail="Lanes have requests, and none is answered: an engine hangs."
                if is_sampling
                else "Groups are admitted, lanes are idle, and nobody plays: the agents or the "
                "gateway are away.",
            )
        ]

    def _service_wait(
        self, service: str, since_ms: int, *, what: str, usual_ms: float = 0.0
    ) -> Wait:
        """A service has work before it; it is silent, or writes and is behind."""
        is_silent = self._book.written_ms(*_WRITERS[service]) <= since_ms
        done = "writes nothing" if is_silent else "is behind"
        return self._wait(
            "service_silent" if is_silent else "service_lag",
            service,
            since_ms=since_ms,
            limit_ms=max(_SERVICE_MS, usual_ms),
            detail=f"The {service} {done}: {what}.",
        )


def lacking_groups(
    groups: Sequence[WatchedGroup], *, window: int, count: int
) -> list[WatchedGroup] | None:
    """Groups of the window that are not ready, if a step cannot have `count`; None if it can.

    The scheduler takes groups one by one, and the window moves on whenever its head is taken.

    Args:
        groups: Of one queue, by queue index, not retired.
        window: Number of positions from the oldest group that is not taken.
        count: Groups that the step needs.
    """
    taken = {group.group_id for group in groups if group.is_scheduled}
    while True:
        head = next((n for n, g in enumerate(groups) if g.group_id not in taken), len(groups))
        inside = [g for g in groups[head : head + window] if g.group_id not in taken]
        ready = [group.group_id for group in inside if group.is_ready]
        if len(ready) >= count:
            return None
        if not ready:
            return inside
        taken.update(ready)
        count -= len(ready)
