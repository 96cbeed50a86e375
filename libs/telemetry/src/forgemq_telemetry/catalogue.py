"""Every metric of the system with its unit and meaning; a misspelt name is a type error.

Exported names have the prefix `forgemq.`; Prometheus shows dots as underscores and appends `_total`
to counters. To add a metric, add its name to the Literal of its kind, and its row below.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Attribute: TypeAlias = str | int | float | bool
"""Value of a field by which a metric is told apart, or that a span or an event carries."""

CounterName: TypeAlias = Literal[
    "transform.records",
    "transform.bad_records",
    "transform.bad_records_skipped",
    "transform.batches",
    "transform.outputs",
    "transform.fenced",
    "transform.snapshots",
    "auditor.groups_audited",
    "auditor.trimmed_records",
    "auditor.blobs_deleted",
    "auditor.deleted_blob_bytes",
    "auditor.swept_bytes",
    "auditor.checks",
    "inference.finished",
    "inference.skipped",
    "inference.output_tokens",
    "inference.context_tokens",
    "inference.cached_tokens",
    "inference.weight_loads",
    "inference.fast_path_failures",
    "inference.wrong_tensors",
    "inference.engine_losses",
    "inference.teacher_failed",
    "reward.episodes_graded",
    "reward.episodes_masked",
    "trainer.steps",
    "trainer.failed_groups",
    "trainer.tree_tokens",
    "trainer.loss_entries",
    "trainer.fast_path_failures",
    "trainer.group_failures",
    "trainer.route_disagreements",
    "trainer.skipped_steps",
    "trainer.alarms",
    "gateway.requests",
    "gateway.bad_records",
    "gateway.refused",
    "gateway.forks",
    "gateway.attempts_failed",
    "gateway.circuits_opened",
    "gateway.redispatched",
    "gateway.cancelled",
    "gateway.groups_requested",
    "gateway.episodes_opened",
    "gateway.episodes_finished",
    "gateway.leases_lapsed",
    "gateway.forwarded",
    "gateway.malformed_calls",
    "gateway.cache_outcomes",
    "gateway.cache_missing_tokens",
    "gateway.cache_extra_tokens",
]
GaugeName: TypeAlias = Literal[
    "auditor.blobs_kept",
    "auditor.kept_blob_bytes",
    "auditor.violations",
    "run.steps_trained",
    "run.success",
    "run.reward",
    "run.episodes_ended",
    "run.groups_open",
    "run.groups_retired",
    "run.groups_trained",
    "run.groups_waiting",
    "run.queue_groups",
    "run.head",
    "run.slots",
    "run.slots_held",
    "run.staleness",
    "run.staleness_limit",
    "run.alarms",
    "run.stalled",
    "transform.tasks",
    "transform.lag_records",
    "transform.snapshot_bytes",
    "inference.running",
    "inference.queued",
    "inference.remembered_bytes",
    "inference.weight_version",
    "inference.acceptance_length",
    "reward.episodes_waiting",
    "trainer.version",
    "trainer.loss",
    "trainer.grad_norm",
    "trainer.entropy",
    "trainer.kl_k3",
    "trainer.kl_reference",
    "trainer.kl_teacher",
    "trainer.nll_supervised",
    "trainer.ratio_p99",
    "trainer.capped_share",
    "trainer.logprob_gap_max",
    "trainer.logprob_gap_mean",
    "trainer.gap_entries",
    "trainer.draft_loss",
    "trainer.draft_grad_norm",
    "trainer.draft_overlap",
    "trainer.idle_share",
    "trainer.branch_loss",
    "trainer.flop_ratio",
    "trainer.flop_ratio_weights",
    "trainer.flop_ratio_attention",
    "trainer.token_ratio",
    "trainer.append_ratio",
    "trainer.changed_share",
    "trainer.delta_bytes",
    "trainer.copied_bytes",
    "gateway.in_flight",
    "gateway.groups",
    "gateway.groups_unclaimed",
    "gateway.episodes_open",
    "gateway.history_bytes",
]
HistogramName: TypeAlias = Literal[
    "transform.batch_s",
    "transform.commit_s",
    "transform.restore_s",
    "inference.queued_s",
    "inference.engine_s",
    "inference.load_s",
    "inference.paused_s",
    "reward.grade_s",
    "trainer.step_s",
    "trainer.forward_backward_s",
    "trainer.probe_s",
    "trainer.saving_s",
    "trainer.transfer_s",
    "gateway.prepare_s",
    "gateway.answer_s",
    "gateway.restore_s",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """Unit and meaning of one metric.

    Attributes:
        unit: In OpenTelemetry's notation: `s`, `By`, `1` or `{thing}`.
        description: One sentence for the person at the dashboard.
    """

    unit: str
    description: str


COUNTERS: dict[CounterName, Metric] = {
    "transform.records": Metric("{record}", "Input records handled by a transform task."),
    "transform.bad_records": Metric("{record}", "Input records sent to a dead letter topic."),
    "transform.bad_records_skipped": Metric(
        "{record}", "Bad input records whose dead letter another service writes."
    ),
    "transform.batches": Metric("{batch}", "Transactions committed by a transform task."),
    "transform.outputs": Metric("{record}", "Records written by a transform task."),
    "transform.fenced": Metric("{task}", "Tasks that stopped because a newer owner exists."),
    "transform.snapshots": Metric("{snapshot}", "Snapshots of a core written to its journal."),
    "auditor.groups_audited": Metric("{group}", "Retired groups compared with their records."),
    "auditor.trimmed_records": Metric(
        "{record}", "Records deleted because no reader needs them, by topic."
    ),
    "auditor.blobs_deleted": Metric("{blob}", "Blobs deleted that no record points at."),
    "auditor.deleted_blob_bytes": Metric("By", "Size of the blobs deleted."),
    "auditor.swept_bytes": Metric(
        "By", "Size of the values that the sweep has looked at, each once, by topic."
    ),
    "auditor.checks": Metric("{check}", "Times that a guarantee was checked, by guarantee."),
    "inference.finished": Metric(
        "{completion}", "Completions written by a lane, by finish reason."
    ),
    "inference.skipped": Metric(
        "{request}", "Requests that a lane skipped: duplicate or other epoch."
    ),
    "inference.output_tokens": Metric("{token}", "Tokens sampled by a lane's engine."),
    "inference.context_tokens": Metric(
        "{token}", "Context tokens of what a lane's engine answered, cached or not."
    ),
    "inference.cached_tokens": Metric(
        "{token}", "Context tokens that an engine did not compute, by tier: where it had them."
    ),
    "inference.weight_loads": Metric("{load}", "New weights in a lane's engine, by path."),
    "inference.fast_path_failures": Metric(
        "{failure}", "Fast paths that failed; the durable copy was loaded instead."
    ),
    "inference.wrong_tensors": Metric(
        "{tensor}", "Tensors that an engine held otherwise than they were sent, by tensor."
    ),
    "inference.engine_losses": Metric("{loss}", "Times a lane's engine stopped answering."),
    "inference.teacher_failed": Metric(
        "{completion}", "Completions about which the teacher did not answer."
    ),
    "reward.episodes_graded": Metric("{episode}", "Episodes graded by the grading loop."),
    "reward.episodes_masked": Metric(
        "{episode}", "Graded episodes that were masked: no reward counts."
    ),
    "trainer.steps": Metric("{step}", "Optimizer steps trained."),
    "trainer.failed_groups": Metric("{group}", "Scheduled groups whose tree could not be trained."),
    "trainer.tree_tokens": Metric("{token}", "Unique tokens trained, after prefix-tree merging."),
    "trainer.loss_entries": Metric("{entry}", "Sampled tokens that carried loss."),
    "trainer.fast_path_failures": Metric(
        "{failure}", "Fast paths to a lane that failed on the trainer's side."
    ),
    "trainer.group_failures": Metric(
        "{failure}", "Process groups of all lanes that some engine did not join."
    ),
    "trainer.route_disagreements": Metric(
        "{entry}", "Loss entries whose expert routes differ from those of the merged token."
    ),
    "trainer.skipped_steps": Metric("{step}", "Steps whose gradient was not finite."),
    "trainer.alarms": Metric("{alarm}", "Metrics of a step above their threshold, by metric."),
    "gateway.requests": Metric(
        "{request}", "Chat requests by how they were answered: fresh, joined or replayed."
    ),
    "gateway.bad_records": Metric("{record}", "Records that did not decode and were skipped."),
    "gateway.refused": Metric("{request}", "Requests refused, by HTTP status and limit."),
    "gateway.forks": Metric(
        "{completion}", "Requests whose messages did not extend the recorded tokens, by reason."
    ),
    "gateway.attempts_failed": Metric("{attempt}", "Attempts that a lane ended with an error."),
    "gateway.circuits_opened": Metric(
        "{pause}", "Times that a lane took no requests because its engine failed, by lane."
    ),
    "gateway.redispatched": Metric(
        "{attempt}", "Requests sent again, to another lane or the same one."
    ),
    "gateway.cancelled": Metric(
        "{request}", "Requests whose client disconnected before the answer."
    ),
    "gateway.groups_requested": Metric("{group}", "Groups asked for by agents."),
    "gateway.episodes_opened": Metric("{episode}", "Episodes claimed by agents, every attempt."),
    "gateway.episodes_finished": Metric("{episode}", "Episodes that ended, by status."),
    "gateway.leases_lapsed": Metric("{episode}", "Leases that ran out."),
    "gateway.forwarded": Metric(
        "{request}", "Requests sent on to the gateway that owns their group."
    ),
    "gateway.malformed_calls": Metric(
        "{call}", "Tool calls of the policy that could not be parsed."
    ),
    "gateway.cache_outcomes": Metric(
        "{completion}",
        "Completions by lane, and by whether its engine had as many context tokens in its cache "
        "`as_expected`, `fewer` or `more`; `other_weights` if it began under other weights than "
        "its lane had when that was chosen: nothing is compared then.",
    ),
    "gateway.cache_missing_tokens": Metric(
        "{token}", "Context tokens that an engine was expected to have in its cache and had not."
    ),
    "gateway.cache_extra_tokens": Metric(
        "{token}", "Context tokens that an engine had in its cache and was not expected to have."
    ),
}
GAUGES: dict[GaugeName, Metric] = {
    "auditor.blobs_kept": Metric("{blob}", "Blobs of the run in its store, at the last sweep."),
    "auditor.kept_blob_bytes": Metric("By", "Size of those blobs."),
    "auditor.violations": Metric(
        "{violation}", "Violations that the newest checks found, by guarantee; at most 21 of each."
    ),
    "run.steps_trained": Metric("{step}", "Steps of the surviving lineage."),
    "run.success": Metric(
        "1", "Share of successful episodes, under the newest version that has one."
    ),
    "run.reward": Metric("1", "Mean reward of the same episodes."),
    "run.episodes_ended": Metric("{episode}", "Episodes that ended, by how."),
    "run.groups_open": Metric("{group}", "Groups admitted and not retired."),
    "run.groups_retired": Metric("{group}", "Groups that are over, by why."),
    "run.groups_trained": Metric(
        "{group}", "Groups that steps trained, by queue and by how many steps stale they were."
    ),
    "run.groups_waiting": Metric("{group}", "Groups requested and not admitted, by queue."),
    "run.queue_groups": Metric("{group}", "Groups of a queue by how far they have come."),
    "run.head": Metric("{group}", "Queue index of the oldest group that no step has taken."),
    "run.slots": Metric("{group}", "Slots of a queue."),
    "run.slots_held": Metric("{group}", "Groups of a queue that are not retired."),
    "run.staleness": Metric(
        "{step}", "Largest staleness in the newest step that trained groups of a queue."
    ),
    "run.staleness_limit": Metric("{step}", "What that staleness may be at most."),
    "run.alarms": Metric("{alarm}", "Alarms of the steps of the surviving lineage, by metric."),
    "run.stalled": Metric(
        "{stall}", "1 if the run does not go on for this reason, else 0; every reason is there."
    ),
    "transform.tasks": Metric("{task}", "Journal partitions this process holds."),
    "transform.lag_records": Metric("{record}", "Input records that a task has not read yet."),
    "transform.snapshot_bytes": Metric("By", "Size of the newest snapshot of a task."),
    "inference.running": Metric("{request}", "Requests in a lane's engine."),
    "inference.queued": Metric("{request}", "Requests that wait for a lane's engine."),
    "inference.remembered_bytes": Metric(
        "By", "Token ids that a lane keeps of finished completions."
    ),
    "inference.weight_version": Metric("{step}", "Version of the weights a lane serves."),
    "inference.acceptance_length": Metric(
        "{token}",
        "Tokens that a pass over drafted ones gives, under a lane's newest weights; 1 if no guess "
        "holds.",
    ),
    "reward.episodes_waiting": Metric(
        "{episode}", "Episodes that are finished and not graded yet."
    ),
    "trainer.version": Metric("{step}", "Version of the newest trained weights."),
    "trainer.loss": Metric("1", "Loss of the newest step."),
    "trainer.grad_norm": Metric("1", "Gradient norm of the newest step, before clipping."),
    "trainer.entropy": Metric("{nat}", "Mean entropy of the policy at the sampled tokens."),
    "trainer.kl_k3": Metric("{nat}", "k3 estimate of KL(behaviour || policy) of the newest step."),
    "trainer.kl_reference": Metric(
        "{nat}", "k3 estimate of KL(policy || reference) of the newest step; 0 without a reference."
    ),
    "trainer.kl_teacher": Metric("{nat}", "Estimate of KL(behaviour || teacher)."),
    "trainer.nll_supervised": Metric("{nat}", "Mean of -log p over replies that were given."),
    "trainer.ratio_p99": Metric("1", "99th percentile of policy / behaviour probability."),
    "trainer.capped_share": Metric(
        "1", "Share of entries whose ratio the loss capped, clipped or masked."
    ),
    "trainer.logprob_gap_max": Metric("{nat}", "Largest |trainer - engine| log-probability."),
    "trainer.logprob_gap_mean": Metric("{nat}", "Mean |trainer - engine| log-probability."),
    "trainer.gap_entries": Metric(
        "{token}", "Tokens whose gap the newest step measured; at 0 the gap is an older step's."
    ),
    "trainer.draft_loss": Metric(
        "{nat}", "Mean KL of the draft head's guesses from the policy, before the newest step."
    ),
    "trainer.draft_grad_norm": Metric("1", "Gradient norm of the draft head, before clipping."),
    "trainer.draft_overlap": Metric(
        "1", "Mean sum min(p, q) of policy and draft head: the share of guesses to be accepted."
    ),
    "trainer.idle_share": Metric("1", "Share of ranks' time in which the plan lets them wait."),
    "trainer.branch_loss": Metric("1", "Tree tokens over those of each episode's last sample."),
    "trainer.flop_ratio": Metric("1", "Operations per request over those of the trees."),
    "trainer.flop_ratio_weights": Metric("1", "trainer.flop_ratio of the weights alone."),
    "trainer.flop_ratio_attention": Metric("1", "trainer.flop_ratio of attention alone."),
    "trainer.token_ratio": Metric("1", "Tokens of all requests over those of the trees."),
    "trainer.append_ratio": Metric("1", "Tokens merged by appending over those of the trees."),
    "trainer.changed_share": Metric(
        "1",
        "Share of the weights' values that the newest step changed, if it was written as a delta.",
    ),
    "trainer.delta_bytes": Metric("By", "Size of the newest delta in the object store."),
    "trainer.copied_bytes": Metric(
        "By", "Memory that the newest broadcast took beside the mapped file, at its most."
    ),
    "gateway.in_flight": Metric("{request}", "Requests in flight, by lane."),
    "gateway.groups": Metric("{group}", "Groups of this gateway that have not retired."),
    "gateway.groups_unclaimed": Metric(
        "{group}", "Admitted groups of this gateway without an episode that an agent has claimed."
    ),
    "gateway.episodes_open": Metric(
        "{episode}",
        "Episodes of this gateway's admitted groups that have not ended, claimed or not, but for "
        "those of live traffic.",
    ),
    "gateway.history_bytes": Metric("By", "Memory of the message histories of open groups."),
}
HISTOGRAMS: dict[HistogramName, Metric] = {
    "transform.batch_s": Metric(
        "s", "From the first record of a batch read until it is committed."
    ),
    "transform.commit_s": Metric("s", "One transaction, from begin to committed."),
    "transform.restore_s": Metric("s", "From a task assigned until its state is restored."),
    "inference.queued_s": Metric("s", "From read by a lane until its engine took the request."),
    "inference.engine_s": Metric("s", "One request in a lane's engine, prefill and decode."),
    "inference.load_s": Metric("s", "Loading new weights, from the decision until they serve."),
    "inference.paused_s": Metric("s", "Time that generation was paused for new weights."),
    "reward.grade_s": Metric("s", "From an episode's transcript to its grade on the log."),
    "trainer.step_s": Metric("s", "One step, from scheduled to durable."),
    "trainer.forward_backward_s": Metric("s", "Time of forward and backward of one step."),
    "trainer.probe_s": Metric("s", "Forward over fresh completions, to measure the gap."),
    "trainer.saving_s": Metric("s", "Time from a step's end until it is durable and recorded."),
    "trainer.transfer_s": Metric("s", "Time of one version's fast path to all lanes."),
    "gateway.prepare_s": Metric(
        "s", "From the body read until the request is on its lane's topic."
    ),
    "gateway.answer_s": Metric("s", "From the body read until the last byte is written."),
    "gateway.restore_s": Metric("s", "Time to rebuild the state from the log at the start."),
}
