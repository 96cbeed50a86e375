"""The gateway's policy of attempts among lanes that die, a log that is late, clients that leave.

The world is seeded: a failing seed is the whole reproduction. It knows what every party did, so it
checks each effect of the policy at once: that a waiting client hears once, that an attempt moves
only for a reason, that no result is lost.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import (
    CancelledCompletion,
    FailureKind,
    FinishedCompletion,
    RequestedCompletion,
    TurnPart,
)
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.attempts import (
    DEADLINE_GRACE_MS,
    ENGINE_ERRORS_MAX,
    AnswerTurn,
    Attempts,
    CancelAttempt,
    Effects,
    FailTurn,
    Moment,
    ReportFailure,
    SendAttempt,
)
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import gone, invalid
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import Text
from forgemq_gateway.core.turns import OpenTurn

DEADLINE_MS = 20_000
HOLD_S = 3.0
LAPSE_S = 5.0
PREPARATION_MS_MAX = 2000
TICK_MS = 250


def parse(_: bytes, __: str, ___: Sequence[Mapping[str, Any]], ____: bytes) -> Reply:
    return Reply(parts=(Text("yes"),))


class Engine(msgspec.Struct, eq=False):
    """One process of a lane under one epoch; a zombie works on after its successor started."""

    lane: int
    epoch: int
    is_alive: bool = True
    silent_until_ms: int = 0
    loading_until_ms: int = 0
    version: int = 0
    known: set[str] = msgspec.field(default_factory=set)
    cancelled: dict[str, int] = msgspec.field(default_factory=dict)


class Heard(msgspec.Struct):
    """The newest heartbeat of a lane that the gateway got."""

    epoch: int
    at_ms: int
    is_serving: bool


class Client(msgspec.Struct, eq=False):
    """An agent's conversation: one request after the other, each on top of the previous reply."""

    group_id: str
    name: str
    number: int = 0
    parent_id: str | None = None
    waits_for: str | None = None
    turn: OpenTurn | None = None


class World:
    """Everything around the policy; time is virtual milliseconds."""

    def __init__(self, seed: int, *, lanes: int, has_faults: bool = True) -> None:
        self.random = random.Random(seed)
        self.has_faults = has_faults
        self.now_ms = 0
        self.calendar: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        self.engines = [Engine(lane=number, epoch=1) for number in range(lanes)]
        self.zombies: list[Engine] = []
        self.clients: list[Client] = []
        self.groups: list[AdmittedGroup] = []
        self.opened: list[OpenedEpisode] = []
        self.retired: list[RetiredGroup] = []
        self.requested: dict[str, RequestedCompletion] = {}
        self.requested_log: list[RequestedCompletion] = []
        self.cancelled_log: list[CancelledCompletion] = []
        self.finished_log: list[FinishedCompletion] = []
        self.reports: dict[int, ReportedEngine] = {}
        self.heard: dict[int, Heard] = {}
        self.excused: set[str] = set()
        self.answers = self.refusals = self.moves = 0
        self.start()

    # Time.

    def after(self, delay_ms: int, happen: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.calendar, (self.now_ms + delay_ms, self.count, happen))

    def later(self, low_ms: int, high_ms: int, happen: Callable[[], None]) -> None:
        self.after(self.random.randint(low_ms, high_ms), happen)

    def run(self, *, until_s: int) -> None:
        for engine in self.engines:
            self.later(0, 4000, lambda engine=engine: self.heartbeat(engine))  # type: ignore[misc]
        for _ in range(3):
            self.open_group()
        self.after(0, self.tick)
        while self.calendar and self.calendar[0][0] <= until_s * 1000:
            self.now_ms, _, happen = heapq.heappop(self.calendar)
            happen()
            self.attempts._check()
            self.check_lanes()

    def happens(self, probability: float) -> bool:
        return self.has_faults and self.random.random() < probability

    @property
    def at(self) -> Moment:
        return Moment(now_s=self.now_ms / 1000, wall_ms=self.now_ms)

    # The gateway.

    def start(self) -> None:
        """A gateway that knows the log and nothing else, as `Feed.restore` reads it."""
        self.registry = Registry()
        self.attempts = Attempts(Lanes(lapse_s=LAPSE_S), lane_hold_s=HOLD_S)
        self.joined_ms: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        for group in self.groups:
            self.registry.apply_admitted_group(group)
        for retired in self.retired:
            self.registry.apply_retired_group(retired)
        for opened in self.opened:
            self.registry.apply_opened_episode(opened, lease_until_s=0.0)
        for offset, finished in enumerate(self.finished_log):
            self.registry.apply_finished_completion(
                finished, offset=offset, finished_ms=self.now_ms, parse=parse
            )
        for requested in self.requested_log:
            self.registry.apply_requested_completion(requested)
        for cancelled in self.cancelled_log:
            self.registry.apply_cancelled_completion(cancelled)
        for lane, report in self.reports.items():
            self.attempts.restore_lane(report, heard_s=self.heard[lane].at_ms / 1000)
        self.attempts.restore(self.registry.take_restored_turns())
        self.read_offset = len(self.finished_log)

    def restart(self) -> None:
        self.start()
        self.excused = set(self.requested)  # Nothing of before is held against a new process.
        for client in self.clients:
            if client.waits_for is not None:
                client.waits_for = client.turn = None
                self.later(0, 2000, lambda client=client: self.ask(client))  # type: ignore[misc]

    def tick(self) -> None:
        self.apply(self.attempts.tick(self.at))
        longest_ms = DEADLINE_MS + DEADLINE_GRACE_MS + PREPARATION_MS_MAX + 2 * TICK_MS
        for client in self.clients:
            if client.waits_for is not None:
                waited_ms = self.now_ms - self.joined_ms[client.waits_for]
                assert waited_ms <= longest_ms + HOLD_S * 1000, "a client waits past its deadline"
        if self.happens(0.004):
            self.restart()
        if self.happens(0.01):
            self.fail_engine(self.random.choice(self.engines))
        if self.happens(0.004):
            self.retire_group()
        self.after(TICK_MS, self.tick)

    def apply(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case SendAttempt(record):
                    self.check_sent(record)
                    self.requested[record.request_id] = record
                    self.requested_log.append(record)
                    self.excused.discard(record.request_id)
                    for engine in (*self.engines, *self.zombies):
                        self.later(5, 300, lambda e=engine, r=record: self.take(e, r))  # type: ignore[misc]
                case CancelAttempt(record):
                    assert record.attempt == self.requested[record.request_id].attempt
                    assert not self.waiting_for(record.request_id), "cancelled under a client"
                    self.cancelled_log.append(record)
                    self.excused.add(record.request_id)
                    for engine in self.engines:
                        self.later(5, 300, lambda e=engine, r=record: self.cancel(e, r))  # type: ignore[misc]
                case AnswerTurn(completion):
                    self.answers += 1
                    for client in self.let_hear(completion.request_id):
                        client.parent_id, client.number = completion.request_id, client.number + 1
                        episode = self.episode_of(client)
                        assert episode is not None
                        episode.delivered.add(completion.request_id)
                        completion.echoed = True
                case FailTurn(request_id, error):
                    self.refusals += 1
                    self.errors.pop(request_id, None)
                    if error.status == 504:  # The lane itself stops at the deadline.
                        self.excused.add(request_id)
                    for client in self.let_hear(request_id):
                        if error.status == 400:  # This body is refused each time; say another.
                            client.number += 1
                case ReportFailure(request_id, failure):
                    assert self.waiting_for(request_id), "a failure is reported of an idle turn"
                    self.errors[request_id] = self.errors.get(request_id, 0) + (failure == "engine")
        assert all(count < ENGINE_ERRORS_MAX for count in self.errors.values()), "too many tries"

    def let_hear(self, request_id: str) -> list[Client]:
        """The clients that hear now; each of them goes on a while later."""
        clients = self.waiting_for(request_id)
        assert clients, f"{request_id} ends and no client waits for it"
        for client in clients:
            client.waits_for = client.turn = None
            self.later(10, 3000, lambda client=client: self.ask(client))  # type: ignore[misc]
        return clients

    def waiting_for(self, request_id: str) -> list[Client]:
        return [client for client in self.clients if client.waits_for == request_id]

    # What must hold.

    def check_sent(self, record: RequestedCompletion) -> None:
        """An attempt goes to a live lane, for a client, and only if the previous one is over."""
        assert self.waiting_for(record.request_id), "sent with no client waiting"
        assert self.is_live(record.lane, record.epoch), "sent to a lane that is not live"
        assert self.now_ms <= record.deadline_ms + DEADLINE_GRACE_MS, "sent past its deadline"
        previous = self.requested.get(record.request_id)
        if previous is None:
            assert record.attempt == 0
            return
        assert record.attempt == previous.attempt + 1, "attempts are numbered without gaps"
        has_lost_lane = not self.is_heard(previous.lane, previous.epoch)
        assert has_lost_lane or record.request_id in self.excused, "moved without a reason"
        self.moves += 1

    def check_lanes(self) -> None:
        """What the lanes count in flight is what turns are on them."""
        count: dict[int, int] = {}
        for _, episode in self.registry.episodes():
            for turn in episode.turns.values():
                heard = self.heard.get(turn.lane)
                if heard is not None and heard.epoch == turn.epoch:
                    count[turn.lane] = count.get(turn.lane, 0) + 1
        assert {n: c for n, c in self.attempts.in_flight().items() if c} == count

    def is_heard(self, lane: int, epoch: int) -> bool:
        heard = self.heard.get(lane)
        if heard is None or heard.epoch != epoch:
            return False
        return self.now_ms - heard.at_ms <= LAPSE_S * 1000

    def is_live(self, lane: int, epoch: int) -> bool:
        return self.is_heard(lane, epoch) and self.heard[lane].is_serving

    # Clients.

    def open_group(self) -> None:
        group_id = f"g-{len(self.groups)}"
        admitted = AdmittedGroup(
            group_id=group_id,
            domain="d",
            purpose="train",
            group_size=2,
            task=b"{}",
            version_at_admission=0,
            queue_index=len(self.groups),
        )
        opened = OpenedEpisode(
            episode_id=f"{group_id}.0.0",
            group_id=group_id,
            index=0,
            attempt=0,
            key_sha256="0" * 64,
            sampling=Sampling(),
            history="append_only",
            lease_s=10,
            opened_ms=0,
        )
        self.groups.append(admitted)
        self.opened.append(opened)
        self.registry.apply_admitted_group(admitted)
        self.registry.apply_opened_episode(opened, lease_until_s=0.0)
        # Two clients of one name send the same bodies: they share turns.
        for name in ("a", "b", "b"):
            client = Client(group_id=group_id, name=name)
            self.clients.append(client)
            self.later(0, 3000, lambda client=client: self.ask(client))  # type: ignore[misc]

    def retire_group(self) -> None:
        group_id = self.random.choice(self.groups).group_id
        record = RetiredGroup(
            group_id=group_id, domain="d", purpose="train", reason="stale", queue_index=0
        )
        group = self.registry.apply_retired_group(record)
        if group is None:
            return
        self.retired.append(record)
        for episode in group.episodes.values():
            self.apply(self.attempts.end_turns(episode, gone(f"group {group_id} is over")))
        assert not any(c.waits_for for c in self.clients if c.group_id == group_id)
        self.clients = [c for c in self.clients if c.group_id != group_id]
        self.open_group()

    def episode_of(self, client: Client) -> HeldEpisode | None:
        return self.registry.episode(f"{client.group_id}.0.0")

    def ask(self, client: Client) -> None:
        """Ask as `TurnSource.start` does: replay, join, or begin."""
        episode = self.episode_of(client)
        if episode is None or client.waits_for is not None:
            return
        body = f"{client.name}.{client.number}.{client.parent_id}"
        known = episode.known(body)
        completion = None if known is None else episode.history.completions.get(known)
        if completion is not None:  # Replayed; not counted, for no turn ends by it.
            episode.delivered.add(completion.request_id)
            client.parent_id, client.number = completion.request_id, client.number + 1
            self.later(10, 3000, lambda: self.ask(client))
            return
        turn = None if known is None else episode.turns.get(known)
        deadline_ms = self.now_ms + DEADLINE_MS
        if turn is not None:
            self.wait(client, turn)
            effects = self.attempts.join(episode, turn, deadline_ms=deadline_ms, at=self.at)
            self.apply(effects)
        else:
            parent_id = client.parent_id if client.parent_id in episode.history.completions else None
            turn = episode.begin(
                body, matched=parent_id, requested_ms=self.now_ms, deadline_ms=deadline_ms
            )
            self.wait(client, turn)
            self.attempts.begin(episode, turn)
            self.prepare(episode, turn, parent_id)
        if self.happens(0.2):
            self.later(0, 8000, lambda: self.leave(client, turn))

    def wait(self, client: Client, turn: OpenTurn) -> None:
        client.waits_for, client.turn = turn.request_id, turn
        self.joined_ms[turn.request_id] = self.now_ms

    def leave(self, client: Client, turn: OpenTurn) -> None:
        episode = self.episode_of(client)
        if client.turn is not turn or episode is None:
            return
        client.waits_for = client.turn = None
        self.apply(self.attempts.leave(episode, turn))
        if not self.waiting_for(turn.request_id):
            assert turn.lane < 0, "an abandoned turn is still on a lane"
            self.errors.pop(turn.request_id, None)
        self.later(0, 6000, lambda: self.ask(client))

    def prepare(self, episode: HeldEpisode, turn: OpenTurn, parent_id: str | None) -> None:
        attempts = self.attempts
        parent = None if parent_id is None else episode.history.completions[parent_id]
        prepared = Prepared(
            parent=parent,
            shared_tokens=0 if parent is None else parent.total_tokens,
            context=pack_ids([7]),
            context_tokens=1 + (0 if parent is None else parent.total_tokens),
            sampling=Sampling(),
            part=TurnPart(
                sequence=turn.sequence,
                protocol="chat_completions",
                body_digest=turn.body_digest,
                ordinal=turn.ordinal,
            ),
        )
        is_refused = self.happens(0.03)

        def finish() -> None:
            if self.attempts is not attempts:  # The process that prepared it is gone.
                return
            if is_refused:
                self.apply(attempts.refuse(episode, turn, invalid("no", param=None)))
            else:
                self.apply(attempts.dispatch(episode, turn, prepared, at=self.at))

        self.later(0, PREPARATION_MS_MAX, finish)

    # Engines.

    def heartbeat(self, engine: Engine) -> None:
        if not engine.is_alive:
            return
        self.later(800, 1200, lambda: self.heartbeat(engine))
        if self.now_ms < engine.silent_until_ms or self.happens(0.1):
            return
        record = ReportedEngine(
            lane=engine.lane,
            epoch=engine.epoch,
            url="",
            is_serving=self.now_ms >= engine.loading_until_ms,
            lineage=1,
            version=engine.version,
            running=0,
            queued=0,
            reported_ms=self.now_ms,
        )
        self.later(0, 4000 if self.happens(0.1) else 50, lambda: self.report(record))

    def report(self, record: ReportedEngine) -> None:
        heard = self.heard.get(record.lane)
        if heard is None or record.epoch >= heard.epoch:
            self.heard[record.lane] = Heard(record.epoch, self.now_ms, record.is_serving)
            self.reports[record.lane] = record
        effects = self.attempts.take_report(record, heard_s=self.at.now_s, at=self.at)
        self.apply(effects)

    def fail_engine(self, engine: Engine) -> None:
        """It dies, is cut off, loads weights, or is replaced while it still works."""
        kind = self.random.choice(("dies", "is silent", "loads", "is replaced"))
        if kind == "is silent":
            engine.silent_until_ms = self.now_ms + self.random.randint(2000, 15_000)
            return
        if kind == "loads":
            engine.loading_until_ms = self.now_ms + self.random.randint(500, 4000)
            return
        if kind == "dies":
            engine.is_alive = False
        self.zombies = [*self.zombies[-3:], engine]
        successor = Engine(lane=engine.lane, epoch=engine.epoch + 1)
        self.engines[engine.lane] = successor
        self.later(500, 9000, lambda: self.heartbeat(successor))

    def take(self, engine: Engine, record: RequestedCompletion) -> None:
        if not engine.is_alive or (record.lane, record.epoch) != (engine.lane, engine.epoch):
            return
        lost = record.is_delta and record.parent_id not in engine.known
        failure: FailureKind | None = "context_missing" if lost else None
        if self.happens(0.15):
            failure = self.random.choice(("engine", "engine", "engine", "context_overflow"))
        took_ms = self.random.choice((100, 800, 3000, 9000 if self.has_faults else 3000))
        self.after(0 if failure else took_ms, lambda: self.finish(engine, record, failure))

    def cancel(self, engine: Engine, record: CancelledCompletion) -> None:
        engine.cancelled[record.request_id] = record.attempt

    def finish(
        self, engine: Engine, asked: RequestedCompletion, failure: FailureKind | None
    ) -> None:
        if not engine.is_alive:
            return
        if engine.cancelled.get(asked.request_id, -1) >= asked.attempt:
            failure = "cancelled"
        elif failure is None and self.now_ms >= asked.deadline_ms:
            failure = "deadline"
        if failure is None:
            engine.known.add(asked.request_id)
        own = asked.context if asked.is_delta else asked.context[asked.shared_prefix_tokens * 4 :]
        record = FinishedCompletion(
            request_id=asked.request_id,
            attempt=asked.attempt,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            lane=engine.lane,
            epoch=engine.epoch,
            finish_reason="stop" if failure is None else "error",
            turn=asked.turn,
            parent_id=asked.parent_id,
            shared_prefix_tokens=asked.shared_prefix_tokens,
            context=own,
            output=pack_ids([9, 9] if failure is None else []),
            logprobs=pack_floats([-0.5, -0.5] if failure is None else []),
            failure=failure,
        )
        for _ in range(2 if self.happens(0.1) else 1):
            self.finished_log.append(record)
            self.later(5, 2000 if self.happens(0.1) else 100, self.read)

    def read(self) -> None:
        """Read the log in its order, up to its end."""
        while self.read_offset < len(self.finished_log):
            offset, record = self.read_offset, self.finished_log[self.read_offset]
            self.read_offset += 1
            result = self.registry.apply_finished_completion(
                record, offset=offset, finished_ms=self.now_ms, parse=parse
            )
            if result is None:
                continue
            newest = self.requested[record.request_id].attempt
            if record.attempt == newest:
                self.excused.add(record.request_id)
            answers = self.answers
            waiting = bool(self.waiting_for(record.request_id))
            self.apply(self.attempts.take_result(result, at=self.at))
            if is_candidate(record):
                assert record.request_id in result.episode.history.completions
                assert self.answers - answers == waiting, "a result is lost"
