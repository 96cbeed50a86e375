"""One rank as a process: the first is the service, the others follow it; all end with torchrun."""

import functools
import signal
from collections.abc import Mapping

import torch

from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, run_service
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.app import main
from forgemq_trainer.follower import follow
from forgemq_trainer.ranks.lifeline import end_with_torchrun
from forgemq_trainer.ranks.ranks import (
    Launch,
    RankLostError,
    Ranks,
    check_device,
    device_of,
    launch_of,
)
from forgemq_trainer.settings import TrainerSettings


def run_rank(environ: Mapping[str, str]) -> int:
    """Be the rank that the environment says; returns the exit status, as a service does."""
    launch = launch_of(environ)
    if launch.world_size == 1:
        return run_service("trainer", main, environ)
    end_with_torchrun(environ)
    try:
        return _run_of_several(launch, environ)
    except SettingsError as error:
        Telemetry(service="trainer").event("refused", rank=launch.rank, error=str(error))
        return EXIT_REFUSED
    except RankLostError as error:
        Telemetry(service="trainer").event("failed", error=f"RankLostError: {error}")
        return EXIT_FAILED


def _run_of_several(launch: Launch, environ: Mapping[str, str]) -> int:
    settings = parse(TrainerSettings, prefix="FORGEMQ_TRAINER_", environ=environ)
    device = device_of(settings.device, launch=launch)
    check_device(device, gpus=torch.cuda.device_count())
    # They join first of all: until then a signal ends each of them at once, and from then on each
    # sees when another is gone.
    ranks = Ranks(launch=launch, device=device, deadline_s=settings.rank_deadline_s)
    if launch.rank == 0:
        return run_service("trainer", functools.partial(main, ranks=ranks), environ)
    # Signals are rank 0's business: it finishes its step and says when it is over.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Telemetry(service="trainer").event("following", rank=launch.rank, world_size=launch.world_size)
    follow(ranks, device=device)
    ranks.close()
    return EXIT_OK
