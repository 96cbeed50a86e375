"""The plan of a run: what each part needs of the machines, and what a step writes and takes."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from forgemq_contracts import topics
from forgemq_contracts.domains import context_tokens_max_of
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.trainer_plan import (
    AskedModel,
    AskedStep,
    GroupsOfTree,
    PlanAnswer,
    PlannedModel,
    PlannedStep,
    PlanQuestion,
    RefusedPlan,
)
from forgemq_launcher.plan.engine_memory import EngineMemory, engine_memory
from forgemq_launcher.plan.episode_records import PlannedQueue
from forgemq_launcher.plan.episodes import (
    EpisodesError,
    EpisodeShape,
    GroupTokens,
    episode_of,
    largest_group,
    usual_group,
)
from forgemq_launcher.plan.group_trees import largest_tree, usual_tree
from forgemq_launcher.plan.host_memory import (
    HostMemory,
    host_memory,
    published_bytes,
    published_head_bytes,
)
from forgemq_launcher.plan.log_bytes import TopicBytes, step_bytes
from forgemq_launcher.plan.machines import Machines
from forgemq_launcher.plan.step_seconds import Planned, StepSeconds, step_seconds
from forgemq_launcher.plan.trainer_memory import TrainerMemory, trainer_memory

GROUP_TOKENS_MAX = 10_000_000
"""Of a group's tree. The planner makes it, at 350 bytes a token, and 1 kB more of expert routes."""

Ask = Callable[[PlanQuestion], PlanAnswer]
"""Asks the trainer."""


class PlanError(Exception):
    """The run cannot be planned; the text says why."""


class PlannedRun(Struct, frozen=True, kw_only=True):
    """What is planned.

    Attributes:
        configuration: Of the run.
        config: Bytes of the model's config.json.
        machines: That it is planned for.
        is_budget_named: The run's file says `trainer.memory_budget_bytes`.
        episode: The usual episode as it was stated; "" for the run's limits.
    """

    configuration: RunConfiguration
    config: bytes
    machines: Machines
    is_budget_named: bool
    episode: str = ""


class RunPlan(Struct, frozen=True, kw_only=True):
    """What a run needs.

    Attributes:
        model: Its sizes.
        trainer: Memory of a rank.
        step: What a step costs, and how the largest groups train.
        engines: By kind of lane; () on machines without GPUs.
        host: Memory and disks of the first rank's node.
        log: Bytes of a step by topic.
        seconds: Of a step; None on machines without GPUs, or if the step has no plan.
    """

    model: PlannedModel
    trainer: TrainerMemory
    step: PlannedStep
    queues: tuple[PlannedQueue, ...]
    engines: tuple[EngineMemory, ...]
    host: HostMemory
    log: tuple[TopicBytes, ...]
    seconds: StepSeconds | None


def plan_of(run: PlannedRun, ask: Ask) -> RunPlan:
    """The plan of a run.

    Raises:
        PlanError: nobody knows the model.
        EpisodesError: this run has no such episode.
    """
    shapes = [
        episode_of(run.episode, queue, run.configuration) for queue in run.configuration.queues
    ]
    for shape, queue in zip(shapes, run.configuration.queues, strict=True):
        _check_group(shape, queue, run.configuration)
    model = _model(run, ask)
    queues = tuple(
        PlannedQueue(queue=queue, shape=shape, routes=model.layers * model.experts_per_token)
        for queue, shape in zip(run.configuration.queues, shapes, strict=True)
    )
    trainer = trainer_memory(
        run.configuration, model, run.machines, is_budget_named=run.is_budget_named
    )
    configuration = _with_budget(run.configuration, trainer.budget_bytes)
    step = _step(run, configuration, queues, ask)
    gpu = run.machines.device
    engines = () if gpu is None else engine_memory(configuration, model, gpu)
    weights_bytes = published_bytes(configuration, model)
    head_bytes = published_head_bytes(configuration, model)
    log = step_bytes(queues, configuration, weights_bytes=weights_bytes, head_bytes=head_bytes)
    seconds = None
    if gpu is not None and step.slowest_flops and all(each.cached_tokens for each in engines):
        planned = Planned(
            configuration=configuration,
            model=model,
            step=step,
            queues=queues,
            engines=engines,
            weights_bytes=weights_bytes + head_bytes,
        )
        seconds = step_seconds(planned, run.machines, gpu)
    host = host_memory(
        configuration,
        model,
        ranks=min(trainer.ranks, run.machines.gpus) if gpu else trainer.ranks,
        has_gpu=gpu is not None,
        kept_bytes=sum(each.inline_bytes for each in log if each.is_kept),
    )
    return RunPlan(
        model=model,
        trainer=trainer,
        step=step,
        queues=queues,
        engines=engines,
        host=host,
        log=log,
        seconds=seconds,
    )


def _check_group(shape: EpisodeShape, queue: Queue, configuration: RunConfiguration) -> None:
    """Refuse groups whose trees would fill this machine's memory.

    Raises:
        EpisodesError: names the fields that a group's tokens follow from.
    """
    usual = usual_group(shape, episodes=queue.group_size)
    planned = (usual, *_largest(queue, configuration, turns=shape.turns))
    if (tokens := max(group.tokens for group in planned)) > GROUP_TOKENS_MAX:
        raise EpisodesError(
            f"queues.{queue.domain}: a group of {tokens:,} tokens is not planned, at most "
            f"{GROUP_TOKENS_MAX:,} are: trainer.tree_tokens_max bounds the largest group, and "
            "--episode states a usual one"
        )


def _model(run: PlannedRun, ask: Ask) -> PlannedModel:
    model = ask(
        AskedModel(
            config=run.config,
            lora=run.configuration.lora,
            has_head=trained_head(run.configuration.speculation) is not None,
        )
    )
    if isinstance(model, RefusedPlan):
        raise PlanError(model.reason)
    assert isinstance(model, PlannedModel), "the answer to this question"
    return model


def _with_budget(configuration: RunConfiguration, budget_bytes: int) -> RunConfiguration:
    trainer = msgspec.structs.replace(
        configuration.trainer, memory_budget_bytes=max(1, budget_bytes)
    )
    return msgspec.structs.replace(configuration, trainer=trainer)


def _step(
    run: PlannedRun, configuration: RunConfiguration, queues: Sequence[PlannedQueue], ask: Ask
) -> PlannedStep:
    step = ask(
        AskedStep(
            config=run.config,
            configuration=configuration,
            device="cpu" if run.machines.device is None else "cuda",
            step=tuple(_usual_groups(each) for each in queues),
            largest=tuple(
                topics.encode(largest_tree(tokens))
                for each in queues
                for tokens in largest_groups(each, configuration)
            ),
        )
    )
    if isinstance(step, RefusedPlan):
        return PlannedStep(refusal=step.reason)
    assert isinstance(step, PlannedStep), "the answer to this question"
    return step


def _usual_groups(planned: PlannedQueue) -> GroupsOfTree:
    tree = usual_tree(planned.shape, episodes=planned.queue.group_size)
    return GroupsOfTree(tree=topics.encode(tree), groups=planned.queue.groups_per_step)


def largest_groups(
    planned: PlannedQueue, configuration: RunConfiguration
) -> tuple[GroupTokens, ...]:
    """The largest group that rollouts of this queue make, and one of the most tokens that train."""
    return _largest(planned.queue, configuration, turns=planned.shape.turns)


def _largest(
    queue: Queue, configuration: RunConfiguration, *, turns: int
) -> tuple[GroupTokens, ...]:
    limit = configuration.trainer.tree_tokens_max
    largest = largest_group(queue, configuration, turns=turns)
    if limit is None:
        return (largest,)
    limited = _limited(queue, configuration, limit=limit)
    return (largest, limited) if largest.tokens <= limit else (limited,)


def _limited(queue: Queue, configuration: RunConfiguration, *, limit: int) -> GroupTokens:
    """A group of about `limit` tokens, in the fewest chains that the context allows."""
    context = context_tokens_max_of(configuration, domain=queue.domain)
    chains = -(-limit // context)
    return GroupTokens(shared=0, own=limit // chains, episodes=chains)
