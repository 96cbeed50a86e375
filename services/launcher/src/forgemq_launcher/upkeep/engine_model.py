"""The model with which a run's engines begin, in the format in which they hold weights."""

import shutil
import subprocess
import sys
from pathlib import Path

from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.upkeep.machine import MachineError


def model_of_engines(configuration: RunConfiguration, *, folder: Path) -> Path:
    """Folder of the model with which engines begin.

    Args:
        configuration: Of the run.
        folder: Of the run's engines; a model in another format than `model.path` lies in it.
    """
    if configuration.model.engine_quantization == "none":
        return Path(configuration.model.path)
    return folder / f"model-{configuration.model.engine_quantization}"


def write_engine_model(configuration: RunConfiguration, *, folder: Path) -> None:
    """Write the model of `model_of_engines`, unless it is there; it takes about as long as a copy.

    Raises:
        MachineError: it cannot be written, or has no tensor for this format.
    """
    target = model_of_engines(configuration, folder=folder)
    if target == Path(configuration.model.path) or target.is_dir():
        return
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    # A process of its own, as the launcher itself needs no torch.
    command = [sys.executable, "-m", "forgemq_fp8_blocks", configuration.model.path, str(draft)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"ended with status {ended.returncode}"]
        raise MachineError(
            f"model.engine_quantization {configuration.model.engine_quantization}: {lines[-1]}"
        )
    draft.rename(target)
