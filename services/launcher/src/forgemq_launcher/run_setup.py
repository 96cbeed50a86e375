"""What one `forgemq run` was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.settings import LauncherSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Which run, with which settings; everything started for it inherits `environ`."""

    folder: RunFolder
    configuration: RunConfiguration
    settings: LauncherSettings
    environ: Mapping[str, str]
    resume_command: str = ""
    """What somebody types to continue the run; "" for an evaluation, which is not continued."""
    is_resumed: bool = False
    """It goes on with a run that was started before."""
    tasks: tuple[ReadTasks, ...] = ()
    """What its files of tasks have."""
    task_changes: tuple[str, ...] = ()
    """What was added to them since the start before."""
    samples: int = 0
    """Above 0: the model is judged by so many episodes of each held-out task; nothing trains."""

    @property
    def blobs(self) -> str:
        """Blob store of the run: the named one, else a folder of the run."""
        return self.environ.get("FORGEMQ_BLOBS") or str(self.folder / "blobs")
