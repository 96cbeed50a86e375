"""Where admin keys come from: the setting, and a file that is read again when it changes."""

import asyncio
from collections.abc import Iterable

from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.settings import GatewaySettings
from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import KeyFile, check_not_published
from forgemq_telemetry.telemetry import Telemetry

_LOOK_EVERY_S = 1.0
_SETTING = "FORGEMQ_GATEWAY_ADMIN_KEY"


class FollowedKeys:
    """Keeps the admin keys as the file has them; without a file there is the setting alone.

    A file that cannot be read, or whose keys break a rule, changes nothing: the keys of before stay
    valid, and an event says why. At the start it is an error.

    Args:
        settings: `admin_key_file` is a file as of `KeyFile`.
        keys: With the setting's key as a lasting one.
        hosts: The addresses that the gateway listens on.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        keys: AdminKeys,
        hosts: Iterable[str],
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._hosts = tuple(hosts)
        self._file = KeyFile(
            settings.admin_key_file, variable=f"{_SETTING}_FILE", hosts=self._hosts
        )
        self._keys = keys
        self._telemetry = telemetry

    def start(self) -> None:
        """Take the keys over for the first time.

        Raises:
            SettingsError: there is no key, or a key or the file breaks a rule.
        """
        if self._settings.admin_key_file:
            self._keys.replace(self._file.read())
        elif not self._settings.admin_key:
            raise SettingsError(f"{_SETTING}: must be set, or {_SETTING}_FILE")
        check_not_published((self._settings.admin_key,), hosts=self._hosts, variable=_SETTING)

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled."""
        while self._settings.admin_key_file:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed."""
        found = self._file.renewed(
            kept=lambda reason: self._telemetry.event("admin_keys_kept", error=reason)
        )
        if found is not None:
            self._keys.replace(found)
            self._telemetry.event("admin_keys_read", count=len(found))
