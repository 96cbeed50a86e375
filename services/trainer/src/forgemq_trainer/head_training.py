"""A draft head that trains beside the policy, with an optimizer of its own.

If several ranks train the policy, each of them has the whole head. A rank adds the gradients of the
trees that it runs; their sum over the ranks, and so the update, is the same on all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_trainer.core.draft_loss import DraftTotals
from forgemq_trainer.core.drafting import Drafting, PolicyEnds
from forgemq_trainer.core.forward import PolicyModel
from forgemq_trainer.core.metrics import DraftMeasures
from forgemq_trainer.core.optimizer import NonFiniteGradientError, Updater
from forgemq_trainer.core.tree import Forest
from forgemq_trainer.draft_head import with_draft_head
from forgemq_trainer.model import LoadedModel
from forgemq_trainer.storage.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRanks:
    """What ranks that share the policy's parameters do together for a head; each call is of all.

    Attributes:
        gather_ends: Returns what the head uses of the policy, whole.
        all_reduce: Returns the sum over the ranks, the same bytes on each of them.
    """

    gather_ends: Callable[[], PolicyEnds]
    all_reduce: Callable[[Tensor], Tensor]


def load_head(
    loaded: LoadedModel,
    configuration: RunConfiguration,
    checkpoint: Checkpoint | None,
    *,
    sharing: SharingRanks | None = None,
) -> "HeadTraining | None":
    """The draft head to continue with; None if the run trains none.

    Raises:
        UnsupportedHeadError: it is no head of this policy.
        OSError: its folder holds no head.
    """
    trained = trained_head(configuration.speculation)
    if trained is None:
        return None
    folder = Path(trained.head) if checkpoint is None else checkpoint.head_folder
    return HeadTraining(folder, loaded, configuration=configuration, sharing=sharing)


class HeadTraining:
    """The head and its optimizer. `drafting` begins an update, `update` ends it.

    Its AdamW is the run's but for the learning rate, which stays: a policy that learns slowly and a
    head that follows it have nothing in common but the trees.
    """

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        *,
        configuration: RunConfiguration,
        sharing: SharingRanks | None = None,
    ) -> None:
        """Load the head in a folder.

        Args:
            folder: Holds it.
            loaded: The policy.
            configuration: Of the run, which trains a head.
            sharing: None if this process holds the whole policy.

        Raises:
            UnsupportedHeadError: it is no head of this policy.
            OSError: the folder holds no head.
        """
        trained = trained_head(configuration.speculation)
        assert trained is not None
        head, self.policy = with_draft_head(
            folder,
            loaded,
            top_k=trained.top_k,
            gather_ends=None if sharing is None else sharing.gather_ends,
        )
        self._layer, self._model = head.layer, head.model
        self._settings = trained
        lr = trained.learning_rate
        self._updater = Updater(head.layer, msgspec.structs.replace(configuration.optimizer, lr=lr))
        self._all_reduce = None if sharing is None else sharing.all_reduce
        self._totals: Sequence[DraftTotals] = ()

    policy: PolicyModel
    """The policy with a shape that counts the head's memory."""

    def drafting(self, forests: Sequence[Forest]) -> Drafting:
        """What adds the head's gradients of an update over these forests."""
        weight = self._settings.loss_weight
        drafting = Drafting(self._model, forests, loss_weight=weight)
        # Not the drafting itself: it may hold gathered weights of the policy.
        self._totals = drafting.totals
        return drafting

    def update(self) -> DraftMeasures | None:
        """Apply the gradients; returns what was measured, None if no row ran.

        A gradient that is not finite changes nothing, and its norm is reported as 0.
        """
        totals, self._totals = self._totals, ()
        if not totals:
            return None
        first = self._of_all_ranks(totals[0])
        if not first.rows:
            return None
        if self._all_reduce is not None:
            self._updater.sum_gradients(self._all_reduce)
        try:
            grad_norm = self._updater.update(lr=self._settings.learning_rate)
        except NonFiniteGradientError:
            grad_norm = 0.0
        return DraftMeasures(
            rows=first.rows,
            loss=first.loss / first.rows,
            grad_norm=grad_norm,
            overlap=first.overlap / first.rows,
        )

    def _of_all_ranks(self, own: DraftTotals) -> DraftTotals:
        if self._all_reduce is None:
            return own
        sums = [own.rows, own.loss, own.overlap]
        rows, loss, overlap = self._all_reduce(
            torch.tensor(sums, dtype=torch.float64, device=self._model.device)
        ).tolist()
        return DraftTotals(rows=int(rows), loss=loss, overlap=overlap)

    def weights(self) -> dict[str, Tensor]:
        """The head's tensors by the names in its file."""
        return {name: tensor.detach() for name, tensor in self._layer.state_dict().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        return self._updater.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `optimizer_state()`."""
        self._updater.restore(state)
