"""The admin key that the agents send: from the setting, or from the first line of a file."""

from forgemq_agents.settings import AgentsSettings, ImportSettings
from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import KeyFile, key_lines
from forgemq_telemetry.telemetry import Telemetry

_SETTING = "FORGEMQ_AGENTS_ADMIN_KEY"


class AdminKeyFile:
    """Gives the first key of a file, which may change while the agents play.

    A file that cannot be read, or breaks a rule, changes nothing, and an event says why.

    Raises:
        SettingsError: that is so at the start.
    """

    def __init__(self, path: str, *, telemetry: Telemetry) -> None:
        self._file = KeyFile(path, variable=f"{_SETTING}_FILE")
        self._telemetry = telemetry
        self._key = self._file.read()[0]

    def current(self) -> str:
        """The key as the file has it now; to look costs some microseconds."""
        renewed = self._file.renewed(
            kept=lambda reason: self._telemetry.event("admin_key_kept", error=reason)
        )
        if renewed is not None:
            self._key = renewed[0]
        return self._key


def admin_key_of(
    settings: AgentsSettings | ImportSettings, *, telemetry: Telemetry
) -> str | AdminKeyFile:
    """The key of the file, or else the first one of the setting.

    Raises:
        SettingsError: there is neither, or the file cannot be used.
    """
    if settings.admin_key_file:
        return AdminKeyFile(settings.admin_key_file, telemetry=telemetry)
    # An orchestrator gives the text of a file of keys as a variable, too.
    keys = key_lines(settings.admin_key)
    if not keys:
        raise SettingsError(f"{_SETTING}: must be set, or {_SETTING}_FILE")
    return keys[0]
