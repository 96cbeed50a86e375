"""Memory of the trainer's ranks: what the model's state takes, and what it leaves for a step."""

from msgspec import Struct

from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.trainer_plan import PlannedModel
from forgemq_launcher.core.trainer_place import GPU_SHARE, memory_budget_bytes
from forgemq_launcher.plan.host_memory import VALUE_BYTES, WIDE_BYTES, memory_of
from forgemq_launcher.plan.machines import Machines

GATHERED_LAYERS = 2
"""That a rank holds whole at once: the one that runs, and the next, which is gathered beside it."""


class TrainerMemory(Struct, frozen=True, kw_only=True):
    """Of one rank.

    Attributes:
        ranks: Of the trainer.
        shard_ranks: Of them that hold the model's state once.
        device: That they compute on.
        device_bytes: Of that device; on a CPU the node's memory, which all ranks share.
        state_bytes: Weights, masters, gradients and moments: its part of them.
        reference_bytes: Its part of the model of `loss.reference_weight`.
        head_bytes: A draft head that trains, with its gradients and moments.
        gathered_bytes: Layers and embedding that it gathers; outside the budget.
        spare_bytes: That the budget leaves for these and for the driver.
        budget_bytes: For activations, keys, values and their gradients.
        is_budget_named: The run's file says the budget; else it is what `forgemq run` finds.
    """

    ranks: int
    shard_ranks: int
    device: str
    device_bytes: int
    state_bytes: int
    reference_bytes: int
    head_bytes: int
    gathered_bytes: int
    spare_bytes: int
    budget_bytes: int
    is_budget_named: bool


def trainer_memory(
    configuration: RunConfiguration,
    model: PlannedModel,
    machines: Machines,
    *,
    is_budget_named: bool,
) -> TrainerMemory:
    """What a rank holds on these machines.

    Args:
        configuration: As the file has it; its budget counts only if the file names one.
        model: Its sizes.
        machines: That the run is planned for.
        is_budget_named: The file names the budget.
    """
    trainer, dtype = configuration.trainer, configuration.model.dtype
    shard_ranks = shard_ranks_of(trainer)
    gpu = machines.device
    free_bytes = machines.host_bytes if gpu is None else gpu.memory_bytes
    memory = memory_of(configuration, model, free_bytes=free_bytes, has_gpu=gpu is not None)
    found = memory_budget_bytes(
        memory,
        device="cpu" if gpu is None else "cuda",
        ranks=trainer.world_size,
        shard_ranks=shard_ranks,
        dtype=dtype,
        usual_bytes=trainer.memory_budget_bytes,
    )
    return TrainerMemory(
        ranks=trainer.world_size,
        shard_ranks=shard_ranks,
        device=machines.gpu,
        device_bytes=free_bytes,
        state_bytes=memory.state_bytes(dtype) // shard_ranks,
        reference_bytes=memory.reference_bytes(dtype) // shard_ranks,
        head_bytes=memory.head_bytes(dtype),
        gathered_bytes=_gathered_bytes(model, dtype, expert_ranks=trainer.expert_ranks)
        if trainer.world_size > 1
        else 0,
        spare_bytes=0 if gpu is None else free_bytes - int(GPU_SHARE * free_bytes),
        budget_bytes=trainer.memory_budget_bytes if is_budget_named else found,
        is_budget_named=is_budget_named,
    )


def _gathered_bytes(model: PlannedModel, dtype: str, *, expert_ranks: int) -> int:
    """Most bytes of whole parameters and gradients that a rank holds beside its part.

    Of a layer's experts it gathers those that it computes with.
    """
    value_bytes = VALUE_BYTES[dtype]
    elsewhere = model.layer_experts_max - model.layer_experts_max // expert_ranks
    layers = GATHERED_LAYERS * (model.layer_max - elsewhere) * value_bytes
    trained = model.layer_trained - (0 if model.adapters else elsewhere)
    gradients = trained * (value_bytes + WIDE_BYTES)
    return layers + gradients + model.embedding * value_bytes
