"""About how long a step takes, by a roofline: what is computed or moved over its device's rate.

Nothing waits for anything else than the slowest part, and every device reaches the stated share of
its peak. A run is slower; the parts say which of them bounds it.
"""

from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.lane_engines import every_lane, shapes_of
from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trainer_plan import PlannedModel, PlannedStep
from forgemq_launcher.core.trainer_place import STATE_BYTES
from forgemq_launcher.plan.engine_memory import EngineMemory
from forgemq_launcher.plan.episode_records import PlannedQueue
from forgemq_launcher.plan.machines import Gpu, Machines


class StepSeconds(Struct, frozen=True, kw_only=True):
    """Seconds of the parts of a step.

    Attributes:
        compute_s: Forward and backward of the rank that computes longest.
        gather_s: Weights that ranks gather, gradients that they reduce.
        exchange_s: Keys and values of groups that ranks share.
        travel_s: Tokens go to the ranks of their experts, and back.
        update_s: The optimizer reads and writes its state.
        prefill_s: Engines read contexts.
        decode_s: Engines sample.
        publish_s: New weights reach the engines.
        decode_batch: Episodes that an engine samples for at once.
        gathered_bytes: That a rank sends in a step for shards and replicas of the model.
    """

    compute_s: float
    gather_s: float
    exchange_s: float
    travel_s: float
    update_s: float
    prefill_s: float
    decode_s: float
    publish_s: float
    decode_batch: int
    gathered_bytes: int

    @property
    def train_s(self) -> float:
        """Of the trainer: what it moves is not overlapped with what it computes."""
        moved_s = self.gather_s + self.exchange_s + self.travel_s
        return self.compute_s + moved_s + self.update_s

    @property
    def rollout_s(self) -> float:
        """Of the engines, which stand still while they load weights."""
        return self.prefill_s + self.decode_s + self.publish_s

    @property
    def step_s(self) -> float:
        """Of a step: trainer and engines work side by side."""
        return max(self.train_s, self.rollout_s)


class Planned(Struct, frozen=True, kw_only=True):
    """What seconds follow from."""

    configuration: RunConfiguration
    model: PlannedModel
    step: PlannedStep
    queues: Sequence[PlannedQueue]
    engines: Sequence[EngineMemory]
    weights_bytes: int


def step_seconds(planned: Planned, machines: Machines, gpu: Gpu) -> StepSeconds:
    """The seconds of a step on these machines."""
    configuration, model, step = planned.configuration, planned.model, planned.step
    dtype, ranks = configuration.model.dtype, configuration.trainer.world_size
    share = machines.bandwidth_share
    flops_per_s = gpu.flops[dtype] * machines.utilisation
    shards = shard_ranks_of(configuration.trainer)
    # Ranks are numbered node by node, so a replica is on one node if it divides a node's GPUs.
    has_own_nodes = ranks > machines.gpus
    is_split = has_own_nodes and machines.gpus % shards > 0
    nearby, between = gpu.link_bytes_per_s * share, gpu.network_bytes_per_s * share
    among_all = between if has_own_nodes else nearby
    sharded = step.gathered_bytes + step.reduced_bytes
    # An expert group is a run of ranks, so it is on one node if it divides a node's GPUs.
    is_apart = has_own_nodes and machines.gpus % configuration.trainer.expert_ranks > 0
    # Weights, masters, gradients and moments are read, and all but the gradients written; of a
    # draft head each rank has all of them.
    state = STATE_BYTES[dtype] * (model.trained / shards + model.draft_head)
    batch = decode_batch(planned)
    prefill, decode = _rollout(planned, machines, gpu, batch=batch)
    return StepSeconds(
        compute_s=step.slowest_flops / flops_per_s,
        gather_s=sharded / (between if is_split else nearby) + step.replicated_bytes / among_all,
        exchange_s=step.exchanged_bytes / among_all,
        travel_s=step.travelled_bytes / (between if is_apart else nearby),
        update_s=2 * state / (gpu.memory_bytes_per_s * share),
        prefill_s=prefill,
        decode_s=decode,
        publish_s=planned.weights_bytes / (gpu.network_bytes_per_s * share),
        decode_batch=batch,
        gathered_bytes=sharded + step.replicated_bytes,
    )


def decode_batch(planned: Planned) -> int:
    """Episodes that an engine samples for at once: as asked for, as far as their K/V fit."""
    configuration = planned.configuration
    lanes = configuration.log.lanes
    asked = max(1, configuration.episodes.concurrent_max // lanes)
    longest = max(each.shape.mean_context for each in planned.queues)
    fitting = min(int(engine.cached_tokens // longest) for engine in planned.engines)
    return max(1, min(asked, fitting))


def _rollout(planned: Planned, machines: Machines, gpu: Gpu, *, batch: int) -> tuple[float, float]:
    """Seconds of prefill and of decoding, of all engines side by side."""
    prefilled = sampled = cached = 0.0
    for each in planned.queues:
        shape, groups = each.shape, each.queue.groups_per_step
        episodes = groups * each.queue.group_size
        # Each lane reads a group's prompt once, and its cache has it for the others.
        prompts = groups * min(each.queue.group_size, planned.configuration.log.lanes)
        prefilled += prompts * shape.prompt + episodes * (shape.turns - 1) * shape.observed
        sampled += episodes * shape.turns * shape.sampled
        cached += episodes * shape.turns * shape.sampled * shape.mean_context
    flops_per_s = gpu.flops["bfloat16"] * machines.utilisation
    gpus = sum(_serving_gpus(planned.configuration))
    prefill_s = 2 * planned.model.active_parameters * prefilled / (gpus * flops_per_s)
    # One decoding step of the whole fleet samples a token for each running episode.
    steps = sampled / (batch * planned.configuration.log.lanes)
    seconds = max(
        _decode_step_s(planned, engine, machines, gpu, batch=batch, context=cached / sampled)
        for engine in planned.engines
    )
    return prefill_s, steps * seconds


def _decode_step_s(
    planned: Planned,
    engine: EngineMemory,
    machines: Machines,
    gpu: Gpu,
    *,
    batch: int,
    context: float,
) -> float:
    model = planned.model
    weights = float(engine.weight_bytes)
    if model.experts_count:
        chosen = model.experts_per_token / model.experts_count
        touched = 1 - (1 - chosen) ** batch
        weights *= 1 - model.experts / model.parameters * (1 - touched)
    keys = batch / engine.attention_groups * context * engine.key_bytes_per_token
    memory_s = (weights + keys) / (gpu.memory_bytes_per_s * machines.bandwidth_share)
    flops = 2 * model.active_parameters * batch / engine.gpus
    return max(memory_s, flops / (gpu.flops["bfloat16"] * machines.utilisation))


def _serving_gpus(configuration: RunConfiguration) -> list[int]:
    """GPUs of each lane that read contexts: of a pair those of its prefill engine."""
    if not configuration.lanes:
        return [1] * configuration.log.lanes
    return [shapes_of(lane)[0].tensor_parallel for lane in every_lane(configuration.lanes)]
