"""A draft head that trains beside the policy, with an optimizer of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import Speculation
from forgemq_trainer.core.drafting import Drafting
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.metrics import DraftMeasures
from forgemq_trainer.core.optimizer import NonFiniteGradientError, Updater
from forgemq_trainer.core.tree import Forest
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import LoadedModel


class HeadTraining:
    """The head and its optimizer. `drafting` begins a step, `update` ends it.

    Its AdamW is the run's but for the learning rate, which stays: a policy that learns slowly and a
    head that follows it have nothing in common but the trees.
    """

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        *,
        configuration: RunConfiguration,
        speculation: Speculation,
    ) -> None:
        """Load the head in a folder.

        Raises:
            UnsupportedHeadError: it is no head of this policy.
            OSError: the folder holds no head.
        """
        head, self.policy = with_draft_head(folder, loaded, top_k=speculation.top_k)
        self._layer, self._model = head.layer, head.model
        self._speculation = speculation
        lr = speculation.learning_rate
        self._updater = Updater(head.layer, msgspec.structs.replace(configuration.optimizer, lr=lr))
        self._drafting: Drafting | None = None

    policy: PolicyModel
    """The policy with a shape that counts the head's memory."""

    def drafting(self, forests: Sequence[Forest]) -> Drafting:
        """What adds the head's gradients of a step over these forests."""
        weight = self._speculation.loss_weight
        self._drafting = Drafting(self._model, forests, loss_weight=weight)
        return self._drafting

    def update(self) -> DraftMeasures | None:
        """Apply the step's gradients; returns what was measured, None if no row ran.

        A gradient that is not finite changes nothing, and its norm is reported as 0.
        """
        drafting, self._drafting = self._drafting, None
        if drafting is None or not drafting.totals[0].rows:
            return None
        try:
            grad_norm = self._updater.update(lr=self._speculation.learning_rate)
        except NonFiniteGradientError:
            grad_norm = 0.0
        first = drafting.totals[0]
        return DraftMeasures(
            loss=first.loss / first.rows,
            grad_norm=grad_norm,
            overlap=first.overlap / first.rows,
        )

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors by the names in its file."""
        return {name: tensor.detach() for name, tensor in self._layer.state_dict().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        return self._updater.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `optimizer_state()`."""
        self._updater.restore(state)
