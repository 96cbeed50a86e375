"""Where the keys of a run are: in a setting, or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from forgemq_launcher.run_folder import RunFolder, first_key
from forgemq_settings.key_file import is_loopback

_SETTING = "FORGEMQ_GATEWAY_ADMIN_KEY"
_CONSOLE_SETTING = "FORGEMQ_CONSOLE_KEY"


class RunKey(NamedTuple):
    """The key itself, or the file whose first line it is; the other one is "".

    Of a file everybody takes the newest key whenever one is needed, so it may change during a run.
    """

    setting: str
    file: str

    def present(self) -> str:
        """The key as it is now.

        Raises:
            RunFolderError: the file has none.
        """
        return self.setting or first_key(Path(self.file))

    @property
    def in_shell(self) -> str:
        """How a shell gets at the key."""
        return f"$(head -n1 {self.file})" if self.file else f"${_SETTING}"


def run_key(folder: RunFolder, environ: Mapping[str, str]) -> RunKey:
    """The run's key; one that no setting has or names is made in the run's folder.

    Raises:
        RunFolderError: the folder's file has none.
    """
    if environ.get(_SETTING):
        return RunKey(environ[_SETTING], "")
    if environ.get(f"{_SETTING}_FILE"):
        return RunKey("", environ[f"{_SETTING}_FILE"])
    folder.admin_key()
    return RunKey("", str(folder.key_path))


def console_key_file(folder: RunFolder, environ: Mapping[str, str], *, host: str) -> str:
    """The file of the console's key, which is made if other machines reach the page.

    "" if a setting has or names the key, which the console reads itself, or if none is needed.

    Raises:
        RunFolderError: the folder's file has no key.
    """
    is_set = environ.get(_CONSOLE_SETTING) or environ.get(f"{_CONSOLE_SETTING}_FILE")
    if is_set or is_loopback(host):
        return ""
    folder.console_key()
    return str(folder.console_key_path)
