"""A device's line to its server: signed requests over TLS, and why one was refused, in words.

An idle device should weigh little, so nothing of Flower is imported here: of its protocol it takes four messages of
one or two fields, which are written out below. Whoever has work to do leaves that to Flower's own client
(:mod:`.worker`).
"""

import http.client
import socket
import ssl
import struct
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from fairfold.errors import InvalidSettings, InvalidState
from fairfold.sealed import table_in

FLEET = "/v1/fleet/"
PORT = 8000
SECONDS = 30.0  # that the server has to answer
LARGEST = 1 << 24  # bytes of an answer: a message here is names of pieces, not pieces
HEARTBEAT = 30.0  # seconds after which the server wants to hear of a device again; twice that, and it counts as gone
LONGEST_PAUSE = 120  # seconds until the next question for work that a server may ask for
AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower allows a device's clock to be ahead of the server's, or behind
EXPIRED, TOO_NEW, OTHER_HOST = 10, 9, (62, 64)  # OpenSSL's numbers for what is wrong with a certificate


class Refused(Exception):
    """The server did not take a request: one word for why (``kind``), what to do, and the server's own words."""

    def __init__(self, kind: str, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.kind, self.detail = kind, detail


def address_of(server: str) -> tuple[str, int]:
    """Host and port of ``https://host:port``, ``host:port`` or ``host``."""
    text = server.strip().removeprefix("https://").rstrip("/")
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdecimal() else (text, "", str(PORT))
    if not host or "/" in host or "://" in text or not 0 < int(port) < 65536:
        raise InvalidSettings(f"server {server!r}", "its name and port", "Write e.g. https://server.example.org:8000.")
    return host.strip("[]"), int(port)


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """A device's own key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError("a key of another kind")
    except (OSError, ValueError) as error:
        raise InvalidState(f"{path}: {error}", "this device's key", "Enrol it again, with a new token.") from None
    return key


def public_form(key: EllipticCurvePrivateKey) -> bytes:
    """The public half, as Flower keeps it."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class Line:
    """A connection to a server, opened when it is needed; without ``authority`` nobody is trusted, nor checked."""

    def __init__(self, server: str, authority: Path | None) -> None:
        self.host, self.port = address_of(server)
        if authority is None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        else:
            try:
                self._context = ssl.create_default_context(cafile=str(authority))
            except (OSError, ssl.SSLError) as error:
                remedy = "Enrol it again, with a new token."
                raise InvalidState(f"{authority}: {error}", "the authority's certificate", remedy) from None
        self._connection: http.client.HTTPSConnection | None = None

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """The body of the answer."""
        return b"".join(self.pieces(method, path, body, headers, LARGEST))

    def pieces(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, most: int = 1 << 40
    ) -> Iterator[bytes]:
        """The same, piece by piece."""
        try:
            response = self._sent(method, path, body, headers or {})
            if response.status != 200:
                raise _refusal(response.status, response.getheader("date"), response.read(1 << 16))
            while piece := response.read(1 << 20):
                most -= len(piece)
                if most < 0:
                    raise Refused("broken", "the server sends more than it should")
                yield piece
        except Refused:
            self.close()
            raise
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise _distrust(error, self.host) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Refused("unreachable", f"{self.host}:{self.port} cannot be reached: {_plain(error)}") from None

    def _sent(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request, anew where the server has closed an old connection in the meantime."""
        if self._connection is not None:
            try:
                self._connection.request(method, path, body, headers)
                return self._connection.getresponse()
            except (
                http.client.RemoteDisconnected,
                BrokenPipeError,
                ConnectionResetError,
                http.client.CannotSendRequest,
                ssl.SSLEOFError,
                ssl.SSLZeroReturnError,
            ):
                self.close()
        self._connection = http.client.HTTPSConnection(self.host, self.port, timeout=SECONDS, context=self._context)
        self._connection.request(method, path, body, headers)
        return self._connection.getresponse()


class Link(Line):
    """The line of an enrolled device, whose every request is signed."""

    def __init__(self, server: str, authority: Path, key: EllipticCurvePrivateKey) -> None:
        super().__init__(server, authority)
        self._key, self._public = key, public_form(key)
        self.pause = 0.0  # seconds after which the server would like to be asked again

    @property
    def heartbeat(self) -> float:
        """Seconds after which the server wants to hear of this device again: longer where it has many."""
        return max(HEARTBEAT, 2.5 * self.pause)

    def activate(self) -> int:
        """Come in; returns the number of this node."""
        request = _bytes_field(1, self._public) + b"\x11" + struct.pack("<d", self.heartbeat)
        return _number(self._call("activate-node", request))

    def deactivate(self, node: int) -> None:
        """Go, so that this node may come back at once."""
        self._call("deactivate-node", b"\x08" + _varint(node))

    def beat(self, node: int) -> bool:
        """Say that this node is there; False if the server does not know it any more."""
        request = _bytes_field(1, b"\x08" + _varint(node)) + b"\x11" + struct.pack("<d", self.heartbeat)
        return _number(self._call("send-node-heartbeat", request)) == 1

    def pull(self, node: int) -> bytes | None:
        """The next message, as it came (Flower's ``PullMessagesResponse``), or None."""
        found = self._call("pull-messages", _bytes_field(1, b"\x08" + _varint(node)))
        if any(field == 2 for field, _ in fields(found)):
            return found
        # Flower's first field is a message of its own, with the seconds in it; fairfold's gate says it there.
        self.pause = float(min(_number(found[2:]), LONGEST_PAUSE)) if found[:1] == b"\x0a" else 0.0
        return None

    def _call(self, name: str, body: bytes) -> bytes:
        clock = datetime.now(UTC).isoformat()
        signature = self._key.sign(clock.encode(), ECDSA(hashes.SHA256()))
        headers = {
            "content-type": "application/protobuf", "accept": "application/protobuf", "flwr-timestamp": clock,
            "flwr-public-key": b64encode(self._public).decode(), "flwr-signature": b64encode(signature).decode(),
        }  # fmt: skip
        return self.ask("POST", FLEET + name, body, headers)


# -- why not -----------------------------------------------------------------------------------------------------------


def _distrust(error: ssl.SSLCertVerificationError, host: str) -> Refused:
    """Why the server's certificate is not taken: another authority, another host, or a clock that is wrong."""
    if error.verify_code in (EXPIRED, TOO_NEW):
        what = "has expired" if error.verify_code == EXPIRED else "is not yet valid"
        here = f"by this device's clock ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC)"
        return Refused("clock", f"the server's certificate {what} {here}: set the clock, or renew the certificate")
    if error.verify_code in OTHER_HOST:
        return Refused("host", f"the server's certificate is not for {host}: use a name that `server init` was given")
    return Refused("authority", "wrong authority: this is not the server that this device has enrolled with")


def _refusal(status: int, date: str | None, body: bytes) -> Refused:
    """Why the server did not take a request."""
    detail = _detail(body)
    if status == 401:
        try:
            off = time.time() - parsedate_to_datetime(date or "").timestamp()
        except (ValueError, TypeError, OverflowError):
            off = 0.0
        if not -BEHIND + 1 < off < AHEAD - 1:  # the server's clock came without its fractions
            words = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the server's"
            return Refused("clock", f"wrong clock: this device's is {words}. Set it")
        return Refused("lost", "the server does not know this node by its key")
    if status == 403:
        return Refused("unregistered", f"unregistered: {detail}. Enrol this device with a new token", detail)
    if status == 409:
        return Refused("early", f"too early: {detail}. It ends within a minute", detail)
    if status in (408, 429, 502, 503, 504):
        return Refused("busy", f"the server is busy (status {status}): {detail}", detail)
    return Refused("refused", f"the server answers with status {status}: {detail}", detail)


def detail_of(body: bytes) -> dict[str, Any]:
    """An object in JSON; an empty one for anything else."""
    try:
        return table_in(body)
    except ValueError:
        return {}


def _detail(body: bytes) -> str:
    found = detail_of(body)
    return _plain(found.get("detail") or found.get("message") or body[:200].decode(errors="replace"))


def _plain(text: object) -> str:
    """A stranger's text as one line of bounded length."""
    if isinstance(text, TimeoutError | socket.timeout) and not str(text):
        text = "no answer in time"
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])


# -- Flower's messages -------------------------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _bytes_field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def fields(content: bytes) -> Iterator[tuple[int, int]]:
    """The fields of a message, each with its number; those that are bytes, with their length."""
    place = 0

    def number() -> int:
        nonlocal place
        found = shift = 0
        while True:
            if place >= len(content) or shift > 63:
                raise Refused("broken", "the server sends what is no message")
            byte = content[place]
            place += 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while place < len(content):
        tag = number()
        kind = tag & 7
        value = number() if kind in (0, 2) else 0
        place += {0: 0, 1: 8, 2: value, 5: 4}.get(kind, len(content))
        if place > len(content):
            raise Refused("broken", "the server sends what is no message")
        yield tag >> 3, value


def _number(content: bytes) -> int:
    """The number in the first field of a message; 0, which is not sent, if there is none."""
    return next((value for field, value in fields(content) if field == 1), 0)
