"""Optimizer steps, scheduled and trained."""

from typing import Annotated

from msgspec import Meta, Struct

from forgemq_contracts.fields import (
    DomainName,
    GroupId,
    Lineage,
    Partition,
    Seconds,
    Sha256,
    Step,
    TokenCount,
    Version,
)
from forgemq_contracts.gaps import LogprobGap
from forgemq_contracts.groups import QueueIndex, StageIndex


class ScheduledGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group taken into a step, and where its tree is."""

    group_id: GroupId
    domain: DomainName
    queue_index: QueueIndex
    partition: Annotated[Partition, Meta(description="Of merged-trees.")]
    tree_sha256: Sha256
    tree_tokens: TokenCount
    loss_tokens: TokenCount
    attention_pairs: Annotated[int, Meta(ge=0)]
    version_min: Version
    staleness: Annotated[int, Meta(ge=0, description="Step minus version_min, at least 0.")]
    request_tokens: TokenCount = 0
    append_tokens: TokenCount = 0


class ScheduledStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which groups train in step k, in order. A restarted trainer executes the same step again."""

    step: Step
    groups: Annotated[tuple[ScheduledGroup, ...], Meta(min_length=1)]
    staleness_bound: Annotated[int, Meta(ge=0, description="G3's bound over the step's queues.")]
    is_last: bool = False
    stage: Annotated[
        StageIndex | None, Meta(description="That it belongs to; None in a run without stages.")
    ] = None


class TrainingMetrics(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one optimizer step measured."""

    loss: float
    grad_norm: Annotated[float, Meta(ge=0, description="Before clipping.")]
    lr: Annotated[float, Meta(ge=0)]
    loss_tokens: TokenCount
    tree_tokens: TokenCount
    request_tokens: TokenCount
    append_tokens: TokenCount
    attention_pairs: Annotated[int, Meta(ge=0)]
    ratio_mean: float
    ratio_p99: float
    capped_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of entries at the ratio cap.")
    ]
    logprob_gap_mean: Annotated[
        float, Meta(ge=0, description="Of logprob_gap; means nothing if gap_entries is 0.")
    ]
    logprob_gap_max: Annotated[
        float, Meta(ge=0, description="Of logprob_gap; means nothing if gap_entries is 0.")
    ]
    kl_k3: Annotated[float, Meta(description="k3 estimate of KL(behaviour || policy), nats.")]
    entropy: float
    staleness_max: Annotated[int, Meta(ge=0)]
    forward_backward_s: Seconds
    gap_entries: Annotated[
        int, Meta(ge=0, description="Entries of logprob_gap; 0: nothing was measured.")
    ] = 0
    branch_loss: Annotated[
        float,
        Meta(ge=0, description="Tree tokens / tokens on the path to each episode's last sample."),
    ] = 1.0
    flop_ratio: Annotated[
        float,
        Meta(
            ge=0, description="Operations if each request trained by itself / operations of trees."
        ),
    ] = 1.0
    flop_ratio_weights: Annotated[
        float, Meta(ge=0, description="flop_ratio of the layers' weights alone.")
    ] = 1.0
    flop_ratio_attention: Annotated[
        float, Meta(ge=0, description="flop_ratio of attention alone.")
    ] = 1.0
    route_disagreements: Annotated[
        int,
        Meta(
            ge=0,
            description="Entries whose expert routes differ from those replayed for the token.",
        ),
    ] = 0
    idle_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of all ranks' time in which they wait for the costliest, by the "
            "plan's operations; mean of the updates.",
        ),
    ] = 0.0
    kl_reference: Annotated[
        float,
        Meta(description="k3 estimate of KL(policy || reference), nats; 0 without a reference."),
    ] = 0.0
    skipped_in_a_row: Annotated[
        int,
        Meta(
            ge=0,
            description="Steps up to this one whose gradient was not finite, so that no weight "
            "changed; 0 if this one changed them. grad_norm is 0 then.",
        ),
    ] = 0
    logprob_gap: Annotated[
        LogprobGap | None,
        Meta(
            description="Between trainer and engine on tokens of the current version: those of the "
            "step and of the probe. Null if there was none."
        ),
    ] = None
    probe_s: Annotated[
        Seconds, Meta(description="Forward over fresh completions, for logprob_gap.")
    ] = 0.0
    draft_loss: Annotated[
        float,
        Meta(description="Mean KL of the draft head's guesses, nats; 0 without speculation."),
    ] = 0.0
    draft_grad_norm: Annotated[
        float, Meta(ge=0, description="Of the draft head, before clipping; 0 if not finite.")
    ] = 0.0
    draft_overlap: Annotated[
        float,
        Meta(
            ge=0,
            description="Mean of sum min(p, q) of policy and draft head, before each update: the "
            "share of guesses that exact speculative sampling accepts. 0 without speculation.",
        ),
    ] = 0.0

    kl_teacher: Annotated[
        float,
        Meta(
            description="Mean of log p behaviour - log p teacher over the step's loss tokens: an "
            "estimate of KL(behaviour || teacher), nats. 0 without a teacher."
        ),
    ] = 0.0
    supervised_tokens: Annotated[
        TokenCount, Meta(description="Of loss_tokens: tokens of replies that were given.")
    ] = 0
    nll_supervised: Annotated[
        float,
        Meta(description="Mean of -log p over them before each update, nats; 0 without any."),
    ] = 0.0
    updates: Annotated[
        int,
        Meta(
            ge=0,
            description="Optimizer updates that changed the weights. Of several, loss, grad_norm "
            "and the numbers over entries are means over all of them.",
        ),
    ] = 1
    updates_skipped: Annotated[
        int, Meta(ge=0, description="Updates that changed nothing: no finite gradient.")
    ] = 0

    def measured_gap(self) -> LogprobGap | None:
        """`logprob_gap`; of a record without it, what the record has; None if not measured."""
        if self.logprob_gap is not None or not self.gap_entries:
            return self.logprob_gap
        return LogprobGap(
            entries=self.gap_entries, mean=self.logprob_gap_mean, max=self.logprob_gap_max
        )


class Alarm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A metric of a step above the trainer's threshold for it."""

    metric: Annotated[str, Meta(min_length=1, description="Field of TrainingMetrics.")]
    value: float
    threshold: Annotated[float, Meta(gt=0, description="FORGEMQ_TRAINER_ALARM_<metric>.")]


class TrainedStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Step k is trained and version k + 1 exists; a repeated step changes only the lineage."""

    step: Step
    lineage: Lineage
    group_ids: Annotated[tuple[GroupId, ...], Meta(description="Trained, in order.")]
    failed_group_ids: Annotated[
        tuple[GroupId, ...], Meta(description="Groups whose tree did not load; not trained.")
    ]
    metrics: TrainingMetrics
    checkpoint_step: Annotated[
        int, Meta(ge=-1, description="Newest step in a durable checkpoint; -1 before the first.")
    ]
    duration_s: Seconds
    is_last: bool = False
    alarms: Annotated[
        tuple[Alarm, ...], Meta(description="Metrics above the trainer's thresholds.")
    ] = ()
