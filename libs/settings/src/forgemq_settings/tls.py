"""A server's certificate from files, taken over again when they change."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta

from forgemq_settings.environment import SettingsError
from forgemq_settings.file_state import FileState, file_state

CertificateFile: TypeAlias = Annotated[
    str,
    Meta(
        description="Certificate of the server and those between it and its authority, PEM; read "
        "again when it changes. '': plain HTTP."
    ),
]
PrivateKeyFile: TypeAlias = Annotated[
    str, Meta(description="Its private key, PEM, without a password; '' without a certificate.")
]

_LOOK_EVERY_S = 1.0


class ServerCertificate:
    """The context of a TLS server; handshakes from a change of its files on have the new ones.

    Files that cannot be used change nothing.

    Attributes:
        context: For every connection that is accepted.

    Args:
        certificate_file: The server's certificate and those between it and its authority, PEM.
        key_file: Its private key without a password, PEM.
        prefix: Of the two settings, for errors: `FORGEMQ_GATEWAY_`.

    Raises:
        SettingsError: only one of them is named, or they cannot be used.
    """

    def __init__(self, certificate_file: str, key_file: str, *, prefix: str) -> None:
        self._prefix = prefix
        for name, given in (("CERTIFICATE", certificate_file), ("KEY", key_file)):
            if not given:
                raise SettingsError(f"{prefix}TLS_{name}_FILE: must be set, because the other is")
        self._files = (Path(certificate_file), Path(key_file))
        self._states = self._present_states()
        self._check()
        self.context = _context(self._files)

    def renew(self) -> bool:
        """Take the files over if they have changed; whether they have.

        Raises:
            SettingsError: they cannot be used; the ones of before stay.
        """
        states = self._present_states()
        if states == self._states:
            return False
        self._states = states
        self._check()
        self.context.load_cert_chain(*self._files, password=_no_password)
        return True

    async def follow(self, tell: Callable[..., None]) -> None:
        """Take the files over whenever they change, until cancelled.

        Args:
            tell: Gets the name of an event and its fields.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if self.renew():
                    tell("certificate_read")
            except SettingsError as error:
                tell("certificate_kept", error=str(error))

    def _check(self) -> None:
        """Try the files in a context of its own: one that took half of them would serve nobody.

        Raises:
            SettingsError: they cannot be used.
        """
        for path in self._files:
            try:
                path.read_bytes()
            except OSError as error:
                raise SettingsError(f"{self._named}: {path}: {error.strerror}") from error
        try:
            _context(self._files)
        except (ssl.SSLError, ValueError) as error:
            # Without its cause: it says where in OpenSSL it was raised.
            reason = getattr(error, "reason", None) or error
            raise SettingsError(f"{self._named}: no certificate with its key: {reason}") from None

    @property
    def _named(self) -> str:
        return f"{self._prefix}TLS_CERTIFICATE_FILE, _TLS_KEY_FILE"

    def _present_states(self) -> tuple[FileState, ...]:
        return tuple(map(file_state, self._files))


def server_certificate(
    certificate_file: str, key_file: str, *, prefix: str
) -> ServerCertificate | None:
    """The certificate of these settings; None if neither is set, and a server speaks plainly.

    Raises:
        SettingsError: as `ServerCertificate`.
    """
    if not certificate_file and not key_file:
        return None
    return ServerCertificate(certificate_file, key_file, prefix=prefix)


def _context(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*files, password=_no_password)
    return context


def _no_password() -> str:
    """OpenSSL would ask for the password of a key at the terminal."""
    return ""
