"""A plan as lines for a terminal: what does not fit first, then the numbers by part."""

from collections.abc import Iterator

from forgemq_contracts.trainer_plan import PlannedGroup
from forgemq_launcher.plan.findings import size
from forgemq_launcher.plan.report import PlanReport
from forgemq_launcher.plan.run_plan import RunPlan

LABEL = 34
"""Columns of a label."""


def plan_lines(report: PlanReport) -> Iterator[str]:
    """The lines of a plan."""
    machines, plan = report.machines, report.plan
    nodes = f"{machines.nodes} node" + ("s" if machines.nodes > 1 else "")
    on = f"{nodes} of {machines.gpus} {machines.gpu}" if machines.gpus else f"{nodes} without a GPU"
    verdict = "fits" if report.fits else "does not fit"
    yield f"{verdict}: {on}, {size(machines.host_bytes)} of memory"
    for reason in report.reasons:
        yield f"  - {reason}"
    yield ""
    yield from _model(report)
    yield from _trainer(plan)
    yield from _engines(plan)
    yield from _host(plan)
    yield from _log(plan)
    yield from _seconds(report)
    if report.notes:
        yield "notes"
        yield from (f"  - {note}" for note in report.notes)


def _row(label: str, value: str) -> str:
    return f"  {label:<{LABEL}} {value}"


def _model(report: PlanReport) -> Iterator[str]:
    model = report.plan.model
    yield f"model, of {report.config}"
    yield _row("type", f"{model.model_type}, {model.layers} layers")
    active = f", {model.active_parameters / 1e9:.2f} x 10^9 for a token" if model.experts else ""
    yield _row("parameters", f"{model.parameters:,}{active}")
    if model.adapters:
        yield _row("of adapters, which alone train", f"{model.adapters:,}")


def _trainer(plan: RunPlan) -> Iterator[str]:
    memory, step = plan.trainer, plan.step
    yield f"trainer, each of {memory.ranks} ranks of {size(memory.device_bytes)}"
    if memory.shard_ranks < memory.ranks:
        yield _row("ranks that hold the model once", str(memory.shard_ranks))
    yield _row("weights, gradients, moments", size(memory.state_bytes))
    if memory.reference_bytes:
        yield _row("reference", size(memory.reference_bytes))
    if memory.head_bytes:
        yield _row("draft head, gradients, moments", size(memory.head_bytes))
    if memory.gathered_bytes:
        yield _row("gathered layers, outside budget", size(memory.gathered_bytes))
    named = "of the run's file" if memory.is_budget_named else "as forgemq run finds it"
    yield _row("budget", f"{size(memory.budget_bytes)}, {named}")
    if step.refusal:
        return
    yield _row("least budget for a full context", size(step.least_budget_bytes))
    yield _row("keys and values of a token", f"{step.key_bytes_per_token:,} bytes")
    yield _row("largest group whole on a rank", f"{step.whole_tokens:,} tokens")
    for group in step.largest:
        yield _row(f"a group of {group.tokens:,} tokens", _way(group))
    if step.predicted_bytes:
        yield _row("most of the step's groups", size(step.predicted_bytes))
    if memory.ranks > 1:
        yield _row("kept between passes", _KEPT[step.kept])


_KEPT = {
    "nothing": "nothing",
    "head": "the whole head",
    "weights": "all weights",
    "gradients": "all weights and gradients",
}


def _way(group: PlannedGroup) -> str:
    blocks = f"in {group.blocks} blocks of up to {group.block_tokens:,} tokens"
    match group.way:
        case "whole":
            again = f", {group.recomputed_layers} layers recomputed"
            return "whole" + (again if group.recomputed_layers else "")
        case "blocks":
            offloaded = f", keys off the path in host memory: {size(group.stored_bytes)} at most"
            return blocks + (offloaded if group.is_offloaded else "")
        case "shared":
            way = "at once" if group.blocks == 1 else blocks
            offloaded = ", keys off the path in host memory" if group.is_offloaded else ""
            return f"by {group.ranks} ranks together, {way}{offloaded}"
        case "none":
            return "no plan"


def _engines(plan: RunPlan) -> Iterator[str]:
    for engine in plan.engines:
        yield f"engines, {engine.lanes} lanes of {engine.gpus} GPUs"
        yield _row("weights on each GPU", size(engine.weight_bytes))
        yield _row("activations and graphs", size(engine.reserved_bytes))
        yield _row("K/V of a token on a GPU", f"{engine.key_bytes_per_token:,} bytes")
        fit = f"{engine.cached_tokens:,} tokens, {engine.episodes:,} full contexts"
        yield _row("K/V that fits into an engine", fit)


def _host(plan: RunPlan) -> Iterator[str]:
    host = plan.host
    yield "node of the first rank"
    yield _row("memory while loading", size(host.loading_bytes + host.services_bytes))
    yield _row("memory while saving", size(host.saving_bytes + host.services_bytes))
    yield _row("a version of the weights", size(host.weights_bytes))
    yield _row("a checkpoint", size(host.checkpoint_bytes))
    yield _row("weights and checkpoints on disks", size(host.disk_bytes))


def _log(plan: RunPlan) -> Iterator[str]:
    for planned in plan.queues:
        shape = planned.shape
        yield (
            f"log, of a step of {planned.queue.groups_per_step} x {planned.queue.group_size} "
            f"episodes of {planned.queue.domain}: {shape.turns} turns, {shape.prompt:,} tokens of "
            f"prompt, {shape.sampled:,} sampled and {shape.observed:,} observed a turn"
        )
    for topic in plan.log:
        blob = f", and {topic.blob_bytes:,} in blobs" if topic.blob_bytes else ""
        kept = ", kept" if topic.is_kept else ""
        yield f"  {topic.topic:<{LABEL}} {topic.inline_bytes:>14,} bytes{blob}{kept}"
    written = sum(topic.inline_bytes + topic.blob_bytes for topic in plan.log)
    kept_bytes = sum(topic.inline_bytes for topic in plan.log if topic.is_kept)
    yield f"  {'all':<{LABEL}} {written:>14,} bytes, of which {kept_bytes:,} are kept"
    yield _row("kept, all steps", size(plan.host.log_bytes))


def _seconds(report: PlanReport) -> Iterator[str]:
    plan, machines = report.plan, report.machines
    seconds, step = plan.seconds, plan.step
    if seconds is None:
        return
    share = (
        f"{machines.utilisation:.0%} of peak FLOP/s, {machines.bandwidth_share:.0%} of bandwidth"
    )
    yield f"seconds of a step, at {share}"
    yield _row("trainer: forward and backward", f"{seconds.compute_s:,.1f}")
    if step.idle_share:
        yield _row("  of it, ranks wait for others", f"{step.idle_share:.1%}")
    yield _row("trainer: gathers and reductions", _moved(seconds.gather_s, seconds.gathered_bytes))
    exchanged = _moved(seconds.exchange_s, step.exchanged_bytes)
    yield _row("trainer: keys handed over", exchanged)
    if step.travelled_bytes:
        travelled = _moved(seconds.travel_s, step.travelled_bytes)
        yield _row("trainer: tokens to experts and back", travelled)
    yield _row("trainer: optimizer", f"{seconds.update_s:,.2f}")
    yield _row("engines: prefill", f"{seconds.prefill_s:,.1f}")
    batch = f"{seconds.decode_batch} episodes at once in an engine"
    yield _row("engines: decoding", f"{seconds.decode_s:,.1f}, {batch}")
    yield _row("engines: new weights", f"{seconds.publish_s:,.2f}")
    sides = f"trainer {seconds.train_s:,.1f}, engines {seconds.rollout_s:,.1f}, side by side"
    yield _row("a step", f"{seconds.step_s:,.1f}: {sides}")


def _moved(seconds: float, size_bytes: int) -> str:
    return f"{seconds:,.1f}, {size(size_bytes)}"
