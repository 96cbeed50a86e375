"""Which fields of a run's configuration can work together."""

from collections.abc import Iterator
from itertools import product

import msgspec

from forgemq_contracts.curriculum_rules import check_curricula
from forgemq_contracts.domains import context_tokens_max_of, sampling_of
from forgemq_contracts.environments import environment_of
from forgemq_contracts.episodes import STOP_STRINGS_MAX
from forgemq_contracts.lane_engines import check_lanes
from forgemq_contracts.lane_plan import lanes_limit
from forgemq_contracts.lora_rules import check_lora
from forgemq_contracts.loss import check_loss
from forgemq_contracts.pool import Pool
from forgemq_contracts.queues import played_queues, window_of
from forgemq_contracts.rank_rules import check_ranks, shard_ranks_of
from forgemq_contracts.rules import check_numbers
from forgemq_contracts.run import ENGINE_QUANTIZATIONS, Queue, RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_contracts.stage_rules import check_stages
from forgemq_contracts.supervised_rules import check_supervised


def check(configuration: RunConfiguration) -> None:
    """Refuse a configuration whose fields cannot work together.

    Raises:
        ValueError: Names the field and the rule.
    """
    check_numbers(configuration)
    _check_queues(configuration)
    _check_lane_counts(configuration)
    _check_agents(configuration)
    _check_evaluation(configuration)
    _check_live(configuration)
    _check_sampling(configuration)
    _check_stop_strings(configuration)
    _check_domains(configuration)
    check_stages(configuration)
    check_curricula(configuration)
    check_supervised(configuration)
    _check_pool(configuration.pool)
    _check_speculation(configuration)
    if configuration.lanes:
        check_lanes(configuration.lanes, partitions=configuration.log.lanes)
    _check_tree_limit(configuration)
    check_ranks(configuration.trainer)
    _check_expert_ranks(configuration)
    check_loss(configuration.loss)
    _check_distillation(configuration)
    _check_quantization(configuration)
    check_lora(configuration)


def _check_queues(configuration: RunConfiguration) -> None:
    domains = [queue.domain for queue in configuration.queues]
    if len(set(domains)) != len(domains):
        raise ValueError(f"queues: every domain may have one queue, got {domains}")
    for queue in configuration.queues:
        if queue.slots < queue.groups_per_step and not configuration.stages:
            raise ValueError(
                f"queues.{queue.domain}.slots (N) must be at least groups_per_step (P): "
                f"a step needs P groups in generation, got N={queue.slots} "
                f"P={queue.groups_per_step}"
            )
        if window_of(queue) > queue.slots:
            raise ValueError(
                f"queues.{queue.domain}.window (W) must be at most slots (N), "
                f"got W={window_of(queue)} N={queue.slots}"
            )
        if queue.group_size < 2 and queue.supervised is None:
            raise ValueError(
                f"queues.{queue.domain}.group_size (G) must be at least 2: an advantage compares "
                f"the rollouts of a group, got {queue.group_size}"
            )


def _check_lane_counts(configuration: RunConfiguration) -> None:
    layout = configuration.log
    if lanes_limit(layout) < layout.lanes:
        raise ValueError(
            f"log.lanes_max must be at least log.lanes, got {layout.lanes_max} and {layout.lanes}"
        )


def _check_tree_limit(configuration: RunConfiguration) -> None:
    """Refuse a limit under which one episode that fits the context could be too large a tree."""
    limit = configuration.trainer.tree_tokens_max
    context_tokens_max = configuration.model.context_tokens_max
    if limit is not None and limit < context_tokens_max:
        raise ValueError(
            "trainer.tree_tokens_max must be at least model.context_tokens_max: one episode may be "
            f"that long, got {limit} and {context_tokens_max}"
        )


def _check_expert_ranks(configuration: RunConfiguration) -> None:
    trainer = configuration.trainer
    if trainer.expert_ranks == 1:
        return
    shard_ranks = shard_ranks_of(trainer)
    if shard_ranks % trainer.expert_ranks:
        field = "world_size" if trainer.shard_ranks is None else "shard_ranks"
        raise ValueError(
            f"trainer.expert_ranks must divide trainer.{field}: a token's experts are on ranks of "
            f"one group, got {trainer.expert_ranks} and {shard_ranks}"
        )


def _check_quantization(configuration: RunConfiguration) -> None:
    named = configuration.model.engine_quantization
    if named not in ENGINE_QUANTIZATIONS:
        raise ValueError(
            f"model.engine_quantization must be one of {', '.join(ENGINE_QUANTIZATIONS)}: the "
            f"trainer writes weights in no other format, got {named!r}"
        )


def _check_splits(queue: Queue) -> None:
    for split, file in (("task_split", "task_file"), ("held_out_split", "held_out_file")):
        if getattr(queue, split) and not getattr(queue, file):
            raise ValueError(f"queues.{queue.domain}.{split} must be left out without {file}")


def _check_agents(configuration: RunConfiguration) -> None:
    for queue in configuration.queues:
        if queue.supervised is not None:
            continue
        name, sources = f"queues.{queue.domain}", (queue.task_source, queue.task_file)
        environment = environment_of(queue.agent)
        if environment is not None and any(sources):
            given = "task_source" if queue.task_source else "task_file"
            raise ValueError(
                f"{name}.{given} must be left out if agent is an environment of verifiers: the "
                f"tasks are those of its data set, got {queue.agent!r}"
            )
        if all(sources):
            raise ValueError(f"{name}.task_source must be left out if task_file is given")
        if environment is None and bool(queue.agent) != any(sources):
            given, missing = ("agent", "task_source") if queue.agent else ("task_source", "agent")
            raise ValueError(
                f"{name}.{missing} must be given if {given} is (or a task_file): an agent plays "
                "what its task source makes; without both, groups come by POST /v1/groups"
            )
        if queue.held_out_file and not queue.task_file:
            raise ValueError(f"{name}.held_out_file must be left out if there is no task_file")
        _check_splits(queue)
        if queue.task_file and not queue.held_out_file and configuration.evaluation.tasks:
            raise ValueError(
                f"{name}.held_out_file must be given if evaluation.tasks is above 0: the tasks of "
                f"task_file train, got {configuration.evaluation.tasks}"
            )


def _check_evaluation(configuration: RunConfiguration) -> None:
    evaluation = configuration.evaluation
    if evaluation.tasks and not played_queues(configuration):
        raise ValueError(
            f"evaluation.tasks must be 0 if no queue has an agent, got {evaluation.tasks}: agents "
            "that play from outside ask for held-out groups themselves, by POST /v1/groups with "
            '"purpose": "eval"'
        )
    if evaluation.tasks and not (evaluation.sampled or evaluation.greedy):
        raise ValueError(
            "evaluation.sampled or evaluation.greedy must be true if evaluation.tasks is above 0, "
            f"or nothing would be played, got {evaluation.tasks}"
        )


def _check_live(configuration: RunConfiguration) -> None:
    domains = [queue.domain for queue in configuration.queues]
    for live in configuration.live:
        if live.domain not in domains:
            raise ValueError(
                f"live.{live.name}.domain must be that of a queue, got {live.domain!r} and the "
                f"queues {', '.join(domains)}"
            )
    for field in ("name", "key_sha256"):
        values = [getattr(live, field) for live in configuration.live]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"live.{field}: every key must have its own, got {twice} twice")


def _check_pool(pool: Pool | None) -> None:
    if pool is None:
        return
    foreign = ("extra_config",) if pool.storage == "file" else ("folder", "folder_gb_max")
    for field in foreign:
        if getattr(pool, field):
            raise ValueError(
                f"pool.{field} must be left out if pool.storage is {pool.storage}, "
                f"got {getattr(pool, field)!r}"
            )
    if pool.storage != "file" and not _is_extra_config(pool.extra_config):
        raise ValueError(
            f"pool.extra_config must be a JSON object, or @ and a path, if pool.storage is "
            f"{pool.storage}: it names the servers of the pool; got {pool.extra_config!r}"
        )


def _is_extra_config(text: str) -> bool:
    if text.startswith("@"):
        return len(text) > 1
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _check_domains(configuration: RunConfiguration) -> None:
    """Refuse what a queue sets for its domain and the run cannot give."""
    of_model = configuration.model.context_tokens_max
    for queue in configuration.queues:
        name, domain = f"queues.{queue.domain}", queue.domain
        limit = context_tokens_max_of(configuration, domain=domain)
        if limit > of_model:
            raise ValueError(
                f"{name}.context_tokens_max must be at most model.context_tokens_max, got {limit} "
                f"and {of_model}"
            )
        tokens = sampling_of(configuration, domain=domain).max_tokens
        if (queue.context_tokens_max or queue.sampling) and tokens >= limit:
            raise ValueError(
                f"{name}.context_tokens_max must be above the max_tokens of the domain's sampling, "
                f"got {limit} and {tokens}"
            )


def _check_sampling(configuration: RunConfiguration) -> None:
    sampling = configuration.episodes.sampling
    if sampling.max_tokens >= configuration.model.context_tokens_max:
        raise ValueError(
            "episodes.sampling.max_tokens must be below model.context_tokens_max, got "
            f"{sampling.max_tokens} and {configuration.model.context_tokens_max}"
        )
    full = {
        "temperature": sampling.temperature > 0,
        "top_p": sampling.top_p == 1,
        "top_k": sampling.top_k < 1,
        "frequency_penalty": sampling.frequency_penalty == 0,
        "presence_penalty": sampling.presence_penalty == 0,
    }
    for name, is_full in full.items():
        if not is_full:
            raise ValueError(
                f"episodes.sampling.{name} is {getattr(sampling, name):g}: tokens of a truncated "
                "support are context and not loss (G4), so nothing would train"
            )


def _check_stop_strings(configuration: RunConfiguration) -> None:
    """Refuse what an engine refuses, and the empty text: it ends an output at its first token."""
    for queue, stage in _queues_in_stages(configuration):
        stops = sampling_of(configuration, domain=queue.domain, stage=stage).stop
        if "" in stops or len(stops) > STOP_STRINGS_MAX:
            raise ValueError(
                f"queues.{queue.domain}: sampling.stop must have at most {STOP_STRINGS_MAX} texts, "
                f"none of them empty, got {list(stops)}"
            )


def _queues_in_stages(configuration: RunConfiguration) -> Iterator[tuple[Queue, int | None]]:
    """Each queue before any stage (None), and in each stage."""
    return product(configuration.queues, (None, *range(len(configuration.stages))))


def _check_distillation(configuration: RunConfiguration) -> None:
    if configuration.distillation is None:
        return
    for queue, stage in _queues_in_stages(configuration):
        temperature = sampling_of(configuration, domain=queue.domain, stage=stage).temperature
        if temperature != 1:
            raise ValueError(
                "distillation must be left out if a sampling.temperature is not 1: the teacher's "
                f"log-probabilities are at 1, and queues.{queue.domain} samples at {temperature:g}"
            )


def _check_speculation(configuration: RunConfiguration) -> None:
    speculation = configuration.speculation
    if speculation is None:
        return
    context_tokens_max = configuration.model.context_tokens_max
    if speculation.steps + 1 >= context_tokens_max:
        raise ValueError(
            "speculation.steps must be at least 2 below model.context_tokens_max: the drafted "
            f"tokens and the one before them are read together, got {speculation.steps} and "
            f"{context_tokens_max}"
        )
    if bool(speculation.head) == bool(speculation.model):
        raise ValueError(
            "speculation.head or speculation.model must be given, and not both: one of them "
            f"guesses, got {speculation.head!r} and {speculation.model!r}"
        )
    if speculation.model:
        _check_small_model(speculation)


def _check_small_model(speculation: Speculation) -> None:
    plain = Speculation(model=speculation.model, steps=speculation.steps)
    for field in Speculation.__struct_fields__:
        given = getattr(speculation, field)
        if given != getattr(plain, field):
            raise ValueError(
                f"speculation.{field} must be left out with speculation.model: a small model is "
                f"not trained, got {given}"
            )
