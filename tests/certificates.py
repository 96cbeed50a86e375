"""Certificates of a test's own authority."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Signs certificates of servers at 127.0.0.1."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def write(self, path: Path) -> Path:
        """Write its certificate, for those who trust it; returns the path."""
        path.write_bytes(self.certificate.public_bytes(PEM))
        return path

    def server(self, *, address: str = "127.0.0.1", password: bytes = b"") -> tuple[bytes, bytes]:
        """Private key and certificate of a server at this address, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _dated(_name("server"), issuer=self.certificate.subject)
            .public_key(key.public_key())
            .add_extension(names, critical=False)
            .add_extension(authority_key, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cipher = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, cipher)
        return private, certificate.public_bytes(PEM)

    def write_server(self, folder: Path, *, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Write a server's certificate and key; returns their paths."""
        key, certificate = self.server(address=address)
        paths = folder / "server.pem", folder / "server.key"
        paths[0].write_bytes(certificate)
        paths[1].write_bytes(key)
        return paths


def authority(name: str = "the test's authority") -> Authority:
    """A new authority that nobody trusts yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _dated(_name(name), issuer=_name(name))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(key=key, certificate=certificate)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _dated(subject: x509.Name, *, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - hour)
        .not_valid_after(now + 24 * hour)
    )
