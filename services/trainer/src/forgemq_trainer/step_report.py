"""Reports a trained step to telemetry: one event, metrics, and alarms."""

from forgemq_contracts.steps import TrainedStep, TrainingMetrics
from forgemq_telemetry.telemetry import Telemetry


def report_step(trained: TrainedStep, telemetry: Telemetry, *, saving_s: float) -> None:
    """Write the event `trained`, the step's metrics, and an event for each of its alarms.

    Args:
        trained: The step's record, which was just committed.
        telemetry: Of the trainer.
        saving_s: From the end of its last update until the commit.
    """
    metrics = trained.metrics
    gap = metrics.measured_gap()
    telemetry.event(
        "trained",
        step=trained.step,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        loss_tokens=metrics.loss_tokens,
        logprob_gap_max=gap.max if gap else None,
        duration_s=trained.duration_s,
        saving_s=round(saving_s, 3),
    )
    telemetry.observe("trainer.saving_s", saving_s)
    telemetry.count("trainer.steps")
    telemetry.count("trainer.failed_groups", len(trained.failed_group_ids))
    if metrics.skipped_in_a_row:
        telemetry.count("trainer.skipped_steps")
        telemetry.event("step_skipped", step=trained.step, in_a_row=metrics.skipped_in_a_row)
    telemetry.gauge("trainer.version", trained.step + 1)
    telemetry.observe("trainer.step_s", trained.duration_s)
    _record_metrics(metrics, telemetry)
    for alarm in trained.alarms:
        telemetry.event(
            "alarm",
            step=trained.step,
            metric=alarm.metric,
            value=alarm.value,
            threshold=alarm.threshold,
        )
        telemetry.count("trainer.alarms", metric=alarm.metric)


def _record_metrics(metrics: TrainingMetrics, telemetry: Telemetry) -> None:
    telemetry.count("trainer.tree_tokens", metrics.tree_tokens)
    telemetry.count("trainer.loss_entries", metrics.loss_tokens)
    telemetry.count("trainer.route_disagreements", metrics.route_disagreements)
    telemetry.observe("trainer.forward_backward_s", metrics.forward_backward_s)
    telemetry.gauge("trainer.loss", metrics.loss)
    telemetry.gauge("trainer.grad_norm", metrics.grad_norm)
    telemetry.gauge("trainer.entropy", metrics.entropy)
    telemetry.gauge("trainer.kl_k3", metrics.kl_k3)
    telemetry.gauge("trainer.kl_reference", metrics.kl_reference)
    if metrics.kl_teacher:  # A run without a teacher has no such gauge.
        telemetry.gauge("trainer.kl_teacher", metrics.kl_teacher)
    if metrics.supervised_tokens:  # Nor one of what no step supervises.
        telemetry.gauge("trainer.nll_supervised", metrics.nll_supervised)
    telemetry.gauge("trainer.ratio_p99", metrics.ratio_p99)
    telemetry.gauge("trainer.capped_share", metrics.capped_share)
    gap = metrics.measured_gap()
    if gap is not None:  # A gauge keeps its last value; a step that measured nothing has none.
        telemetry.gauge("trainer.logprob_gap_max", gap.max)
        telemetry.gauge("trainer.logprob_gap_mean", gap.mean)
    telemetry.gauge("trainer.gap_entries", gap.entries if gap else 0)
    telemetry.observe("trainer.probe_s", metrics.probe_s)
    # Of a run without a draft head these are 0, and it has no such gauges.
    if metrics.draft_overlap:
        telemetry.gauge("trainer.draft_loss", metrics.draft_loss)
        telemetry.gauge("trainer.draft_grad_norm", metrics.draft_grad_norm)
        telemetry.gauge("trainer.draft_overlap", metrics.draft_overlap)
    telemetry.gauge("trainer.idle_share", metrics.idle_share)
    telemetry.gauge("trainer.branch_loss", metrics.branch_loss)
    telemetry.gauge("trainer.flop_ratio", metrics.flop_ratio)
    telemetry.gauge("trainer.flop_ratio_weights", metrics.flop_ratio_weights)
    telemetry.gauge("trainer.flop_ratio_attention", metrics.flop_ratio_attention)
    telemetry.gauge("trainer.token_ratio", metrics.request_tokens / max(1, metrics.tree_tokens))
    telemetry.gauge("trainer.append_ratio", metrics.append_tokens / max(1, metrics.tree_tokens))
