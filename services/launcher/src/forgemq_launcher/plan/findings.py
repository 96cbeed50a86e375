"""Why a planned run does not fit its machines, and what else a reader of the plan should know."""

from collections.abc import Iterator

from forgemq_contracts.lane_engines import shapes_of
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.config_fields import fields_of
from forgemq_launcher.core.engine_families import FamilyConfig, check_family, check_format
from forgemq_launcher.core.engine_spread import ModelSizes, check_spread
from forgemq_launcher.core.trainer_place import HOST_SHARE
from forgemq_launcher.placement import gpus_of_engines
from forgemq_launcher.plan.episodes import usual_group
from forgemq_launcher.plan.run_plan import PlannedRun, RunPlan
from forgemq_launcher.plan.trainer_memory import TrainerMemory


def reasons(run: PlannedRun, plan: RunPlan) -> tuple[str, ...]:
    """What does not fit, each with both numbers; () if the run fits."""
    return (
        *_model_reasons(plan),
        *_placement_reasons(run),
        *_trainer_reasons(plan),
        *(_failing_groups(run, plan) if run.episode else ()),
        *_group_reasons(plan),
        *_engine_reasons(run, plan),
        *_family_reasons(run),
        *_host_reasons(run, plan),
    )


def _model_reasons(plan: RunPlan) -> Iterator[str]:
    if plan.step.refusal:
        yield f"the trainer refuses it: {plan.step.refusal}"


def _placement_reasons(run: PlannedRun) -> Iterator[str]:
    machines, configuration = run.machines, run.configuration
    if machines.device is None:
        return
    engines, ranks = gpus_of_engines(configuration), configuration.trainer.world_size
    total = machines.gpus * machines.nodes
    if engines + ranks > total:
        yield (
            f"engines and ranks want {engines} + {ranks} GPUs, the machines have {total}: "
            "log.lanes, lanes.tensor_parallel, trainer.world_size"
        )
    for lane in configuration.lanes:
        for shape in shapes_of(lane):
            if shape.tensor_parallel > machines.gpus:
                yield (
                    f"an engine is on one machine: lanes.tensor_parallel is "
                    f"{shape.tensor_parallel}, a node has {machines.gpus} GPUs"
                )


def _trainer_reasons(plan: RunPlan) -> Iterator[str]:
    memory, step = plan.trainer, plan.step
    held = memory.state_bytes + memory.reference_bytes + memory.head_bytes
    room = memory.device_bytes - memory.spare_bytes
    if not memory.budget_bytes and memory.device == "cpu":
        # Ranks without GPUs share the node's memory: more of them hold as much in all.
        copies = memory.ranks // memory.shard_ranks
        yield (
            f"weights, gradients and moments of {memory.ranks} ranks take "
            f"{size(held * memory.ranks)} of {size(room)} of memory, of which "
            f"{HOST_SHARE:.0%} may be the trainer's: "
            + ("trainer.shard_ranks, or more memory" if copies > 1 else "more memory")
        )
        return
    if not memory.budget_bytes:
        yield (
            f"weights, gradients and moments take {size(held)} of each of {memory.ranks} ranks, "
            f"and there are {size(room)}: more ranks ({_more(memory)}), or GPUs with more memory"
        )
        return
    if memory.reference_bytes and held + memory.budget_bytes > room:
        yield (
            f"with the reference of loss.reference_weight a rank holds {size(held)} beside its "
            f"budget of {size(memory.budget_bytes)}, and there are {size(room)}"
        )
    elif memory.is_budget_named and held + memory.budget_bytes > room:
        yield (
            f"trainer.memory_budget_bytes is {size(memory.budget_bytes)} beside {size(held)} of "
            f"weights, gradients and moments, and there are {size(room)}"
        )
    if memory.device != "cpu" and memory.gathered_bytes > memory.spare_bytes:
        yield (
            f"a rank gathers {size(memory.gathered_bytes)} of layers at once, outside the budget, "
            f"which leaves {size(memory.spare_bytes)} for that"
        )
    if step.least_budget_bytes > memory.budget_bytes:
        yield (
            f"an episode that fills model.context_tokens_max needs a budget of "
            f"{size(step.least_budget_bytes)}, a rank has {size(memory.budget_bytes)}"
        )


def _more(memory: TrainerMemory) -> str:
    """The field that spreads the model's state over more ranks."""
    is_divided = memory.shard_ranks < memory.ranks
    return "trainer.shard_ranks" if is_divided else "trainer.world_size"


def _failing_groups(run: PlannedRun, plan: RunPlan) -> Iterator[str]:
    """Queues whose usual groups never train, since their trees are larger than a tree may be."""
    limit = run.configuration.trainer.tree_tokens_max
    for planned in plan.queues:
        queue = planned.queue
        tokens = usual_group(planned.shape, episodes=queue.group_size).tokens
        if limit is not None and tokens > limit:
            yield (
                f"a group of {queue.group_size} such episodes of {queue.domain} has {tokens:,} "
                f"tokens, and the merger fails one of more than trainer.tree_tokens_max = {limit:,}"
            )


def _group_reasons(plan: RunPlan) -> Iterator[str]:
    if not plan.trainer.budget_bytes:
        return  # The weights alone do not fit: no budget that a file may name helps a group.
    if plan.step.refused_step:
        yield f"a usual group has no plan: {plan.step.refused_step}"
    for group in plan.step.largest:
        if group.refusal:
            yield f"a group of {group.tokens:,} tokens has no plan: {group.refusal}"


def _engine_reasons(run: PlannedRun, plan: RunPlan) -> Iterator[str]:
    context = run.configuration.model.context_tokens_max
    for engine in plan.engines:
        if engine.cached_tokens < context:
            yield (
                f"an engine of {engine.gpus} GPUs has room for {engine.cached_tokens:,} tokens of "
                f"K/V beside {size(engine.weight_bytes)} of weights on each, and an episode may "
                f"have {context:,}: lanes.tensor_parallel, model.engine_quantization"
            )
    has_blocks = run.configuration.model.engine_quantization == "fp8_blocks"
    for lane in run.configuration.lanes:
        for shape in shapes_of(lane):
            try:
                check_spread(shape, fields_of(run.config, ModelSizes), has_blocks=has_blocks)
            except ValueError as error:
                yield str(error)


def _family_reasons(run: PlannedRun) -> Iterator[str]:
    """What `forgemq run` refuses of this family's engines."""
    model, has_gpu = run.configuration.model, run.machines.device is not None
    try:
        family = fields_of(run.config, FamilyConfig)
        check_format(family.model_type, model.engine_quantization)
        check_family(family, context_tokens_max=model.context_tokens_max, has_gpu=has_gpu)
    except ValueError as error:
        yield str(error)


def _host_reasons(run: PlannedRun, plan: RunPlan) -> Iterator[str]:
    host, machines = plan.host, run.machines
    if host.loading_bytes + host.services_bytes > machines.host_bytes:
        yield (
            f"{host.ranks} ranks of a node load {size(host.loading_bytes)} into its memory, beside "
            f"{size(host.services_bytes)} of services; it has {size(machines.host_bytes)}"
        )
    if host.saving_bytes + host.services_bytes > machines.host_bytes:
        yield (
            f"the first rank holds {size(host.saving_bytes)} in memory for a checkpoint, beside "
            f"{size(host.services_bytes)} of services; the node has {size(machines.host_bytes)}"
        )
    if machines.disk_bytes and host.disk_bytes > machines.disk_bytes:
        yield (
            f"weights and checkpoints take {size(host.disk_bytes)} of disk "
            f"(trainer.checkpoints_kept is {run.configuration.trainer.checkpoints_kept}), and "
            f"there are {size(machines.disk_bytes)}"
        )


def notes(run: PlannedRun, plan: RunPlan) -> tuple[str, ...]:
    """What the numbers do not say, in sentences."""
    return tuple(_notes(run, plan))


def _notes(run: PlannedRun, plan: RunPlan) -> Iterator[str]:
    machines, configuration = run.machines, run.configuration
    ranks, engines = configuration.trainer.world_size, gpus_of_engines(configuration)
    if not run.episode:
        yield (
            "no --episode was stated, so the step has episodes of one turn that fill the context; "
            "a group whose episodes have several turns may be larger, as they may share nothing"
        )
        yield from _failing_groups(run, plan)
    if machines.device is None:
        yield "there is no GPU, so engines and seconds are not planned"
    elif ranks > machines.gpus:
        yield (
            f"{ranks} ranks are more than a node's {machines.gpus} GPUs: `forgemq run` starts "
            "ranks on one machine; deploy/kubernetes/overlays/production has a trainer of several"
        )
    elif engines + ranks > machines.gpus:
        yield (
            "the run needs several nodes: `forgemq run` starts all on one machine; "
            "deploy/kubernetes/overlays/production spreads it"
        )
    shards = plan.trainer.shard_ranks
    if ranks > machines.gpus and machines.device is not None and machines.gpus % shards:
        yield (
            f"each {shards} ranks hold the model once (trainer.shard_ranks), which does not divide "
            f"the {machines.gpus} GPUs of a node: weights are gathered between nodes"
        )
    limit = configuration.trainer.tree_tokens_max
    if limit is None and ranks > 1:
        yield "trainer.tree_tokens_max is not given: forks can make groups larger than planned"
    yield from _not_counted(configuration)
    if plan.seconds is not None:
        asked = configuration.episodes.concurrent_max // configuration.log.lanes
        if plan.seconds.decode_batch < asked:
            yield (
                f"episodes.concurrent_max asks for {asked} episodes of each lane, and the K/V of "
                f"{plan.seconds.decode_batch} fit"
            )


def _not_counted(configuration: RunConfiguration) -> Iterator[str]:
    if configuration.speculation is not None:
        yield "what guesses tokens ahead ([speculation]) is not counted on engines"
    if configuration.pool is not None:
        yield (
            "the pool ([pool]) is not counted: it takes host memory beside each engine, by default "
            "up to twice the engine's K/V, and room where it is stored"
        )
    if any(shape.flags for lane in configuration.lanes for shape in shapes_of(lane)):
        yield "lanes.flags are not read: one may change what an engine keeps free"


def size(size_bytes: int) -> str:
    """Bytes for people: in gigabytes, below one in megabytes."""
    if size_bytes < 10**9:
        return f"{size_bytes / 1e6:,.1f} MB"
    return f"{size_bytes / 1e9:,.1f} GB"
