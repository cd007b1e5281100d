"""Invitations: a token lets one device register its key, once, for some time.

A token holds a secret, which the server knows by its hash alone, and the fingerprint of the server's authority, by
which a device knows that it speaks to the right server before it shows the secret.
"""

import base64
import binascii
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.files import locked, make_private, remove, write_atomically

PREFIX = "ff1-"
SECRET, FINGERPRINT, CHECK = 16, 32, 3  # bytes of a token's parts
FORMAT = 1
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST = 30 * 86400  # seconds that an invitation may be valid for, and that a used or expired one is remembered


class Refused(Exception):
    """A token that is not taken, with the reason; ``status`` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Token:
    """What a device is given."""

    secret: bytes
    authority: bytes  # the fingerprint of its certificate

    def __str__(self) -> str:
        content = self.secret + self.authority
        return PREFIX + base64.urlsafe_b64encode(content + _check(content)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Read a token as it was printed; a typing error is noticed."""
        digits = text.strip().removeprefix(PREFIX)
        content, check = b"", b""
        with contextlib.suppress(binascii.Error, ValueError):
            found = base64.b64decode(digits + "=" * (-len(digits) % 4), altchars=b"-_", validate=True)
            content, check = found[:-CHECK], found[-CHECK:]
        if len(content) != SECRET + FINGERPRINT or _check(content) != check or not text.strip().startswith(PREFIX):
            given = f"token {text[:12]!r}..., which is cut off or has a typing error"
            raise InvalidSettings(given, "one as `fairfold server invite` prints it", "Copy it as a whole.")
        return cls(content[:SECRET], content[SECRET:])


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:CHECK]


@dataclass(frozen=True)
class Invitation:
    """What the server keeps of a token."""

    made: float
    expires: float
    used: float | None = None
    key: str | None = None  # the hash of the public key that it was used for


class Invitations:
    """A folder with a file for every invitation, named by the hash of its secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, authority: bytes, valid: float) -> Token:
        """A new one; those that ended long ago are forgotten."""
        make_private(self.folder)
        token, now = Token(secrets.token_bytes(SECRET), authority), time.time()
        with locked(self.folder):
            for path in self.folder.glob("*.json"):
                with contextlib.suppress(InvalidState):
                    if _read(path).expires < now - LONGEST:
                        remove(path)
            _write(self._path(token.secret), Invitation(now, now + valid))
        return token

    @contextlib.contextmanager
    def use(self, secret: bytes, key: bytes) -> Iterator[bool]:
        """Use an invitation up for a public key: False if that key has done so before, whose answer may have been lost.

        It is given back if what is done with it raises; a server that is killed meanwhile has used it up.
        """
        path, now, digest = self._path(secret), time.time(), hashlib.sha256(key).hexdigest()
        make_private(self.folder)
        with locked(self.folder):
            if not path.exists():
                raise Refused(404, "unknown token: this server has not given it out, or has forgotten it")
            try:
                found = _read(path)
            except InvalidState:
                raise Refused(409, "the server's note of this token is damaged: ask for another one") from None
            if found.used is not None and found.key != digest:
                raise Refused(410, f"this token was used before, {_ago(now - found.used)}: it serves one device")
            if found.used is None and found.expires < now:
                raise Refused(410, f"this token expired {_ago(now - found.expires)}: ask for another one")
            if found.used is None:
                _write(path, replace(found, used=now, key=digest))
            try:
                yield found.used is None
            except BaseException:
                _write(path, found)
                raise

    def counts(self) -> dict[str, int]:
        """How many are open, used and expired."""
        found, now = {"open": 0, "used": 0, "expired": 0}, time.time()
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(InvalidState):
                one = _read(path)
                found["used" if one.used is not None else "expired" if one.expires < now else "open"] += 1
        return found

    def _path(self, secret: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(secret).hexdigest()}.json"


def _read(path: Path) -> Invitation:
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        found = Invitation(**content)
        if not all(isinstance(time, float) for time in (found.made, found.expires, found.used or 0.0)):
            raise ValueError("times that are none")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidState(f"{path}: {error}", "an invitation", "Remove the file, and invite again.") from None
    return found


def _write(path: Path, invitation: Invitation) -> None:
    write_atomically(path, json.dumps({"format": FORMAT, **asdict(invitation)}).encode(), private=True)


def _ago(seconds: float) -> str:
    unit = next((unit for unit in "dhm" if seconds >= UNITS[unit]), "s")
    return f"{int(seconds // UNITS[unit])} {unit} ago"


def seconds_of(text: str) -> float:
    """``90s``, ``30m``, ``24h`` or ``7d`` as seconds."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST:
        raise InvalidSettings(f"--valid {text!r}", "a time of at most 30 days", "Write e.g. 30m, 24h or 7d.")
    return float(seconds)
