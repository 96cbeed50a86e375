"""What of a version needs all ranks, to be saved: whole tensors, and the optimizer's state."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from forgemq_trainer.ranks import commands
from forgemq_trainer.ranks.alone import AnyRanks
from forgemq_trainer.ranks.sharded_model import ShardedModel
from forgemq_trainer.storage.weights import WholeVersion
from forgemq_trainer.whole_model import WholeModel


class VersionSaving:
    """Saves the version that the model has, on any number of ranks.

    Order, for each version: `gather_weights` and, if it gets a checkpoint, `begin_optimizer`, on
    all ranks together before the next step. Then, on rank 0, beside that step and before its
    update, `whole_version` and `save_optimizer`. Rank 0 may also call only these two: they do the
    others' part, together with all ranks.
    """

    def __init__(
        self,
        model: WholeModel | ShardedModel,
        ranks: AnyRanks,
        *,
        random_state: Callable[[], Tensor],
    ) -> None:
        """Save nothing yet; `random_state` is called when a version begins to be saved."""
        self._model = model
        self._ranks = ranks
        self._random_state = random_state
        self._gathered: WholeVersion | None = None
        self._is_begun = False

    def gather_weights(self) -> None:
        """Gather what is saved of the weights on rank 0, in its host memory."""
        self._ranks.announce(commands.GatherWeights())
        with self._ranks.together():
            self._gathered = self._model.whole_version()

    def whole_version(self) -> WholeVersion:
        """What is saved of the weights, on rank 0; it is kept no longer here."""
        if self._gathered is None:
            self.gather_weights()
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        return gathered

    def begin_optimizer(self) -> None:
        """Let every rank write its part of the optimizer's state, as soon as there is a folder."""
        self._ranks.announce(commands.SaveOptimizer())
        self._is_begun = True
        self._model.begin_optimizer(self._random_state())

    def save_optimizer(self, folder: Path) -> dict[str, str]:
        """Have the state written below a folder, durably and read back; on rank 0.

        Returns:
            The SHA-256 of each file by its path there.

        Raises:
            OSError: a rank could not write its part.
            RankLostError: another rank died.
        """
        if not self._is_begun:
            self.begin_optimizer()
        self._is_begun = False
        return self._model.save_optimizer(folder)

    def finish_optimizer(self) -> None:
        """On ranks other than 0, wait until this one's part is written, if that was begun."""
        self._model.finish_optimizer()
