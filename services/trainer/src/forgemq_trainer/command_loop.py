"""What every rank but the first does: it has no log, and carries out what rank 0 announces."""

from pathlib import Path

from forgemq_settings.user_code import add_code_paths
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
    checkpoint = None
    if begin.checkpoint:
        # Ranks of one machine see the same disk: one of them hashes.
        checkpoint = checkpoint_at(Path(begin.checkpoint), is_hashed=ranks.local_rank == 0)
    training = Training(begin.configuration, device=device, checkpoint=checkpoint, ranks=ranks)
    while True:
        match ranks.receive():
            case commands.ComputeGradients(scheduled=scheduled, values=values):
                training.compute_gradients(training.read(scheduled, values))
            case commands.Update(fresh=fresh):
                training.update(fresh)
            case commands.GatherWeights():
                training.saving.gather_weights()
            case commands.SaveOptimizer():
                training.saving.begin_optimizer()
            case commands.End():
                training.saving.finish_optimizer()
                return
            case commands.Begin():
                raise ValueError("rank 0 began twice")
