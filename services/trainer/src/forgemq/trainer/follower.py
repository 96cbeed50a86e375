"""Every rank but the first: no log, no folder of its own; it does what rank 0 announces."""

import signal
from collections.abc import Mapping
from pathlib import Path

from forgemq.settings.environment import parse
from forgemq.shell.service import add_code_paths
from forgemq.telemetry.telemetry import Telemetry
from forgemq.trainer import commands
from forgemq.trainer.checkpoint import checkpoint_at
from forgemq.trainer.ranks import Ranks, device_of, launch_of
from forgemq.trainer.settings import TrainerSettings
from forgemq.trainer.training import Training


def run_follower(environ: Mapping[str, str]) -> int:
    """Follow rank 0 until it ends; returns the exit status.

    Signals are rank 0's business: it finishes its step and says when it is over. If it dies, its
    connections close and this process fails too.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    settings = parse(TrainerSettings, prefix="FORGEMQ_TRAINER_", environ=environ)
    launch = launch_of(environ)
    device = device_of(settings.device, launch=launch)
    telemetry = Telemetry(service="trainer")
    try:
        ranks = Ranks(launch=launch, device=device)
        telemetry.event("following", rank=ranks.rank, world_size=ranks.world_size)
        follow(ranks, device=device)
        ranks.close()
    finally:
        telemetry.close()
    return 0


def follow(ranks: Ranks, *, device: str) -> None:
    """Carry out rank 0's commands until it ends."""
    begin = commands.decode(ranks.received())
    if isinstance(begin, commands.End):
        return
    assert isinstance(begin, commands.Begin), f"{begin} before the model was loaded"
    add_code_paths(begin.configuration.code_paths)
    checkpoint = checkpoint_at(Path(begin.checkpoint)) if begin.checkpoint else None
    training = Training(begin.configuration, device=device, checkpoint=checkpoint, ranks=ranks)
    while True:
        match commands.decode(ranks.received()):
            case commands.TrainStep(scheduled=scheduled, values=values):
                training.train(training.read(scheduled, values))
            case commands.GatherWeights():
                training.whole_weights()
            case commands.GatherOptimizer():
                training.optimizer_state()
            case commands.End():
                return
            case commands.Begin():
                raise ValueError("rank 0 began twice")
