"""One rank as a process: rank 0 is the service, the others carry out its commands."""

import functools
import signal
from collections.abc import Mapping

import torch

from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.service import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    ServiceSettings,
    run_service,
)
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.app import main
from forgemq_trainer.command_loop import carry_out_commands
from forgemq_trainer.ranks.alive import touching
from forgemq_trainer.ranks.lifeline import end_with_torchrun
from forgemq_trainer.ranks.ranks import (
    RankLaunch,
    RankLostError,
    Ranks,
    check_device,
    device_of,
    launch_of,
)
from forgemq_trainer.settings import TrainerSettings


def run_rank(environ: Mapping[str, str]) -> int:
    """Run the rank that torchrun's variables name; returns the exit status, as a service does."""
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


def _run_of_several(launch: RankLaunch, environ: Mapping[str, str]) -> int:
    settings = parse(TrainerSettings, prefix="FORGEMQ_TRAINER_", environ=environ)
    gpus = torch.cuda.device_count()
    device = device_of(settings.device, launch=launch, gpus=gpus)
    check_device(device, gpus=gpus)
    # Join before anything else: until then a signal ends each rank at once, and from then on each
    # notices if another dies.
    ranks = Ranks(launch=launch, device=device, deadline_s=settings.rank_deadline_s)
    if launch.rank == 0:
        return run_service("trainer", functools.partial(main, ranks=ranks), environ)
    # Only rank 0 obeys signals: it finishes its step, then commands the others to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Telemetry(service="trainer").event("following", rank=launch.rank, world_size=launch.world_size)
    # On the machine of rank 0 the service touches the file, and else the first rank does.
    is_first_here = launch.rank >= launch.local_world_size and launch.local_rank == 0
    service = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=environ)
    with touching(service.alive_file if is_first_here else ""):
        carry_out_commands(ranks, device=device)
    ranks.close()
    return EXIT_OK
