"""Certificates for tests, made on the spot."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder(self._name, self._name, self._key, days=30)
        certificate = certificate.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.ca = str(directory / f"{name}.pem")
        signed = certificate.sign(self._key, hashes.SHA256())
        Path(self.ca).write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, days: int = 30) -> Pair:
        """Issue a certificate for 127.0.0.1 and localhost; negative `days` make one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
        certificate = _builder(subject, self._name, key, days).add_extension(names, critical=False)
        signed = certificate.sign(self._key, hashes.SHA256())
        pair = Pair(str(self._directory / f"{name}.crt"), str(self._directory / f"{name}.key"))
        Path(pair.cert).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        Path(pair.key).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
    )
