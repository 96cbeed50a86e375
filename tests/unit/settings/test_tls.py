"""The certificate of a server: from files, changed while it serves."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forgemq_settings.environment import SettingsError
from forgemq_settings.tls import ServerCertificate, server_certificate
from tests.certificates import Authority, authority

PREFIX = "FORGEMQ_GATEWAY_"


@pytest.fixture(scope="module")
def ours() -> Authority:
    return authority()


def serial_number(served: ServerCertificate, trusted: Path) -> str:
    """Of the certificate that a client with this authority is shown in a handshake."""
    here, there = socket.socketpair()
    client = ssl.create_default_context(cafile=str(trusted))
    with here, there, ThreadPoolExecutor() as threads:
        serving = threads.submit(served.context.wrap_socket, there, server_side=True)
        with client.wrap_socket(here, server_hostname="127.0.0.1") as connection:
            shown = connection.getpeercert()
            assert shown is not None
            assert connection.version() == "TLSv1.3"
        serving.result().close()
    return str(shown["serialNumber"])


def test_a_changed_certificate_is_shown_from_the_next_handshake_on(
    ours: Authority, tmp_path: Path
) -> None:
    trusted = ours.write(tmp_path / "ca.pem")
    certificate, key = ours.write_server(tmp_path)
    served = ServerCertificate(str(certificate), str(key), prefix=PREFIX)
    first = serial_number(served, trusted)
    assert not served.renew()
    ours.write_server(tmp_path)
    assert served.renew()
    assert serial_number(served, trusted) != first


def test_half_of_a_change_is_waited_out(ours: Authority, tmp_path: Path) -> None:
    """The files are written one after the other, and a look may come between."""
    trusted = ours.write(tmp_path / "ca.pem")
    certificate, key = ours.write_server(tmp_path)
    served = ServerCertificate(str(certificate), str(key), prefix=PREFIX)
    first = serial_number(served, trusted)
    new_key, new_certificate = ours.server()
    certificate.write_bytes(new_certificate)
    with pytest.raises(SettingsError, match="no certificate with its key: KEY_VALUES_MISMATCH"):
        served.renew()
    assert serial_number(served, trusted) == first
    key.write_bytes(new_key)
    assert served.renew()
    assert serial_number(served, trusted) != first


def test_old_protocols_are_not_spoken(ours: Authority, tmp_path: Path) -> None:
    certificate, key = ours.write_server(tmp_path)
    served = ServerCertificate(str(certificate), str(key), prefix=PREFIX)
    assert served.context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(
    ours: Authority, tmp_path: Path
) -> None:
    key, certificate = ours.server(password=b"secret")
    (tmp_path / "c").write_bytes(certificate)
    (tmp_path / "k").write_bytes(key)
    with pytest.raises(SettingsError, match=r"^FORGEMQ_GATEWAY_TLS_CERTIFICATE_FILE, _TLS_KEY"):
        ServerCertificate(str(tmp_path / "c"), str(tmp_path / "k"), prefix=PREFIX)


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("c", "", "FORGEMQ_GATEWAY_TLS_KEY_FILE: must be set"),
        ("", "k", "FORGEMQ_GATEWAY_TLS_CERTIFICATE_FILE: must be set"),
        ("/no/such.pem", "/no/such.key", "/no/such.pem: No such file"),
        (__file__, __file__, "no certificate with its key"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(certificate: str, key: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        server_certificate(certificate, key, prefix=PREFIX)
    assert "\n" not in str(refused.value)


def test_without_either_file_a_server_speaks_plainly() -> None:
    assert server_certificate("", "", prefix=PREFIX) is None
