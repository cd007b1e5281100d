"""Certificates, node keys, and the tokens by which a device enrols.

A token lets one device register its key, once, for some time: it holds a secret, of which the server stores the hash
alone, and the fingerprint of the server's authority, which a device checks before it sends the secret.
"""

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as PrivateKey
from cryptography.x509.oid import NameOID

from fairfold.atomic_io import locked, make_private_folder, remove, write_atomically
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.privacy.secure.log import MAX_USERS

AUTHORITY_DAYS, SERVER_DAYS = 3650, 398
RENEWED_BEFORE = 30  # days before its expiry from which on a server's certificate is renewed
LOOPBACK_NAMES = ("localhost", "127.0.0.1")  # Flower's own helper connects to the second
AUTHORITY = "fairfold authority"
PEM = forms.Encoding.PEM

TOKEN_PREFIX = "ff1-"
SECRET_BYTES, FINGERPRINT_BYTES, CHECK_BYTES = 16, 32, 3  # the parts of a token
FORMAT = 2  # of an invitation's file
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_VALID_SECONDS = 30 * 86400  # of an invitation; a used or expired one is remembered for as long


def make_certificates(folder: Path, hosts: list[str]) -> tuple[Path, Path, Path]:
    """Make a certificate authority, and a server certificate signed by it for some hosts and the loopback interface.

    Devices pin the authority; its key is needed only for :func:`renew_certificate`, and may be stored elsewhere.
    """
    authority = generate_private_key(SECP384R1())
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    certificate = _certificate(AUTHORITY, authority, authority, AUTHORITY_DAYS, [own])
    make_private_folder(folder)
    write_atomically(folder / "ca.crt", certificate.public_bytes(PEM))
    _write_key(folder / "ca.key", authority)
    return folder / "ca.crt", *_sign(folder, authority, hosts)


def renew_certificate(folder: Path, hosts: list[str]) -> str | None:
    """Renew a server's certificate if it expires soon or lacks a host; returns what was done, or why it cannot be."""
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    if left > timedelta(days=RENEWED_BEFORE) and all(_host(host) in names for host in hosts):
        return None
    try:
        key = forms.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        if not isinstance(key, PrivateKey):
            raise ValueError("not a key of this kind")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return f"the certificate has {left.days} days left, and {folder / 'ca.key'} cannot be read ({error})"
    _sign(folder, key, hosts)
    return "the server's certificate was renewed"


def fingerprint(certificate: bytes) -> bytes:
    """The SHA-256 of a certificate (given in PEM) in its DER form."""
    try:
        return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256())
    except ValueError as error:
        raise InvalidState(f"no certificate ({error})", "one in PEM", "Check the server's address.") from None


def make_node_key(path: Path) -> tuple[Path, Path]:
    """Write a node's key pair as ``ssh-keygen -t ecdsa -b 384`` does: ``path``, and ``path.pub``."""
    key = generate_private_key(SECP384R1())
    _write_key(path, key, forms.PrivateFormat.OpenSSH)
    public = path.with_name(path.name + ".pub")
    line = key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH) + b"\n"
    write_atomically(public, line)
    return path, public


def _sign(folder: Path, authority: PrivateKey, hosts: list[str]) -> tuple[Path, Path]:
    server = generate_private_key(SECP384R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    names = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys([*hosts, *LOOPBACK_NAMES])])
    certificate = _certificate(hosts[0], server, authority, SERVER_DAYS, [names, issuer])
    _write_key(folder / "server.key", server)
    write_atomically(folder / "server.pem", certificate.public_bytes(PEM))
    return folder / "server.pem", folder / "server.key"


def _write_key(path: Path, key: PrivateKey, form: forms.PrivateFormat = forms.PrivateFormat.PKCS8) -> None:
    write_atomically(path, key.private_bytes(PEM, form, forms.NoEncryption()), private=True)


def _certificate(
    name: str, key: PrivateKey, authority: PrivateKey, days: int, extensions: list[x509.ExtensionType]
) -> x509.Certificate:
    """Make a certificate of a key, signed by an authority; that of the authority itself may sign others only."""
    signs, now = key is authority, datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(_common_name(AUTHORITY))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, hashes.SHA384())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


class TokenRefused(Exception):
    """A token that is not accepted, with the reason and an HTTP ``status``."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Token:
    """An invitation as a device receives it."""

    secret: bytes
    authority: bytes  # the fingerprint of its certificate

    def __str__(self) -> str:
        content = self.secret + self.authority
        return TOKEN_PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Read a token as it was printed; its check bytes detect typing errors."""
        digits = text.strip().removeprefix(TOKEN_PREFIX)
        decoded = b""
        with contextlib.suppress(binascii.Error, ValueError):
            decoded = base64.b64decode(digits + "=" * (-len(digits) % 4), altchars=b"-_", validate=True)
        content = decoded[:-CHECK_BYTES]
        is_whole = len(content) == SECRET_BYTES + FINGERPRINT_BYTES and _check(content) == decoded[-CHECK_BYTES:]
        if not is_whole or not text.strip().startswith(TOKEN_PREFIX):
            given = f"token {text[:12]!r}..., which is cut off or has a typing error"
            raise InvalidSettings(given, "one as `fairfold server invite` prints it", "Copy it as a whole.")
        return cls(content[:SECRET_BYTES], content[SECRET_BYTES:])


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:CHECK_BYTES]


@dataclass(frozen=True)
class Invitation:
    """What the server stores of a token: times in seconds since the epoch."""

    created: float
    expires: float
    used: float | None = None
    key: str | None = None  # the hash of the public key that it was used for
    users: int = 1  # the most users that the device may act for


class Invitations:
    """A folder with a file for every invitation, named by the hash of its secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, authority: bytes, valid: float, users: int = 1) -> Token:
        """Create a token for a device of some users, valid for some seconds; remove those that expired long ago."""
        make_private_folder(self.folder)
        token = Token(secrets.token_bytes(SECRET_BYTES), authority)
        now = time.time()
        with locked(self.folder):
            for path in self.folder.glob("*.json"):
                with contextlib.suppress(InvalidState):
                    if _read(path).expires < now - MAX_VALID_SECONDS:
                        remove(path)
            _write(self._path(token.secret), Invitation(now, now + valid, users=users))
        return token

    @contextlib.contextmanager
    def use(self, secret: bytes, key: bytes) -> Iterator[Invitation]:
        """Use an invitation for a public key; yields it as it was: used, if its response was lost.

        It becomes unused again if the block raises; a server that is killed meanwhile has used it.
        """
        path = self._path(secret)
        now = time.time()
        digest = hashlib.sha256(key).hexdigest()
        make_private_folder(self.folder)
        with locked(self.folder):
            if not path.exists():
                raise TokenRefused(404, "unknown token: this server has not issued it, or has forgotten it")
            try:
                stored = _read(path)
            except InvalidState:
                raise TokenRefused(409, "the server's file of this token is damaged: ask for another one") from None
            if stored.used is not None and stored.key != digest:
                raise TokenRefused(410, f"this token was used before, {_ago(now - stored.used)}: it serves one device")
            if stored.used is None:
                if stored.expires < now:
                    raise TokenRefused(410, f"this token expired {_ago(now - stored.expires)}: ask for another one")
                _write(path, replace(stored, used=now, key=digest))
            try:
                yield stored
            except BaseException:
                _write(path, stored)
                raise

    def counts(self) -> dict[str, int]:
        """The number of open, used and expired invitations."""
        counts = {"open": 0, "used": 0, "expired": 0}
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(InvalidState):
                stored = _read(path)
                expired = stored.expires < time.time()
                counts["used" if stored.used is not None else "expired" if expired else "open"] += 1
        return counts

    def _path(self, secret: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(secret).hexdigest()}.json"


def _read(path: Path) -> Invitation:
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        stored = Invitation(**content)
        if not all(isinstance(value, float) for value in (stored.created, stored.expires, stored.used or 0.0)):
            raise ValueError("times that are no numbers")
        if type(stored.users) is not int or not 1 <= stored.users <= MAX_USERS:
            raise ValueError("no number of users")
        return stored
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidState(f"{path}: {error}", "an invitation", "Remove the file, and invite again.") from None


def _write(path: Path, invitation: Invitation) -> None:
    write_atomically(path, json.dumps({"format": FORMAT, **asdict(invitation)}).encode(), private=True)


def _ago(seconds: float) -> str:
    unit = next((unit for unit in "dhm" if seconds >= UNITS[unit]), "s")
    return f"{int(seconds // UNITS[unit])} {unit} ago"


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``90s``, ``30m``, ``24h`` or ``7d``."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_VALID_SECONDS:
        raise InvalidSettings(f"--valid {text!r}", "a time of at most 30 days", "Write e.g. 30m, 24h or 7d.")
    return float(seconds)
