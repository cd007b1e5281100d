"""Certificates and node keys, made on the spot: what `openssl` and `ssh-keygen` would make, for trying out."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from fairfold.files import write_atomically

DAYS = 30


def make_certificates(folder: Path, hosts: list[str]) -> tuple[Path, Path, Path]:
    """A certificate authority that lives for a month, and a certificate signed by it for a server with these hosts.

    Writes ``ca.crt``, ``server.pem`` and ``server.key``. The authority's own key is not kept: it signs once.
    """
    authority, server = generate_private_key(SECP384R1()), generate_private_key(SECP384R1())
    key = authority.public_key()
    own, known = x509.SubjectKeyIdentifier.from_public_key(key), x509.AuthorityKeyIdentifier.from_issuer_public_key(key)
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    ca = _certificate("fairfold trial authority", authority, authority, [own])
    certificate = _certificate(hosts[0], server, authority, [names, known])
    paths = folder / "ca.crt", folder / "server.pem", folder / "server.key"
    write_atomically(paths[0], ca.public_bytes(Encoding.PEM))
    write_atomically(paths[1], certificate.public_bytes(Encoding.PEM))
    write_atomically(paths[2], server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)
    return paths


def make_node_key(path: Path) -> tuple[Path, Path]:
    """A node's key pair as ``ssh-keygen -t ecdsa -b 384`` writes it: ``path``, and ``path.pub`` to be registered."""
    key = generate_private_key(SECP384R1())
    write_atomically(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
    public = path.with_name(path.name + ".pub")
    write_atomically(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return path, public


def _certificate(
    name: str, key: EllipticCurvePrivateKey, authority: EllipticCurvePrivateKey, more: list[x509.ExtensionType]
) -> x509.Certificate:
    """A certificate of a key; that of the authority itself signs others, and nothing else."""
    signs, now = key is authority, datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("fairfold trial authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, hashes.SHA384())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
