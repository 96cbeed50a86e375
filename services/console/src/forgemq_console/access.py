"""Who may read the page: who has a key, if there is one; without one, this machine alone."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from forgemq_console.settings import ConsoleSettings
from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import KeyFile, check_not_published, is_loopback
from forgemq_telemetry.telemetry import Telemetry

_SETTING = "FORGEMQ_CONSOLE_KEY"

Application: TypeAlias = Any
"""An application of ASGI; its types are those of the server."""

OPEN_PATH = "/health"
"""It says nothing about the run, and those who probe it have no key."""


class ConsoleKeys:
    """The keys that are valid now, kept as hashes; a file of keys is read again when it changes.

    A file that cannot be read, or whose keys break a rule, changes nothing, and an event says why.

    Args:
        settings: Has a key, names a file, or neither.
        hosts: The addresses that the console listens on.

    Raises:
        SettingsError: there is no key and another machine reaches an address, or a key breaks a
            rule.
    """

    def __init__(
        self, settings: ConsoleSettings, *, hosts: Iterable[str], telemetry: Telemetry
    ) -> None:
        hosts = tuple(hosts)
        self._telemetry = telemetry
        lasting = (settings.key,) if settings.key else ()
        check_not_published(lasting, hosts=hosts, variable=_SETTING)
        self._lasting = tuple(map(_digest, lasting))
        self._file: KeyFile | None = None
        if settings.key_file:
            self._file = KeyFile(settings.key_file, variable=f"{_SETTING}_FILE", hosts=hosts)
        outside = [host for host in hosts if not is_loopback(host)]
        if outside and not self._lasting and self._file is None:
            raise SettingsError(
                f"{_SETTING}: must be set, or {_SETTING}_FILE, because {outside[0]} is no loopback "
                "address: every machine that reaches it would read all prompts and answers"
            )
        self._known = self._lasting
        if self._file is not None:
            self._take_over(self._file.read())

    def _take_over(self, keys: Sequence[str]) -> None:
        """Let the keys of the file be valid, and the setting's."""
        self._known = (*self._lasting, *map(_digest, keys))

    def admit(self, authorization: str) -> bool:
        """Whether a request with this header may read; every key is compared."""
        renewed = None if self._file is None else self._file.renewed(kept=self._say_kept)
        if renewed is not None:
            self._take_over(renewed)
        if not self._known:
            return True
        given = _digest(_key_in(authorization))
        return any([hmac.compare_digest(given, known) for known in self._known])

    def _say_kept(self, reason: str) -> None:
        self._telemetry.event("console_keys_kept", error=reason)


def guarded(application: Application, keys: ConsoleKeys) -> Application:
    """The application for those that `keys` admits; others get 401, at which a browser asks."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's
        is_open = scope["type"] != "http" or scope["path"] == OPEN_PATH
        if is_open or keys.admit(_header(scope, b"authorization")):
            await application(scope, receive, send)
            return
        headers = [
            (b"www-authenticate", b'Basic realm="ForgeMQ console", charset="UTF-8"'),
            (b"content-type", b"text/plain"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"the console's key is needed\n"})

    return serve


def _header(scope: Any, name: bytes) -> str:  # noqa: ANN401 - ASGI's
    found: bytes = next((value for each, value in scope["headers"] if each == name), b"")
    return found.decode("latin-1")


def _key_in(authorization: str) -> str:
    """The key in a header: a bearer token, or the password of any user; "" if there is none."""
    scheme, _, given = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
