"""The model of a trainer with one rank: whole, on one device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.run import RunConfiguration
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.low_rank import factors_of, merge_factors
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.microbatches import plan_step
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.reference import read_forests, read_logprobs, with_references
from forgemq_trainer.core.step import EntryValues, Objective, forward_backward
from forgemq_trainer.core.tree import Floats, Forest
from forgemq_trainer.head_training import load_head
from forgemq_trainer.heap import suit_heap
from forgemq_trainer.loading import fill_adapters
from forgemq_trainer.model import LoadedModel, load_model, with_adapters
from forgemq_trainer.storage.checkpoint import OPTIMIZER_FILE, Checkpoint
from forgemq_trainer.storage.optimizer_state import RANDOM_STATE, whole_parts, write_state_part
from forgemq_trainer.storage.weights import WholeVersion


class WholeModel:
    """The model, its optimizer, the reference's model if the loss has one, and a draft head.

    With adapters the model is frozen, and the optimizer is theirs.

    Attributes:
        head: None if the run trains none.
    """

    def __init__(
        self,
        configuration: RunConfiguration,
        checkpoint: Checkpoint | None,
        *,
        device: str,
    ) -> None:
        """Load what a checkpoint holds, and from the run's own folders what it does not."""
        loaded = _load_policy(configuration, checkpoint, device=device)
        self._lora = configuration.lora
        self.module = loaded.model
        self.head = load_head(loaded, configuration, checkpoint)
        self.policy = loaded.policy if self.head is None else self.head.policy
        self.updater = Updater(self.module, configuration.optimizer)
        self._trainer = configuration.trainer
        self._random_state = torch.empty(0)
        self._reference = _load_reference(configuration, device=device)

    def forward_backward(self, objective: Objective) -> EntryValues:
        """Add the objective's gradients to the parameters; returns the values of its entries."""
        return forward_backward(
            self.policy,
            objective,
            self._planned(objective.forests),
            head_chunk=self._trainer.head_chunk_tokens,
            drafting=None if self.head is None else self.head.drafting(objective.forests),
        )

    @property
    def idle_share(self) -> float:
        """0: this rank waits for no other."""
        return 0.0

    def with_references(self, forests: tuple[Forest, ...]) -> tuple[Forest, ...]:
        """The forests with the reference's log-probabilities, as they are without a reference."""
        if self._reference is None:
            return forests
        return with_references(
            self._reference,
            forests,
            self._planned(forests),
            head_chunk=self._trainer.head_chunk_tokens,
        )

    def read_forests(self, forests: Sequence[Forest]) -> list[Floats]:
        """Log-probability of each entry of each forest, nats; changes no gradient."""
        return read_forests(
            self.policy, forests, self._planned(forests), head_chunk=self._trainer.head_chunk_tokens
        )

    def _planned(self, forests: Sequence[Forest]) -> tuple[Microbatch, ...]:
        """The microbatches of these trees, with the heap made ready for them."""
        microbatches = self.plan(forests)
        if self.policy.head_VH.device.type == "cpu":
            predicted = max((batch.predicted_bytes for batch in microbatches), default=0)
            suit_heap(predicted_bytes=predicted, budget_bytes=self._trainer.memory_budget_bytes)
        return microbatches

    def read_logprobs(self, forest: Forest) -> Floats:
        """Log-probability of each entry, nats; changes no gradient."""
        (microbatch,) = self.plan((forest,))
        return read_logprobs(
            self.policy, forest, microbatch, head_chunk=self._trainer.head_chunk_tokens
        )

    def begin_optimizer(self, random_state: Tensor) -> None:
        """Let the optimizer's state be written until the next update."""
        self._random_state = random_state

    def save_optimizer(self, folder: Path) -> dict[str, str]:
        """Write the optimizer's state below a folder; returns each file's SHA-256."""
        parts = whole_parts({**self.updater.state(), RANDOM_STATE: self._random_state})
        return {OPTIMIZER_FILE: write_state_part(folder / OPTIMIZER_FILE, parts)}

    def finish_optimizer(self) -> None:
        """Do nothing: no thread of this model writes."""

    def whole_version(self) -> WholeVersion:
        """What `module` does not hold as it is saved: merged weights, and the adapter."""
        if self._lora is None:
            return WholeVersion()
        factors = {name: factor.detach() for name, factor in factors_of(self.module).items()}
        if publishes_adapters(self._lora):
            return WholeVersion(adapter=factors)
        state = self.module.state_dict()
        merge_factors(state, scale=self._lora.scale)
        return WholeVersion(weights=state, adapter=factors)

    def plan(self, forests: Sequence[Forest]) -> tuple[Microbatch, ...]:
        """The microbatches of a step over these trees.

        Raises:
            ValueError: The memory budget is below the least that one of them needs.
        """
        return plan_step(
            forests,
            shape=self.policy.shape,
            budget_bytes=self._trainer.memory_budget_bytes,
            head_chunk=self._trainer.head_chunk_tokens,
        )


def _load_policy(
    configuration: RunConfiguration, checkpoint: Checkpoint | None, *, device: str
) -> LoadedModel:
    """The policy of the checkpoint, or of a new run; with adapters the base model is the run's."""
    model, lora = configuration.model, configuration.lora
    is_whole = checkpoint is not None and lora is None
    folder = checkpoint.folder if checkpoint is not None and is_whole else Path(model.path)
    loaded = load_model(folder, dtype=model.dtype, device=device)
    if lora is None:
        return loaded
    loaded = with_adapters(loaded, lora)
    adapter = None if checkpoint is None else checkpoint.adapter_folder
    fill_adapters(loaded.model, adapter, seed=configuration.seed)
    return loaded


def _load_reference(configuration: RunConfiguration, *, device: str) -> PolicyModel | None:
    """Load the model that the run started from; None if the loss has no reference."""
    if not configuration.loss.reference_weight:
        return None
    loaded = load_model(
        Path(configuration.model.path), dtype=configuration.model.dtype, device=device
    )
    # Without gradients autograd saves no activations of the reference.
    loaded.model.requires_grad_(requires_grad=False)
    return loaded.policy
