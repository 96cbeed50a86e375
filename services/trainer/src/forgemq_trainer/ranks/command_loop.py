"""What every rank but the first does: it has no log, and carries out what rank 0 announces."""

from pathlib import Path

from forgemq_shell.service import add_code_paths
from forgemq_trainer.ranks import commands
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.storage.checkpoint import checkpoint_at
from forgemq_trainer.training import Training


def carry_out_commands(ranks: Ranks, *, device: str) -> None:
    """Carry out rank 0's commands until it ends.

    Raises:
        RankLostError: rank 0 died, or another rank did within a step.
    """
    begin = ranks.receive()
    if isinstance(begin, commands.End):
        return
    assert isinstance(begin, commands.Begin), f"{begin} before the model was loaded"
    add_code_paths(begin.configuration.code_paths)
    checkpoint = checkpoint_at(Path(begin.checkpoint)) if begin.checkpoint else None
    training = Training(begin.configuration, device=device, checkpoint=checkpoint, ranks=ranks)
    while True:
        match ranks.receive():
            case commands.ComputeGradients(scheduled=scheduled, values=values):
                training.compute_gradients(training.read(scheduled, values))
            case commands.Update(fresh=fresh):
                training.update(fresh)
            case commands.GatherWeights():
                training.whole_weights()
            case commands.GatherOptimizer():
                training.optimizer_state()
            case commands.End():
                return
            case commands.Begin():
                raise ValueError("rank 0 began twice")
