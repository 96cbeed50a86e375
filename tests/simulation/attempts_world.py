"""The gateway's policy of attempts among lanes that die, a log that is late, clients that leave.

The world is seeded: a failing seed is the whole reproduction. It knows what every party did, so it
checks each effect of the policy at once: that a waiting client gets one result, that an attempt
moves only for a reason, that no result is lost.
"""

from functools import partial

from forgemq_contracts.accounting import is_candidate
from forgemq_contracts.completions import (
    CancelledCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.episodes import OpenedEpisode
from forgemq_contracts.groups import AdmittedGroup, RetiredGroup
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.attempts import DEADLINE_GRACE_MS, ENGINE_ERRORS_MAX, Attempts, Moment
from forgemq_gateway.core.circuits import PAUSE_S_MAX
from forgemq_gateway.core.effects import (
    AnswerTurn,
    CancelAttempt,
    Effects,
    FailTurn,
    ReportCircuit,
    ReportFailure,
    SendAttempt,
)
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import RefusedError, gone, invalid
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.registry import Registry
from forgemq_gateway.core.turns import OpenTurn
from tests.simulation.attempts_engines import Calendar, Engines
from tests.simulation.attempts_hearing import Hearing
from tests.simulation.attempts_records import (
    Client,
    admitted_group,
    opened_episode,
    parse,
    prepared_turn,
)

DEADLINE_MS = 20_000
HOLD_S = 3.0
PREPARATION_MS_MAX = 2000
TICK_MS = 250


class World:
    """Everything around the policy; time is virtual milliseconds."""

    def __init__(self, seed: int, *, lanes: int, has_faults: bool = True) -> None:
        self.calendar = Calendar(seed, has_faults=has_faults)
        self.random, self.later = self.calendar.random, self.calendar.later
        self.happens = self.calendar.happens
        self.engines = Engines(
            self.calendar, lanes=lanes, on_report=self.report, on_finished=self.on_finished
        )
        self.clients: list[Client] = []
        self.groups: list[AdmittedGroup] = []
        self.opened: list[OpenedEpisode] = []
        self.retired: list[RetiredGroup] = []
        self.requested: dict[str, RequestedCompletion] = {}
        self.requested_log: list[RequestedCompletion] = []
        self.cancelled_log: list[CancelledCompletion] = []
        self.finished_log: list[FinishedCompletion] = []
        self.hearing = Hearing()
        self.excused: set[str] = set()
        self.answers = self.refusals = self.moves = self.circuits = 0
        self.start()
        self.engines.start()
        for _ in range(3):
            self.open_group()
        self.calendar.after(0, self.tick)

    def run(self, *, until_s: int) -> None:
        self.calendar.run(until_s=until_s, check=self.check)

    def check(self) -> None:
        self.attempts._check()
        self.check_lanes()

    now_ms = property(lambda self: self.calendar.now_ms)

    @property
    def at(self) -> Moment:
        return Moment(now_s=self.now_ms / 1000, wall_ms=self.now_ms)

    # The gateway.

    def start(self) -> None:
        """A gateway that knows the log and nothing else, as `Feed.restore` reads it."""
        self.registry = Registry()
        self.attempts = Attempts(Lanes(), lane_hold_s=HOLD_S)
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
        self.hearing.note_restart()
        for heard in self.hearing.lanes.values():
            self.attempts.restore_lane(heard.report, heard_s=heard.at_ms / 1000)
        self.attempts.restore(self.registry.take_restored_turns())
        self.read_offset = len(self.finished_log)
        self.check_restored()

    def restart(self) -> None:
        self.start()
        self.excused = {
            request_id
            for request_id, record in self.requested.items()
            if (request_id, record.attempt) in self.ended_attempts()
        }
        for client in self.clients:
            if client.waits_for is not None:
                client.waits_for = client.turn = None
                self.later(0, 2000, partial(self.ask, client))

    def tick(self) -> None:
        self.apply(self.attempts.tick(self.at))
        self.check_moved()
        longest_ms = DEADLINE_MS + DEADLINE_GRACE_MS + PREPARATION_MS_MAX + 2 * TICK_MS
        for client in self.clients:
            if client.waits_for is not None:
                waited_ms = self.now_ms - self.joined_ms[client.waits_for]
                assert waited_ms <= longest_ms + HOLD_S * 1000, "a client waits past its deadline"
        if self.happens(0.004):
            self.restart()
        if self.happens(0.01):
            self.engines.fail_one()
        if self.happens(0.004):
            self.retire_group()
        self.calendar.after(TICK_MS, self.tick)

    def apply(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case SendAttempt(record):
                    self.check_sent(record)
                    self.on_sent(record)
                case CancelAttempt(record):
                    assert record.attempt == self.requested[record.request_id].attempt
                    if self.is_held(record.lane, self.requested[record.request_id].epoch):
                        assert not self.waiting_for(record.request_id), "cancelled under a client"
                    self.on_cancelled(record)
                case AnswerTurn(completion):
                    self.on_answered(completion)
                case FailTurn(request_id, error):
                    self.on_failed(request_id, error)
                case ReportFailure(request_id, failure):
                    assert self.waiting_for(request_id), "a failure is reported of an idle turn"
                    self.errors[request_id] = self.errors.get(request_id, 0) + (failure == "engine")
                case ReportCircuit(lane, pause_s):
                    assert lane in self.hearing.lanes
                    self.circuits += 0 < pause_s <= PAUSE_S_MAX
        assert all(count < ENGINE_ERRORS_MAX for count in self.errors.values()), "too many tries"

    def on_sent(self, record: RequestedCompletion) -> None:
        self.requested[record.request_id] = record
        self.requested_log.append(record)
        self.excused.discard(record.request_id)
        self.engines.send(record)

    def on_cancelled(self, record: CancelledCompletion) -> None:
        self.cancelled_log.append(record)
        self.excused.add(record.request_id)
        self.engines.send_cancel(record)

    def on_answered(self, completion: KnownCompletion) -> None:
        self.answers += 1
        completion.echoed = True
        for client in self.let_hear(completion.request_id):
            client.parent_id, client.number = completion.request_id, client.number + 1
            episode = self.episode_of(client)
            assert episode is not None
            episode.delivered.add(completion.request_id)

    def on_failed(self, request_id: str, error: RefusedError) -> None:
        self.refusals += 1
        self.errors.pop(request_id, None)
        if error.status == 504:  # The lane itself stops at the deadline.
            self.excused.add(request_id)
        for client in self.let_hear(request_id):
            if error.status == 400:  # This body is refused each time; ask for another.
                client.number += 1

    def let_hear(self, request_id: str) -> list[Client]:
        """The clients that get their result now; each goes on a while later."""
        clients = self.waiting_for(request_id)
        assert clients, f"{request_id} ends and no client waits for it"
        for client in clients:
            client.waits_for = client.turn = None
            self.later(10, 3000, partial(self.ask, client))
        return clients

    def waiting_for(self, request_id: str) -> list[Client]:
        return [client for client in self.clients if client.waits_for == request_id]

    # What must hold.

    def check_sent(self, record: RequestedCompletion) -> None:
        """An attempt goes to a live lane, for a client, and only if the previous one is over."""
        assert self.waiting_for(record.request_id), "sent with no client waiting"
        is_live = self.hearing.is_live(record.lane, record.epoch, now_ms=self.now_ms)
        assert is_live, "sent to a lane that is not live"
        assert self.now_ms <= record.deadline_ms + DEADLINE_GRACE_MS, "sent past its deadline"
        previous = self.requested.get(record.request_id)
        if previous is None:
            assert record.attempt == 0
            return
        assert record.attempt == previous.attempt + 1, "attempts are numbered without gaps"
        has_lost_lane = not self.is_held(previous.lane, previous.epoch)
        assert has_lost_lane or record.request_id in self.excused, "moved without a reason"
        self.moves += 1

    def check_moved(self) -> None:
        """After a tick no client's attempt is on a lost lane, unless no lane takes requests."""
        if all(self.is_open(lane) for lane in self.hearing.lanes):
            return
        for client in self.clients:
            turn = client.turn
            # A turn that an engine failed is on no lane while it pauses or all circuits are open.
            if turn is not None and turn.sent and turn.lane >= 0:
                assert self.is_held(turn.lane, turn.epoch), "left on a lane that is lost"

    def check_restored(self) -> None:
        """An attempt that the log says has ended is on no lane after a restart."""
        ended = self.ended_attempts()
        for _, episode in self.registry.episodes():
            for turn in episode.turns.values():
                is_over = (turn.request_id, turn.sent - 1) in ended
                assert not is_over or turn.lane < 0, "restored on a lane that has ended it"

    def ended_attempts(self) -> set[tuple[str, int]]:
        return {(r.request_id, r.attempt) for r in (*self.cancelled_log, *self.finished_log)}

    def check_lanes(self) -> None:
        """What the lanes count in flight is what turns are on them."""
        count: dict[int, int] = {}
        for _, episode in self.registry.episodes():
            for turn in episode.turns.values():
                heard = self.hearing.lanes.get(turn.lane)
                if heard is not None and heard.report.epoch == turn.epoch:
                    count[turn.lane] = count.get(turn.lane, 0) + 1
        assert {n: c for n, c in self.attempts.in_flight().items() if c} == count

    def is_held(self, lane: int, epoch: int) -> bool:
        return self.hearing.holds(lane, epoch, now_ms=self.now_ms)

    def is_open(self, lane: int) -> bool:
        """Whether this lane is dead, or takes nothing because its engine failed."""
        epoch, circuits = self.hearing.epoch(lane), self.attempts._lanes.circuits
        takes = circuits.takes_requests(lane, epoch, now_s=self.at.now_s)
        return not (self.hearing.is_live(lane, epoch, now_ms=self.now_ms) and takes)

    # Clients.

    def open_group(self) -> None:
        group_id = f"g-{len(self.groups)}"
        admitted = admitted_group(group_id, number=len(self.groups))
        opened = opened_episode(group_id)
        self.groups.append(admitted)
        self.opened.append(opened)
        self.registry.apply_admitted_group(admitted)
        self.registry.apply_opened_episode(opened, lease_until_s=0.0)
        # Two clients of one name send the same bodies: they share turns.
        for name in ("a", "b", "b"):
            client = Client(group_id=group_id, name=name)
            self.clients.append(client)
            self.later(0, 3000, partial(self.ask, client))

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
        known = episode.known([body])[0]
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
            knows_parent = client.parent_id in episode.history.completions
            parent_id = client.parent_id if knows_parent else None
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
        prepared = prepared_turn(turn, parent=parent)
        is_refused = self.happens(0.03)

        def finish() -> None:
            if self.attempts is not attempts:  # The process that prepared it is gone.
                return
            if is_refused:
                self.apply(attempts.refuse(episode, turn, invalid("no", param=None)))
            else:
                self.apply(attempts.dispatch(episode, turn, prepared, at=self.at))

        self.later(0, PREPARATION_MS_MAX, finish)

    # Lanes.

    def report(self, record: ReportedEngine) -> None:
        self.hearing.note(record, at_ms=self.now_ms)
        effects = self.attempts.take_report(record, heard_s=self.at.now_s, at=self.at)
        self.apply(effects)

    def on_finished(self, record: FinishedCompletion) -> None:
        """It is on the log; the gateway reads it now or a while later."""
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
