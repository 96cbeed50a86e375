"""Where the trainer of a run on one machine computes, and in how much memory."""

from dataclasses import dataclass
from typing import Literal

from forgemq_contracts.lora import Lora, publishes_adapters

STATE_BYTES = {"float32": 16, "bfloat16": 18}
"""Bytes a parameter that the budget does not count: the weights (4; in bfloat16 2, and 4 of their
float32 masters), gradients (4) and AdamW's two moments (8)."""

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter that does not train."""

GPU_SHARE = 0.9
"""Of a GPU's free memory. The rest: the CUDA context, NCCL's buffers, holes between tensors."""

HOST_SHARE = 0.5
"""Of a machine's free memory, which the engine, the broker and eight other services share."""

STEP_BYTES = 100_000_000
"""Budgets are whole multiples: a difference of a few pages makes no other plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was found.

    Attributes:
        free_bytes: Of the GPU with the least, if there are GPUs; else of the machine.
        parameters: That train: the model's, or those of its adapters.
        frozen_parameters: Copies of parameters that do not train, each counted.
        reference_parameters: Of the model of `loss.reference_weight`; 0 without one.
        head_parameters: Of a draft head that trains, which each rank has whole; 0 without one.
    """

    free_bytes: int
    parameters: int
    frozen_parameters: int = 0
    reference_parameters: int = 0
    head_parameters: int = 0

    def state_bytes(self, dtype: Literal["float32", "bfloat16"]) -> int:
        """Of weights, masters, gradients and moments, over the ranks that hold them once."""
        trained = STATE_BYTES[dtype] * self.parameters
        return trained + VALUE_BYTES[dtype] * self.frozen_parameters

    def reference_bytes(self, dtype: Literal["float32", "bfloat16"]) -> int:
        """Of the reference, over the ranks that hold it once."""
        return VALUE_BYTES[dtype] * self.reference_parameters

    def head_bytes(self, dtype: Literal["float32", "bfloat16"]) -> int:
        """Of a draft head with its masters, gradients and moments, on each rank."""
        return STATE_BYTES[dtype] * self.head_parameters

    def rank_bytes(self, dtype: Literal["float32", "bfloat16"], *, shard_ranks: int) -> int:
        """Of one rank, outside its budget, if so many ranks hold model and reference once."""
        shared = self.state_bytes(dtype) + self.reference_bytes(dtype)
        return shared // shard_ranks + self.head_bytes(dtype)


def frozen_copies(lora: Lora | None, *, device: str, ranks: int) -> int:
    """Copies of the model's own weights that do not train, in the memory of the trainer's device.

    A merged version is beside the base model while it is written: one rank makes it on its device,
    of several the first gathers it in host memory.

    Args:
        lora: The run's adapters; None if the model trains.
        device: Of the trainer.
        ranks: Its processes.
    """
    if lora is None:
        return 0
    is_beside = device == "cpu" or ranks == 1
    return 2 if is_beside and not publishes_adapters(lora) else 1


def trainer_device(*, engines: int, gpus: int, ranks: int) -> Literal["cpu", "cuda"]:
    """`cuda` if every engine and every rank gets a GPU of its own, else `cpu`.

    Args:
        engines: GPUs of the engines that this run starts on the machine.
        gpus: That it shows.
        ranks: Processes of the trainer.
    """
    return "cuda" if gpus >= engines + ranks else "cpu"


def memory_budget_bytes(
    memory: Memory,
    *,
    device: str,
    ranks: int,
    shard_ranks: int,
    dtype: Literal["float32", "bfloat16"],
    usual_bytes: int,
) -> int:
    """Bytes for one rank's activations, keys, values and their gradients; 0 if none are left.

    On a GPU all that the state of model, reference and draft head leaves. On a CPU no more than
    usual: nothing is won by taking a machine's whole memory, and others run there too.

    Args:
        memory: Found before the run starts.
        device: Of the trainer.
        ranks: Its processes.
        shard_ranks: Of them that hold the model's state once, each a part.
        dtype: Of the model.
        usual_bytes: The configuration's default.
    """
    held = memory.rank_bytes(dtype, shard_ranks=shard_ranks)
    if device == "cpu":
        left = min(usual_bytes, int(HOST_SHARE * memory.free_bytes) // ranks - held)
    else:
        left = int(GPU_SHARE * memory.free_bytes) - held
    return max(0, left // STEP_BYTES * STEP_BYTES)
