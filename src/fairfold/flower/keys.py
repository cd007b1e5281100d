"""Certificates and node keys, made on the spot: what `openssl` and `ssh-keygen` would make, for trying out."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fairfold.files import write_atomically

DAYS = 30


def make_certificates(folder: Path, hosts: list[str]) -> tuple[Path, Path, Path]:
    """A certificate authority that lives for a month, and a server's certificate signed by it.

    Args:
        folder: Where to write ``ca.crt``, ``server.pem`` and ``server.key``. The authority's own key is not kept: it
            signs once.
        hosts: Names and addresses the server is reached by.

    Returns:
        The three paths.
    """
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = _name("fairfold trial authority")
    ca = (
        _builder(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
    certificate = (
        _builder(_name(hosts[0]), issuer, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    write_atomically(paths[0], ca.public_bytes(serialization.Encoding.PEM))
    write_atomically(paths[1], certificate.public_bytes(serialization.Encoding.PEM))
    write_atomically(paths[2], _private(server, serialization.PrivateFormat.PKCS8), private=True)
    return paths


def make_node_key(path: Path) -> tuple[Path, Path]:
    """A node's key pair as ``ssh-keygen -t ecdsa -b 384`` writes it: ``path``, and ``path.pub`` to be registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_atomically(path, _private(key, serialization.PrivateFormat.OpenSSH), private=True)
    public = path.with_name(path.name + ".pub")
    content = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomically(public, content + b"\n")
    return path, public


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
