"""Keys from a file, one on each line, the newest first; and keys that everybody knows."""

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forgemq_settings.environment import SettingsError
from forgemq_settings.file_state import FileState, file_state

KEY_CHARACTERS_MIN = 16
"""As for a key in a setting."""

KEYS_MAX = 8
"""An overlap needs two; each key costs every request a hash."""

PUBLISHED_KEYS = frozenset({"0123456789abcdef", "change-me-before-use"})
"""Keys that the documents show, so everybody knows them."""


class KeyFile:
    """A file of keys; empty lines and lines that begin with # are left out.

    Args:
        path: Of the file.
        variable: The setting that names it, for errors.
        hosts: The addresses that the keys guard.
    """

    def __init__(self, path: str, *, variable: str, hosts: Iterable[str] = ()) -> None:
        self._path = Path(path)
        self._variable = variable
        self._hosts = tuple(hosts)
        self._state: FileState = None

    def renewed(self, *, kept: Callable[[str], None]) -> tuple[str, ...] | None:
        """The keys, if the file is another one than at the last read and they can be used.

        Args:
            kept: Gets the reason if they cannot; those of before are to stay valid then.
        """
        if file_state(self._path) == self._state:
            return None
        try:
            return self.read()
        except SettingsError as error:
            kept(str(error))
            return None

    def read(self) -> tuple[str, ...]:
        """The keys that are in the file now.

        Raises:
            SettingsError: the file cannot be read, or its keys break a rule; names no key.
        """
        self._state = file_state(self._path)
        try:
            text = self._path.read_text()
        except OSError as error:
            raise SettingsError(f"{self._variable}: {error.strerror}") from error
        except UnicodeDecodeError:
            # Without its cause, which has bytes of the file.
            raise SettingsError(f"{self._variable}: the file is not text") from None
        keys = keys_in(text, variable=self._variable)
        check_not_published(keys, hosts=self._hosts, variable=self._variable)
        return keys


def keys_in(text: str, *, variable: str) -> tuple[str, ...]:
    """The keys in the text of a file of keys.

    Raises:
        SettingsError: there is none, there are too many, or one is too short; names no key.
    """
    found = key_lines(text)
    if not 1 <= len(found) <= KEYS_MAX:
        raise SettingsError(f"{variable}: must have 1 to {KEYS_MAX} keys, has {len(found)}")
    for number, key in enumerate(found, start=1):
        if len(key) < KEY_CHARACTERS_MIN:
            raise SettingsError(
                f"{variable}: key {number} must have at least {KEY_CHARACTERS_MIN} characters"
            )
    return found


def key_lines(text: str) -> tuple[str, ...]:
    """The lines of a file of keys that are not empty and do not begin with #."""
    lines = [line.strip() for line in text.splitlines()]
    return tuple(line for line in lines if line and not line.startswith("#"))


def is_loopback(host: str) -> bool:
    """Whether an address is one that no other machine reaches; a name is not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_not_published(keys: Sequence[str], *, hosts: Iterable[str], variable: str) -> None:
    """Return if nobody but this machine can use a key that everybody knows.

    Args:
        keys: All that are valid.
        hosts: The addresses that they guard.
        variable: The setting of a key, for the error.

    Raises:
        SettingsError: another machine can.
    """
    outside = next((host for host in hosts if not is_loopback(host)), None)
    if outside is None or PUBLISHED_KEYS.isdisjoint(keys):
        return
    raise SettingsError(
        f"{variable}: a key is one that the documents show, and {outside} is no loopback address: "
        "use a key of your own (openssl rand -hex 24)"
    )
