"""What a run takes of its machines besides GPUs: memory and disks of the trainer's node."""

from msgspec import Struct

from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trainer_plan import PlannedModel
from forgemq_launcher.core.trainer_place import Memory, frozen_copies
from forgemq_launcher.plan.engine_memory import FP8_BLOCK_BYTES

WEIGHTS_KEPT_MIN = 4
"""Versions of which the trainer keeps a durable copy, if `checkpoints_kept` is not more."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
WIDE_BYTES = 4
"""Of a parameter as the ranks read it; of a master, of a gradient and of a moment."""
SERVICES_BYTES = 7_000_000_000
"""Of the broker, the services and an engine's own processes: what `forgemq run` asks a machine to
have free (FORGEMQ_LAUNCHER_MEMORY_MIN_BYTES)."""


class HostMemory(Struct, frozen=True, kw_only=True):
    """Of the node with the trainer's first rank.

    Attributes:
        ranks: Of the trainer on this node.
        loading_bytes: Memory while the ranks load the model.
        saving_bytes: Memory while the first rank writes a checkpoint.
        services_bytes: Memory of everything besides trainer and GPUs.
        weights_bytes: One published version with its draft head, on a disk.
        checkpoint_bytes: One checkpoint with the optimizer's state, on a disk.
        disk_bytes: All versions and checkpoints that are kept, and one of each that is written.
        log_bytes: Of the log over the whole run, on the broker's disk; blobs of open groups apart.
    """

    ranks: int
    loading_bytes: int
    saving_bytes: int
    services_bytes: int
    weights_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    log_bytes: int

    @property
    def memory_bytes(self) -> int:
        """The most at once: loading is over before the first checkpoint."""
        return self.services_bytes + max(self.loading_bytes, self.saving_bytes)


def host_memory(
    configuration: RunConfiguration,
    model: PlannedModel,
    *,
    ranks: int,
    has_gpu: bool,
    kept_bytes: int,
) -> HostMemory:
    """What the node of the first rank needs.

    Args:
        configuration: Of the run.
        model: Its sizes.
        ranks: Of the trainer on that node.
        has_gpu: The ranks compute on GPUs; else their state is in this memory too.
        kept_bytes: That a step leaves on the log.
    """
    trainer, dtype = configuration.trainer, configuration.model.dtype
    value_bytes = VALUE_BYTES[dtype]
    weights, head = (
        published_bytes(configuration, model),
        published_head_bytes(configuration, model),
    )
    # AdamW's two moments, and masters if the model is narrower than they are.
    trained = model.trained + model.draft_head
    optimizer = trained * (2 * WIDE_BYTES + (WIDE_BYTES if value_bytes < WIDE_BYTES else 0))
    memory = memory_of(configuration, model, free_bytes=0, has_gpu=has_gpu)
    held = memory.rank_bytes(dtype, shard_ranks=shard_ranks_of(trainer))
    own = 0 if has_gpu else held * ranks
    gathered = weights if publishes_adapters(configuration.lora) else weights_bytes(model, dtype)
    budget = 0 if has_gpu else trainer.memory_budget_bytes * ranks
    kept = max(WEIGHTS_KEPT_MIN, trainer.checkpoints_kept)
    checkpoint = trained * value_bytes + optimizer
    return HostMemory(
        ranks=ranks,
        loading_bytes=_loading_bytes(configuration, model, ranks=ranks) + own,
        # The first rank gathers what is published; each writes its state, one tensor at a time.
        saving_bytes=gathered + head + _one_tensor_bytes(model, WIDE_BYTES) + own + budget,
        services_bytes=SERVICES_BYTES,
        weights_bytes=weights + head,
        checkpoint_bytes=checkpoint,
        disk_bytes=(kept + 1) * (weights + head) + (trainer.checkpoints_kept + 1) * checkpoint,
        log_bytes=kept_bytes * trainer.steps,
    )


def memory_of(
    configuration: RunConfiguration, model: PlannedModel, *, free_bytes: int, has_gpu: bool
) -> Memory:
    """What of the model trains, and what is frozen, on a device with so much free memory."""
    copies = frozen_copies(
        configuration.lora,
        device="cuda" if has_gpu else "cpu",
        ranks=configuration.trainer.world_size,
    )
    return Memory(
        free_bytes=free_bytes,
        parameters=model.trained,
        frozen_parameters=copies * model.parameters,
        reference_parameters=model.parameters if configuration.loss.reference_weight else 0,
        head_parameters=model.draft_head,
    )


def _loading_bytes(configuration: RunConfiguration, model: PlannedModel, *, ranks: int) -> int:
    """Memory of a node in which so many ranks load the model, each its part, tensor by tensor."""
    return ranks * _one_tensor_bytes(model, VALUE_BYTES[configuration.model.dtype])


def _one_tensor_bytes(model: PlannedModel, value_bytes: int) -> int:
    """At most so many of the largest tensor: a table of the vocabulary, or a layer's experts."""
    experts = model.layer_max if model.experts_count else 0
    return max(model.embedding, model.head, experts) * value_bytes


def weights_bytes(model: PlannedModel, dtype: str) -> int:
    """Bytes of all weights in this dtype."""
    return model.parameters * VALUE_BYTES[dtype]


def published_bytes(configuration: RunConfiguration, model: PlannedModel) -> int:
    """Bytes of one version of the weights as engines load them."""
    value_bytes = VALUE_BYTES[configuration.model.dtype]
    if publishes_adapters(configuration.lora):
        return model.adapters * value_bytes
    if configuration.model.engine_quantization == "none":
        return weights_bytes(model, configuration.model.dtype)
    projections = model.attention + model.mlp + model.experts
    return int(projections * FP8_BLOCK_BYTES + (model.parameters - projections) * value_bytes)


def published_head_bytes(configuration: RunConfiguration, model: PlannedModel) -> int:
    """Bytes of the draft head that is published with a version; 0 without one."""
    return model.draft_head * VALUE_BYTES[configuration.model.dtype]
