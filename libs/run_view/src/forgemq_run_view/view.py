"""One run's live state: apply every record, ask for the state when it is shown.

view = RunView(started)
view.apply(message)          # any record of the run, topics in any order
view.state(now_ms=...)       # what the panel and the page show
"""

from forgemq_contracts.messages import Message
from forgemq_contracts.mixture import mixture_of, staleness_bounds, staleness_limits
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.run_ends import is_end_of
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    AUDITED_GROUPS,
    ENDED_RUNS,
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    LOADED_WEIGHTS,
    MERGED_GROUPS,
    PUBLISHED_WEIGHTS,
    REPORTED_ENGINES,
    REPORTED_GATEWAYS,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    SCORED_GROUPS,
    STARTED_RUNS,
    TRAINED_STEPS,
    Topic,
)
from forgemq_run_view.acceptance import AcceptanceBook
from forgemq_run_view.effective_yield import effective_yield
from forgemq_run_view.engines import EngineBook
from forgemq_run_view.groups import GroupBook
from forgemq_run_view.stage import stage_of
from forgemq_run_view.stall import StallWatch
from forgemq_run_view.state import EndCount, GroupRow, QueueState, RetiredCount, RunState
from forgemq_run_view.steps import StepBook

TOPICS: tuple[Topic, ...] = (
    REQUESTED_GROUPS,
    ADMITTED_GROUPS,
    FINISHED_COMPLETIONS,
    FINISHED_EPISODES,
    GRADED_EPISODES,
    SCORED_GROUPS,
    MERGED_GROUPS,
    SCHEDULED_STEPS,
    RETIRED_GROUPS,
    AUDITED_GROUPS,
    TRAINED_STEPS,
    PUBLISHED_WEIGHTS,
    LOADED_WEIGHTS,
    REPORTED_ENGINES,
    REPORTED_GATEWAYS,
    STARTED_RUNS,
    ENDED_RUNS,
)
"""Topics whose records change the state; others need not be read."""


class RunView:
    """The state of one run, built from its records alone."""

    def __init__(self, started: StartedRun) -> None:
        self._started = started
        self._groups = GroupBook()
        self._steps = StepBook()
        self._engines = EngineBook()
        self._acceptance = AcceptanceBook()
        self._stalls = StallWatch(started)
        self.end: EndedRun | None = None
        """How the newest start ended; None while it is up, or if it was killed."""

    def apply(self, message: Message) -> None:
        """Take in one record of this run."""
        match message.record:
            case EndedRun() as ended:
                self.end = ended if is_end_of(ended, self._started) else self.end
                return
            case StartedRun() as started:
                self._take_start(started)
                return
            case _:
                pass
        self._groups.apply(message)
        self._steps.apply(message)
        self._engines.apply(message)
        self._acceptance.apply(message)
        self._stalls.apply(message)

    def _take_start(self, started: StartedRun) -> None:
        """A resume while somebody looks: the run is up again, maybe with other settings."""
        if started.run == self._started.run and started.started_ms > self._started.started_ms:
            self._started, self.end = started, None
            self._stalls.start_again(started)

    @property
    def is_trained(self) -> bool:
        """Whether the last step of the run is trained."""
        return self._steps.count >= self._started.configuration.trainer.steps

    @property
    def groups_open(self) -> int:
        """Groups admitted and not retired."""
        return self._groups.open

    def knows(self, group_id: str) -> bool:
        """Whether any record named this group, and it is not forgotten."""
        return self._groups.knows(group_id)

    def record_offsets(self, group_id: str) -> tuple[tuple[str, int, int], ...]:
        """(topic, partition, offset) of the group's completions, grades, score and imported ends.

        () if they were dropped.
        """
        return self._groups.record_offsets(group_id)

    def rows(self, *, rows_max: int) -> tuple[GroupRow, ...]:
        """The groups that began last, newest first; imports are at most a quarter."""
        return self._groups.rows(rows_max=rows_max)

    def state(self, *, now_ms: int) -> RunState:
        """Everything there is to show at this moment."""
        configuration = self._started.configuration
        points = self._steps.points()
        versions = self._groups.versions(configuration.queues)
        tree_tokens = max(1, sum(point.tree_tokens for point in points))
        return RunState(
            run=self._started.run,
            seed=configuration.seed,
            steps=configuration.trainer.steps,
            steps_trained=len(points),
            version=self._engines.version,
            started_ms=self._started.started_ms,
            now_ms=now_ms,
            ended=self.end.reason if self.end else "",
            tokens_generated=self._engines.tokens_generated,
            tokens_per_s=self._engines.tokens_per_s(now_ms=now_ms),
            tokens_trained=sum(point.loss_tokens for point in points),
            completions=self._engines.completions,
            episodes_finished=self._groups.episodes_finished,
            episode_ends=tuple(
                EndCount(end=end, episodes=episodes)
                for end, episodes in sorted(self._groups.episode_ends.items())
            ),
            forks=self._groups.forks(),
            groups_admitted=self._groups.admitted,
            groups_open=self._groups.open,
            retired=tuple(
                RetiredCount(reason=reason, groups=groups)
                for reason, groups in sorted(self._groups.retired.items())
            ),
            staleness_max=max((point.staleness_max for point in points), default=0),
            merge_ratio_per_request=sum(p.request_tokens for p in points) / tree_tokens,
            merge_ratio_append=sum(p.append_tokens for p in points) / tree_tokens,
            logprob_gap_max=max(
                (p.logprob_gap_max for p in points if p.logprob_gap_max is not None), default=None
            ),
            points=points,
            effective_yield=effective_yield(points, versions),
            alarms=self._steps.alarms() + self._acceptance.alarms(),
            acceptance=self._acceptance.points(),
            versions=versions,
            rates=self._engines.rates(),
            evaluations=self._groups.evaluations(),
            imported=self._groups.untrained("import"),
            live=self._groups.untrained("live"),
            queues=self._queues(step=len(points)),
            trained=self._steps.trained_groups(),
            engines=self._engines.engines(),
            services=self._engines.activity(),
            stage=stage_of(configuration, step=min(len(points), configuration.trainer.steps - 1)),
            stall=None if self.end else self._stalls.stall(now_ms=now_ms),
        )

    def _queues(self, *, step: int) -> tuple[QueueState, ...]:
        """The queues, with what they give to this step."""
        configuration = self._started.configuration
        bounds, limits = staleness_bounds(configuration), staleness_limits(configuration)
        groups = mixture_of(configuration).groups(step)
        staleness = self._steps.staleness()
        return tuple(
            self._groups.queue(
                queue,
                groups=number,
                bound=bounds[queue.domain],
                limit=limits[queue.domain],
                staleness=staleness.get(queue.domain, 0),
            )
            for queue, number in zip(configuration.queues, groups, strict=True)
        )
