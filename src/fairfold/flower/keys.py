"""Certificates and node keys: what `openssl` and `ssh-keygen` would make, with the names that Flower's helpers need."""

import hashlib
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)  # fmt: skip
from cryptography.x509.oid import NameOID

from fairfold.errors import InvalidState
from fairfold.files import make_private, write_atomically

AUTHORITY_DAYS, SERVER_DAYS = 3650, 398
RENEWED_BEFORE = 30  # days before its end from which on a server's certificate is made anew
HOME = ("localhost", "127.0.0.1")  # Flower's own helper asks for the second, whatever devices call the server
AUTHORITY = "fairfold authority"


def make_certificates(folder: Path, hosts: list[str]) -> tuple[Path, Path, Path]:
    """An authority of one's own, and a certificate signed by it for a server with these hosts, beside its own machine.

    Writes ``ca.crt``, ``ca.key``, ``server.pem`` and ``server.key``. Devices pin the authority; its key is needed only
    to make the server's certificate anew (:func:`renew`), and may be kept elsewhere.
    """
    authority = generate_private_key(SECP384R1())
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = _certificate(AUTHORITY, authority, authority, AUTHORITY_DAYS, [own])
    make_private(folder)
    write_atomically(folder / "ca.crt", ca.public_bytes(Encoding.PEM))
    write_atomically(folder / "ca.key", _private(authority), private=True)
    return folder / "ca.crt", *_sign(folder, authority, hosts)


def renew(folder: Path, hosts: list[str]) -> str | None:
    """Make a server's certificate anew if it is about to end, or lacks a host; words where that cannot be done."""
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    if left > timedelta(days=RENEWED_BEFORE) and all(_host(host) in names for host in hosts):
        return None
    try:
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError("not a key of this kind")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return f"the certificate has {left.days} days left, and {folder / 'ca.key'} cannot be read ({error})"
    _sign(folder, key, hosts)
    return "the server's certificate was made anew"


def fingerprint(certificate: bytes) -> bytes:
    """What identifies a certificate (PEM): the SHA-256 of its DER form."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
    except ValueError as error:
        raise InvalidState(f"no certificate ({error})", "one in PEM", "Check which server was asked.") from None
    return hashlib.sha256(found.public_bytes(Encoding.DER)).digest()


def make_node_key(path: Path) -> tuple[Path, Path]:
    """A node's key pair as ``ssh-keygen -t ecdsa -b 384`` writes it: ``path``, and ``path.pub``."""
    key = generate_private_key(SECP384R1())
    write_atomically(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
    public = path.with_name(path.name + ".pub")
    write_atomically(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return path, public


def _sign(folder: Path, authority: EllipticCurvePrivateKey, hosts: list[str]) -> tuple[Path, Path]:
    server = generate_private_key(SECP384R1())
    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys([*hosts, *HOME])])
    certificate = _certificate(hosts[0], server, authority, SERVER_DAYS, [names, known])
    write_atomically(folder / "server.key", _private(server), private=True)
    write_atomically(folder / "server.pem", certificate.public_bytes(Encoding.PEM))
    return folder / "server.pem", folder / "server.key"


def _private(key: EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(
    name: str, key: EllipticCurvePrivateKey, authority: EllipticCurvePrivateKey, days: int,
    more: list[x509.ExtensionType],
) -> x509.Certificate:  # fmt: skip
    """A certificate of a key; that of the authority itself signs others, and nothing else."""
    signs, now = key is authority, datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, hashes.SHA384())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
