"""Where admin keys come from: the setting, and a file that is read again when it changes."""

import asyncio
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.settings import GatewaySettings
from forgemq_settings.environment import SettingsError
from forgemq_telemetry.telemetry import Telemetry

KEY_CHARACTERS_MIN = 16
"""As for the setting."""

KEYS_MAX = 8
"""An overlap needs two; each key costs every request a hash."""

PUBLISHED_KEYS = frozenset({"0123456789abcdef", "change-me-before-use"})
"""Keys that the documents show, so everybody knows them."""

_LOOK_EVERY_S = 1.0
_VARIABLE = "FORGEMQ_GATEWAY_ADMIN_KEY_FILE"

# What of a file's state says that it has other content: inode, size and time of its last change.
_State = tuple[int, int, int]


class KeyFile:
    """Keeps the admin keys as the file has them; without a file there is the setting alone.

    A file that cannot be read, or whose keys break a rule, changes nothing: the keys of before stay
    valid, and an event says why. At the start it is an error.

    Args:
        settings: `admin_key_file` has a key on each line, the newest first; empty lines and lines
            that begin with # are left out.
        keys: With the setting's key as a lasting one.
        host: The address that the gateway listens on.
    """

    def __init__(
        self, settings: GatewaySettings, *, keys: AdminKeys, host: str, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._path = Path(settings.admin_key_file)
        self._keys = keys
        self._host = host
        self._telemetry = telemetry
        self._state: _State | None = None

    def start(self) -> None:
        """Take the keys over for the first time.

        Raises:
            SettingsError: there is no key, or a key or the file breaks a rule.
        """
        if self._settings.admin_key_file:
            self._read()
        elif not self._settings.admin_key:
            raise SettingsError(f"FORGEMQ_GATEWAY_ADMIN_KEY: must be set, or {_VARIABLE}")
        check_not_published((self._settings.admin_key,), host=self._host)

    def _read(self) -> int:
        """Take the file's keys over; returns how many.

        Raises:
            SettingsError: the file cannot be read, or its keys break a rule.
        """
        self._state = self._present_state()
        try:
            text = self._path.read_text()
        except OSError as error:
            raise SettingsError(f"{_VARIABLE}: {error.strerror}") from error
        except UnicodeDecodeError:
            # Without its cause, which has bytes of the file.
            raise SettingsError(f"{_VARIABLE}: the file is not text") from None
        found = keys_in(text)
        check_not_published(found, host=self._host)
        self._keys.replace(found)
        return len(found)

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._settings.admin_key_file:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed."""
        if self._present_state() == self._state:
            return
        try:
            count = self._read()
        except SettingsError as error:
            self._telemetry.event("admin_keys_kept", error=str(error))
        else:
            self._telemetry.event("admin_keys_read", count=count)

    def _present_state(self) -> _State | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def keys_in(text: str) -> tuple[str, ...]:
    """The keys in a file of keys.

    Raises:
        SettingsError: there is none, there are too many, or one is too short; names no key.
    """
    lines = [line.strip() for line in text.splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not 1 <= len(found) <= KEYS_MAX:
        raise SettingsError(f"{_VARIABLE}: must have 1 to {KEYS_MAX} keys, has {len(found)}")
    for number, key in enumerate(found, start=1):
        if len(key) < KEY_CHARACTERS_MIN:
            raise SettingsError(
                f"{_VARIABLE}: key {number} must have at least {KEY_CHARACTERS_MIN} characters"
            )
    return found


def check_not_published(keys: Sequence[str], *, host: str) -> None:
    """Return if nobody but this machine can use a key that everybody knows.

    Args:
        keys: All admin keys.
        host: The address that the gateway listens on.

    Raises:
        SettingsError: another machine can.
    """
    if ipaddress.ip_address(host).is_loopback or PUBLISHED_KEYS.isdisjoint(keys):
        return
    raise SettingsError(
        f"FORGEMQ_GATEWAY_ADMIN_KEY: an admin key is one that the documents show, and {host} is "
        "no loopback address: use a key of your own (openssl rand -hex 24)"
    )
