"""The broadcasts that the settings name."""

from typing import TypeAlias

from forgemq_settings.environment import SettingsError
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.process_group import BackendName
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.shared_path import SharedPath
from forgemq_trainer.transfer_deadline import TransferDeadline

_ANY_ADDRESS = ("0.0.0.0", "::")

Broadcasts: TypeAlias = FastPaths | SharedPath
"""A process group for each lane, or one for all."""


def broadcasts_of(settings: TrainerSettings, *, device: str) -> Broadcasts | None:
    """The broadcasts into engines that the settings name; None if they name none.

    Raises:
        SettingsError: NCCL would have no GPU to send from, or no engine reaches the host.
    """
    way = settings.fast_path
    if way == "off" or way == "relay":
        return None
    backend: BackendName = "nccl" if way in ("nccl", "nccl-shared") else "gloo"
    if backend == "nccl" and device == "cpu":
        instead = way.replace("nccl", "gloo")
        raise SettingsError(
            f"FORGEMQ_TRAINER_FAST_PATH={way} sends from a GPU to GPUs: set "
            f"FORGEMQ_TRAINER_DEVICE=cuda, or {instead}, which reaches every engine"
        )
    if settings.host in _ANY_ADDRESS:
        raise SettingsError(
            f"FORGEMQ_TRAINER_HOST: {settings.host} stands for every address of this machine; "
            "engines connect to it for new weights, so name the one they reach"
        )
    made = SharedPath if way in ("gloo-shared", "nccl-shared") else FastPaths
    return made(
        host=settings.host,
        backend=backend,
        deadline=TransferDeadline.of_settings(settings),
        device=device,
    )
