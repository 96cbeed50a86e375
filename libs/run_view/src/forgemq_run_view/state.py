"""The state of a run as the panel and the page show it."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

Position: TypeAlias = Literal[
    "unknown", "waiting", "playing", "complete", "ready", "scheduled", "trained", "retired"
]


class Tally(Struct, frozen=True, kw_only=True):
    """Mean reward parts over episodes that are not masked."""

    episodes: int
    success: Annotated[float, Meta(description="Share with an outcome of at least 0.5.")]
    reward: float
    outcome: float
    speed: float
    process: float


class VersionPoint(Struct, frozen=True, kw_only=True):
    """Training episodes of the groups admitted while this version was the newest.

    A version has a point once half as many episodes have ended as a step trains: the first to end
    are the quick ones. A run's last versions may get none, since open groups are then cancelled.
    """

    version: int
    tally: Tally


class StepPoint(Struct, frozen=True, kw_only=True):
    """What one optimizer step of the surviving lineage measured."""

    step: int
    lineage: int
    time_ms: int
    loss: float
    grad_norm: float
    lr: float
    loss_tokens: int
    tree_tokens: int
    request_tokens: int
    append_tokens: int
    attention_pairs: int
    staleness_max: int
    staleness_bound: Annotated[
        int | None, Meta(description="None until the step's record is read.")
    ]
    logprob_gap_mean: Annotated[
        float | None, Meta(description="Nats; null: the step had no token of the current version.")
    ]
    logprob_gap_p99: float | None
    logprob_gap_max: float | None
    gap_entries: int
    kl_k3: float
    entropy: float
    capped_share: float
    ratio_p99: float
    duration_s: float
    samples: Annotated[int, Meta(description="Scored completions of its groups.")] = 0
    policy_age: Annotated[
        float | None,
        Meta(description="Mean staleness of its groups in steps, weighted by their loss tokens."),
    ] = None
    nll_supervised: Annotated[
        float | None, Meta(description="Of replies that were given, nats; null: it had none.")
    ] = None
    kl_teacher: Annotated[
        float | None, Meta(description="To the teacher of the run, nats; null: it has none.")
    ] = None


class EffectiveYield(Struct, frozen=True, kw_only=True):
    """J and the proxies for what bounds it; None: not measured. See `effective_yield.py`."""

    value: Annotated[float | None, Meta(description="J = tokens_per_s * reward_gain.")]
    tokens_per_s: Annotated[
        float | None, Meta(description="Loss tokens trained, by wall clock, stops included.")
    ]
    reward_gain: Annotated[
        float | None, Meta(description="Reward gained per 1,000 samples, over the whole run.")
    ]
    samples: Annotated[int, Meta(description="Completions that the steps consumed.")]
    reward_slope: Annotated[
        float | None, Meta(description="As reward_gain, over the newest 10 versions.")
    ]
    grad_norm_variance: Annotated[float | None, Meta(description="Of the newest steps.")]
    capped_share: Annotated[float | None, Meta(description="Of the newest steps' loss tokens.")]
    policy_age_steps: Annotated[
        float | None, Meta(description="Mean staleness of the newest steps' groups.")
    ]
    newest_steps: Annotated[int, Meta(description="How many those are: 10 at most.")]


class StepAlarm(Struct, frozen=True, kw_only=True):
    """A metric on the wrong side of its threshold.

    Of a step of the surviving lineage, by the trainer; or the acceptance length under a version,
    which has the number of the step that made it.
    """

    step: int
    lineage: int
    metric: str
    value: float
    threshold: float
    side: Literal["above", "below"] = "above"


class AcceptancePoint(Struct, frozen=True, kw_only=True):
    """Drafted tokens under one version, from completions that it sampled whole."""

    lineage: int
    version: int
    length: Annotated[
        float,
        Meta(description="Tokens that a pass over drafted ones gives; 1: no guess holds."),
    ]
    verifications: Annotated[int, Meta(description="Passes of the policy over drafted tokens.")]


class EvaluationPoint(Struct, frozen=True, kw_only=True):
    """One evaluation round at one temperature; greedy is temperature 0."""

    round_name: str
    is_greedy: bool
    version_min: Annotated[int | None, Meta(description="null: nothing is sampled yet.")]
    version_max: Annotated[int | None, Meta(description="As version_min.")]
    groups: int
    groups_ended: int
    tally: Tally

    @property
    def versions(self) -> str:
        """The weights that sampled it, as `3` or `3-4`; "" if nothing is sampled yet."""
        if self.version_min is None or self.version_min == self.version_max:
            return "" if self.version_min is None else f"{self.version_min}"
        return f"{self.version_min}-{self.version_max}"


class UntrainedDomain(Struct, frozen=True, kw_only=True):
    """Conversations of one domain and source that no policy of the run sampled.

    What they earned is in no other number; the counts of groups have them, too.
    """

    domain: str
    conversations: int
    training: Annotated[int, Meta(description="Of these: of a supervised domain, to train.")] = 0
    ended: Annotated[int, Meta(description="Scored. `tally.episodes` of them have an outcome.")]
    tally: Tally


class WindowPosition(Struct, frozen=True, kw_only=True):
    """One position of a generation queue."""

    queue_index: int
    group_id: str
    position: Position
    is_in_window: bool
    episodes_finished: int
    group_size: int
    reason: str = ""


class QueueState(Struct, frozen=True, kw_only=True):
    """One windowed FIFO: head H, window W, slots N, groups a step P."""

    domain: str
    slots: int
    window: int
    groups_per_step: Annotated[int, Meta(description="Of the step that trains next.")]
    staleness_bound: int
    staleness_limit: int
    head: Annotated[int | None, Meta(description="H; None if nothing is open.")]
    in_flight: Annotated[int, Meta(description="Holding a queue index, not retired.")]
    waiting: Annotated[int, Meta(description="Requested and not admitted.")]
    positions: tuple[WindowPosition, ...]
    staleness: Annotated[
        int,
        Meta(description="Largest of its groups in the newest step that trained any, in steps."),
    ] = 0


class EngineState(Struct, frozen=True, kw_only=True):
    """One lane by its newest report."""

    lane: int
    epoch: int
    url: str
    is_serving: bool
    lineage: int
    version: int
    running: int
    queued: int
    reported_ms: int
    path: Annotated[
        str, Meta(description="How these weights arrived; '' until their own record is read.")
    ] = ""
    paused_s: Annotated[float, Meta(description="Paused for these weights.")] = 0.0


class Activity(Struct, frozen=True, kw_only=True):
    """Records that a service has written to the topics of the view."""

    service: str
    records: int
    last_ms: int


class RatePoint(Struct, frozen=True, kw_only=True):
    """Generated tokens per second over ten seconds."""

    time_ms: int
    tokens_per_s: float


class RetiredCount(Struct, frozen=True, kw_only=True):
    """Groups that were retired for one reason."""

    reason: str
    groups: int


class EndCount(Struct, frozen=True, kw_only=True):
    """Episodes that ended in one way."""

    end: Annotated[
        str, Meta(description="completed, truncated (by a limit of the policy), aborted or failed.")
    ]
    episodes: int


class ForkTotal(Struct, frozen=True, kw_only=True):
    """Requests that did not extend the recorded tokens, for one reason."""

    reason: str
    forks: int
    episodes: Annotated[int, Meta(description="Episodes with at least one.")]
    episodes_share: Annotated[float, Meta(description="Those over all finished episodes.")]
    meaning: Annotated[str, Meta(description="What the reason says about the agent, in a line.")]


class DomainShare(Struct, frozen=True, kw_only=True):
    """A domain's part of each step's groups."""

    domain: str
    share: float


class TrainedGroups(Struct, frozen=True, kw_only=True):
    """Groups of one domain that surviving steps trained at one staleness."""

    domain: str
    staleness: Annotated[int, Meta(description="Steps behind, when it was scheduled.")]
    groups: int


class StageState(Struct, frozen=True, kw_only=True):
    """The stage that the next step belongs to; of a run that is over, its last step's."""

    index: int
    count: Annotated[int, Meta(description="Stages of the run.")]
    from_step: int
    shares: tuple[DomainShare, ...]


StallReason: TypeAlias = Literal[
    "head_group",
    "lane_silent",
    "log_silent",
    "no_lane_with_version",
    "service_lag",
    "service_silent",
    "trainer_without_step",
    "window_full",
]


class Stall(Struct, frozen=True, kw_only=True):
    """What a run that does not go on waits for. See `stall.py`."""

    reason: StallReason
    waits_for: Annotated[str, Meta(description="The group, lanes, service or step, by name.")]
    since_ms: int
    detail: Annotated[str, Meta(description="One sentence for the person who looks.")]


class RunState(Struct, frozen=True, kw_only=True):
    """Everything the panel and the page need, at one moment."""

    run: str
    seed: int
    steps: int
    steps_trained: int
    version: Annotated[int, Meta(description="Newest published version.")]
    started_ms: int
    now_ms: int
    ended: Annotated[str, Meta(description="completed, interrupted, failed or ''.")]
    tokens_generated: int
    tokens_per_s: Annotated[float, Meta(description="Generated, over the last 20 s.")]
    tokens_trained: int
    completions: int
    episodes_finished: int
    episode_ends: tuple[EndCount, ...]
    forks: tuple[ForkTotal, ...]
    groups_admitted: int
    groups_open: int
    retired: tuple[RetiredCount, ...]
    staleness_max: int
    merge_ratio_per_request: float
    merge_ratio_append: float
    logprob_gap_max: Annotated[float | None, Meta(description="Null: nothing was measured.")]
    points: tuple[StepPoint, ...]
    effective_yield: EffectiveYield
    alarms: tuple[StepAlarm, ...]
    acceptance: Annotated[
        tuple[AcceptancePoint, ...], Meta(description="By version; () without speculation.")
    ]
    versions: tuple[VersionPoint, ...]
    rates: tuple[RatePoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    imported: tuple[UntrainedDomain, ...]
    live: tuple[UntrainedDomain, ...]
    queues: tuple[QueueState, ...]
    trained: Annotated[tuple[TrainedGroups, ...], Meta(description="By domain, then staleness.")]
    engines: tuple[EngineState, ...]
    services: tuple[Activity, ...]
    stage: Annotated[StageState | None, Meta(description="None in a run without stages.")] = None
    stall: Annotated[Stall | None, Meta(description="None while the run goes on.")] = None


class GroupRow(Struct, frozen=True, kw_only=True):
    """One group as a list shows it."""

    group_id: str
    domain: str
    purpose: str
    source: str
    queue_index: int | None
    position: Position
    reason: str
    step: int | None
    group_size: int
    completions: int
    truncated: Annotated[int, Meta(description="Episodes that a limit of the policy ended.")]
    success: float | None
