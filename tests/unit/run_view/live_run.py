"""A run in virtual time around the real scheduler core, parts of which can be stopped.

Time goes in steps of four seconds: a lane may be silent that long. Each part does what
is due and writes records, as the services would; a part that is stopped does nothing, and the
others wait for it as they would.
"""

import random
from collections.abc import Callable

import msgspec

from forgemq_contracts import topics
from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import FinishedCompletion, TurnPart, WeightSpan
from forgemq_contracts.episodes import FinishedEpisode
from forgemq_contracts.groups import (
    AdmittedGroup,
    EpisodeScore,
    MergedGroup,
    RequestedGroup,
    ScoredGroup,
)
from forgemq_contracts.messages import Message, Tick
from forgemq_contracts.ownership import ReportedGateway
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, StartedRun, Trainer
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_scheduler.core import SchedulerCore
from tests.unit.run_view.synthetic import metrics
from tests.unit.scheduler.scene import opened_episode

DOMAIN = "desk"
GROUP_SIZE = 2
SLOTS = 4
STARTED_MS = 1_000_000
STEP_S = 4

Pace = Callable[[random.Random], int]
"""Seconds until something is done."""


class Paces(msgspec.Struct, frozen=True, kw_only=True):
    """How long each part takes, in seconds."""

    turn: Pace = lambda chance: chance.randint(2, 8)
    turns: Pace = lambda chance: chance.randint(1, 4)
    grading: Pace = lambda chance: chance.randint(1, 3)
    training: Pace = lambda chance: chance.randint(5, 15)


def started(*, steps: int = 10_000) -> StartedRun:
    configuration = RunConfiguration(
        run="r",
        seed=0,
        model=Model(path="/model"),
        queues=(
            Queue(
                domain=DOMAIN,
                task_source="m:f",
                agent="m:g",
                group_size=GROUP_SIZE,
                groups_per_step=2,
                slots=SLOTS,
                window=2,
                group_deadline_s=20_000.0,
            ),
        ),
        trainer=Trainer(steps=steps),
        log=LogLayout(group_partitions=2),
    )
    return StartedRun(run="r", configuration=configuration, blobs="/blobs", started_ms=STARTED_MS)


class LiveRun:
    """A run that goes on, step by step.

    Example: `run = LiveRun(0); run.play(600); run.stopped.add("reward"); run.play(600)`: then
    `run.messages` are those of a run whose reward service died after ten minutes.
    """

    def __init__(self, seed: int, *, paces: Paces | None = None) -> None:
        self.now_s = 0
        self.stopped: set[str] = set()
        self.hung: set[str] = set()  # groups whose episodes never end
        self.is_hung_silent = True
        self.ungraded: set[str] = set()  # groups that the reward service passes over
        self.messages: list[Message] = []
        self._paces = paces or Paces()
        self._chance = random.Random(seed)
        self._core = SchedulerCore(started().configuration)
        self._unread: list[msgspec.Struct] = []  # by the scheduler
        self._offsets: dict[str, int] = {}
        self._requested = 0
        self._admitted: dict[str, AdmittedGroup] = {}
        self._turns: dict[tuple[str, int], tuple[int, int]] = {}  # left, and when the next is due
        self._ended: dict[str, int] = {}  # episodes that have ended, by group
        self._grading: dict[str, int] = {}  # when each is done
        self._scored: list[str] = []
        self._steps: list[ScheduledStep] = []
        self._trained_at_s = 0
        self._weights = (0, 0)
        self._published = (1, 0)

    @property
    def now_ms(self) -> int:
        return STARTED_MS + 1000 * self.now_s

    @property
    def playing(self) -> list[str]:
        """Groups that are played, oldest first."""
        return sorted({group for group, _ in self._turns}, key=lambda g: int(g.split("-")[1]))

    def play(self, seconds: int, *, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(0, seconds, STEP_S):
            self.now_s += STEP_S
            for part in ("lanes", "gateway", "scheduler", "agents", "reward", "merger", "trainer"):
                if part not in self.stopped:
                    getattr(self, f"_do_{part}")()
            each()

    def put(self, topic: topics.Topic, record: msgspec.Struct) -> None:
        offset = self._offsets.get(topic.name, 0)
        self._offsets[topic.name] = offset + 1
        message = Message(
            topic=topic.name,
            partition=0,
            offset=offset,
            timestamp_ms=self.now_ms,
            record=record,
        )
        self.messages.append(message)
        self._unread.append(record)

    def _do_lanes(self) -> None:
        weights = {"lane": 0, "epoch": 1}
        if self._weights != self._published and "loading" not in self.stopped:
            self._weights = self._published
            lineage, version = self._weights
            loaded = LoadedWeights(
                **weights, lineage=lineage, version=version, path="fast", duration_s=1.0
            )
            self.put(topics.LOADED_WEIGHTS, loaded)
        report = ReportedEngine(
            **weights,
            lineage=max(1, self._weights[0]),
            version=self._weights[1],
            url="http://e",
            is_serving=True,
            running=len(self._turns) if "agents" not in self.stopped else 0,
            queued=0,
            reported_ms=self.now_ms,
        )
        self.put(topics.REPORTED_ENGINES, report)

    def _do_gateway(self) -> None:
        report = ReportedGateway(
            run="r", gateway="g", url="http://g", started_ms=STARTED_MS, reported_ms=self.now_ms
        )
        self.put(topics.REPORTED_GATEWAYS, report)

    def _do_scheduler(self) -> None:
        unread, self._unread = self._unread, []
        events: list[Message | Tick] = [
            Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record)
            for record in unread
            if isinstance(
                record, RequestedGroup | MergedGroup | TrainedStep | LoadedWeights | ReportedEngine
            )
        ]
        for event in (*events, Tick(run_ms=1000 * self.now_s)):
            for output in self._core.handle(event):
                self.put(topics.BY_NAME[output.topic], output.record)
                if isinstance(output.record, AdmittedGroup):
                    self._admitted[output.record.group_id] = output.record
                if isinstance(output.record, ScheduledStep):
                    self._steps.append(output.record)

    def _do_agents(self) -> None:
        while self._requested < len(self._admitted) + 2:
            self._requested += 1
            asked = RequestedGroup(
                group_id=f"g-{self._requested}",
                domain=DOMAIN,
                purpose="train",
                group_size=GROUP_SIZE,
                task=b"{}",
                idempotency_key=str(self._requested),
                requested_ms=0,
            )
            self.put(topics.REQUESTED_GROUPS, asked)
        for group_id in self._admitted:
            if group_id not in self._ended:
                self._claim(group_id)
        if not self.stopped & {"lanes", "gateway", "engine"}:
            for key, (left, due_s) in list(self._turns.items()):
                if due_s <= self.now_s:
                    self._take_turn(*key, left=left)

    def _claim(self, group_id: str) -> None:
        self._ended[group_id] = 0
        for index in range(GROUP_SIZE):
            opened = opened_episode(group_id, index=index)
            self._core.handle(
                Message(topic="", partition=0, offset=0, timestamp_ms=0, record=opened)
            )
            turns = self._paces.turns(self._chance)
            self._turns[group_id, index] = (turns, self._next_turn_s())

    def _next_turn_s(self) -> int:
        return self.now_s + self._paces.turn(self._chance)

    def _take_turn(self, group_id: str, index: int, *, left: int) -> None:
        is_hung = group_id in self.hung
        if is_hung and self.is_hung_silent:
            return
        self.put(topics.FINISHED_COMPLETIONS, self._completion(group_id, index))
        if left > 1 or is_hung:
            self._turns[group_id, index] = (left - 1, self._next_turn_s())
            return
        del self._turns[group_id, index]
        self._ended[group_id] += 1
        ended = FinishedEpisode(
            episode_id=f"{group_id}.{index}.0",
            group_id=group_id,
            domain=DOMAIN,
            purpose="train",
            group_size=GROUP_SIZE,
            index=index,
            attempt=0,
            status="completed",
            manifest=(),
            task=b"{}",
        )
        self.put(topics.FINISHED_EPISODES, ended)
        if self._ended[group_id] == GROUP_SIZE:
            self._grading[group_id] = self.now_s + self._paces.grading(self._chance)

    def _completion(self, group_id: str, index: int) -> FinishedCompletion:
        return FinishedCompletion(
            request_id=f"{len(self.messages):032x}",
            attempt=0,
            episode_id=f"{group_id}.{index}.0",
            group_id=group_id,
            lane=0,
            epoch=1,
            finish_reason="stop",
            turn=TurnPart(sequence=0, protocol="chat_completions", body_digest="d"),
            context=pack_ids([7]),
            output=pack_ids([2]),
            logprobs=pack_floats([-0.5]),
            spans=(WeightSpan(start=0, end=1, lineage=1, version=self._weights[1]),),
            engine_s=0.5,
        )

    def _do_reward(self) -> None:
        due = [group for group, due_s in self._grading.items() if due_s <= self.now_s]
        done = [group for group in due if group not in self.ungraded]
        for group_id in done:
            del self._grading[group_id]
            self._scored.append(group_id)
            episode = EpisodeScore(
                episode_id=f"{group_id}.0.0", outcome=1.0, speed=0.0, process=0.0, total=1.0
            )
            scored = ScoredGroup(
                group_id=group_id, domain=DOMAIN, purpose="train", episodes=(episode,)
            )
            self.put(topics.SCORED_GROUPS, scored)

    def _do_merger(self) -> None:
        for group_id in self._scored:
            merged = MergedGroup(
                group_id=group_id,
                domain=DOMAIN,
                purpose="train",
                partition=0,
                tree_sha256="0" * 64,
                version_min=self._admitted[group_id].version_at_admission,
            )
            self.put(topics.MERGED_GROUPS, merged)
        self._scored = []

    def _do_trainer(self) -> None:
        if not self._steps:
            self._trained_at_s = 0
            return
        if not self._trained_at_s:
            self._trained_at_s = self.now_s + self._paces.training(self._chance)
        if self._trained_at_s > self.now_s:
            return
        step, self._trained_at_s = self._steps.pop(0), 0
        trained = TrainedStep(
            step=step.step,
            lineage=1,
            group_ids=tuple(group.group_id for group in step.groups),
            failed_group_ids=(),
            metrics=metrics(),
            checkpoint_step=step.step,
            duration_s=1.0,
            is_last=step.is_last,
        )
        self.put(topics.TRAINED_STEPS, trained)
        self._published = (1, step.step + 1)
        published = PublishedWeights(
            lineage=1, version=step.step + 1, sha256="0" * 64, uri="/w", size_bytes=1
        )
        self.put(topics.PUBLISHED_WEIGHTS, published)
