"""The folder of one run, with everything that the run leaves behind."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.whole_files import write_json, write_whole
from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import KeyFile

RUN_ID = r"[a-z0-9-]{1,40}"

_EVALUATION = "evaluation"
"""File whose presence says that `forgemq eval` made the folder."""

_TASKS = "tasks.json"
"""File with the numbers of tasks in the run's files, and their checksums."""

KEY_BYTES = 24
"""192 random bits: nobody guesses it, and its base64 is 32 characters without padding."""


class RunFolderError(Exception):
    """The folder cannot be used; the text says why and what to do."""


class NotOnLogError(Exception):
    """The run's log has nothing of what was asked for; the text says what, and why if known."""


class _Reported(msgspec.Struct):
    """How the run ended, of the report of any build."""

    reason: str = ""


class RunFolder:
    """`runs/<run>/` and the names in it.

    configuration.json, tasks.json, blobs/, kafka/ (the broker's data), engine/, logs/<process>.log,
    checkpoints/, report.json, report.png, curves.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.path.name

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def make(self, configuration: RunConfiguration, *, is_evaluation: bool = False) -> None:
        """Create the folder of a new run; raises RunFolderError if it exists."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()  # Of two that start at once, one makes it.
        except FileExistsError as error:
            again = "" if self.is_evaluation else f", or continue it with --resume {self.run}"
            raise RunFolderError(f"{self.path} exists: choose another run id{again}") from error
        if is_evaluation:  # Before there is a configuration, which makes the folder a run's.
            (self.path / _EVALUATION).touch()
        for name in ("blobs", "kafka", "engine", "logs", "checkpoints"):
            (self.path / name).mkdir()
        self.keep(configuration)

    @property
    def is_evaluation(self) -> bool:
        """Whether `forgemq eval` made it: nothing trains there, and nothing can be continued."""
        return (self.path / _EVALUATION).exists()

    def is_completed(self) -> bool:
        """Whether its report says that nothing is left to play."""
        try:
            content = (self.path / "report.json").read_bytes()
            return msgspec.json.decode(content, type=_Reported).reason == "completed"
        except (OSError, ValueError):
            return False

    def check_name(self) -> None:
        """Raise RunFolderError if the folder has another name than its run, which the log has."""
        if (run := self.configuration().run) != self.run:
            raise RunFolderError(f"{self.path} is the folder of run {run}: give it that name again")

    def check_resumable(self) -> None:
        """Raise RunFolderError if there is no run in it that can be continued."""
        if self.is_evaluation:
            raise RunFolderError(
                f"{self.run} is an evaluation, which trains nothing: it cannot be continued as a "
                "run; judge the model again with forgemq eval"
            )
        self.check_name()

    def keep(self, configuration: RunConfiguration) -> None:
        """Write the configuration down; the agents and the next resume read it."""
        write_json(self.path / "configuration.json", configuration)

    def configuration(self) -> RunConfiguration:
        """The configuration of the run; raises RunFolderError if there is no such run."""
        path = self.path / "configuration.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=RunConfiguration)
        except FileNotFoundError as error:
            raise RunFolderError(f"there is no run {self.run!r} in {self.path.parent}") from error
        except (OSError, ValueError) as error:  # Not readable, not JSON, not UTF-8, out of bounds.
            raise RunFolderError(f"{path}: {error}") from error

    def keep_tasks(self, tasks: Sequence[ReadTasks]) -> None:
        """Write down what the run's files of tasks have; the next resume compares it."""
        if tasks:
            write_json(self.path / _TASKS, tasks)

    def tasks(self) -> tuple[ReadTasks, ...]:
        """What the files of tasks had at the newest start; () of a run that has none.

        Raises:
            RunFolderError: it cannot be read.
        """
        path = self.path / _TASKS
        try:
            return msgspec.json.decode(path.read_bytes(), type=tuple[ReadTasks, ...])
        except FileNotFoundError:
            return ()  # Also of a run that an older release began.
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path}: {error}") from error

    @property
    def key_path(self) -> Path:
        """File with the gateway's admin key, unless a setting gives the key."""
        return self.path / "admin.key"

    def admin_key(self) -> str:
        """The newest of the gateway's admin keys: the first line of the file, which is made once.

        It is the same at every start, unless somebody changes the file, because episode keys derive
        from it.
        """
        return _kept_key(self.key_path)

    @property
    def console_key_path(self) -> Path:
        """File with the console's key, if other machines reach it and no setting gives a key."""
        return self.path / "console.key"

    def console_key(self) -> str:
        """The console's key: the first line of the file, which is made once."""
        return _kept_key(self.console_key_path)

    @property
    def targets_path(self) -> Path:
        """File by which Prometheus finds the run while it is up, or that it failed."""
        return self.path.parent / "scrape_targets" / f"{self.run}.json"

    def gateway_port(self) -> int:
        """The gateway's port at the run's newest start; 0 if there was none."""
        path = self.path / "gateway.port"
        return int(path.read_text()) if path.is_file() else 0

    def keep_gateway_port(self, port: int) -> None:
        """Write down the port, so that the agents' addresses are the same after a resume."""
        write_whole(self.path / "gateway.port", b"%d\n" % port)

    def remove(self) -> None:
        """Remove the folder; if that ends halfway, what is left is still this run's folder."""
        self.targets_path.unlink(missing_ok=True)
        last = [self.path / "lock", self.path / "configuration.json"]
        for path in sorted(set(self.path.iterdir()) - set(last)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in last:
            path.unlink(missing_ok=True)
        self.path.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run during the block; raises RunFolderError if another launcher holds it."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunFolderError(
                    f"run {self.run} is already up (process {file.read().strip()}); "
                    f"forgemq stop {self.run} ends it"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def is_up(self) -> bool:
        """Whether a launcher holds the run now."""
        try:
            with self.locked():
                return False
        except RunFolderError:
            return True


def _kept_key(path: Path) -> str:
    if not path.is_file():
        write_whole(path, secrets.token_urlsafe(KEY_BYTES).encode(), mode=0o600)
    return first_key(path)


def first_key(path: Path) -> str:
    """The newest key of a file of keys.

    Raises:
        RunFolderError: there is none, or the file cannot be read.
    """
    try:
        return KeyFile(str(path), variable=str(path)).read()[0]
    except SettingsError as error:
        raise RunFolderError(str(error)) from error


def folder_named(run: str, *, runs: Path) -> RunFolder:
    """The folder of a run that the arguments name; a path is no run id."""
    if not re.fullmatch(RUN_ID, run):
        raise RunFolderError(f"run: an id has up to 40 of a-z, 0-9 and -, got {run!r}")
    return RunFolder(runs / run)


def names_taken(runs: Path) -> tuple[str, ...]:
    """Names that a new run cannot have: those of all that lies in the folder of runs."""
    return tuple(path.name for path in runs.iterdir()) if runs.is_dir() else ()


def run_folders(runs: Path) -> tuple[RunFolder, ...]:
    """All runs, by name."""
    if not runs.is_dir():
        return ()
    return tuple(
        RunFolder(path)
        for path in sorted(runs.iterdir())
        if (path / "configuration.json").is_file()
    )
