"""`forgemq merge`: writes a model with an adapter's product in its weights."""

import subprocess
import sys
from pathlib import Path

from forgemq_launcher.core.configuration import ConfigurationError


def merge_adapter(adapter: Path, folder: Path) -> str:
    """Write the merged model into a new folder; returns what was merged.

    Raises:
        ConfigurationError: the folder exists, or the adapter does not fit its base model.
    """
    # A process of its own, as the launcher itself needs no torch.
    command = [sys.executable, "-m", "forgemq_trainer.merge_adapter", str(adapter), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"ended with status {ended.returncode}"]
        raise ConfigurationError(lines[-1])
    return ended.stdout.strip()
