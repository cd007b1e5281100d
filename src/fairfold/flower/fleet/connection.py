"""HTTPS connections of a node to its server: signed requests, and why a request was refused.

An idle node should need little memory, so nothing of Flower is imported: the short messages that it needs are encoded
by :mod:`fairfold.device.protobuf`. The worker leaves that to Flower's own client (:mod:`.worker`).
"""

import contextlib
import http.client
import ssl
import time
from base64 import b64encode
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from fairfold.checksums import parse_json_object
from fairfold.device.protobuf import Fields, bytes_field, double_field, number_field, parse_fields
from fairfold.errors import InvalidMessage, InvalidSettings, InvalidState

FLEET_API = "/v1/fleet/"  # Flower's endpoints for nodes
API_PREFIX = "/v1/fairfold/"  # the gateway's own endpoints (:mod:`.enrolment`)
DEFAULT_PORT = 8000
RESPONSE_TIMEOUT = 30.0  # seconds
MAX_RESPONSE_BYTES = 1 << 24  # messages here list the names of objects, not their content
MAX_ROSTER = 1 << 28  # bytes: a line has about 400
HEARTBEAT_SECONDS = 30.0  # a node that was silent for twice its interval counts as disconnected
MAX_POLL_SECONDS = 120  # the longest pause between two polls that a server may ask for
CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 305.0  # seconds that Flower allows a node's clock to be ahead or behind
ENROL_AGAIN = "Enrol it again, with a new token."
EXPIRED = 10
NOT_YET_VALID = 9
OTHER_HOST = (62, 64)  # OpenSSL's codes of certificate errors


class RefusedByServer(Exception):
    """A request that the server did not accept: the ``kind`` of reason, a message, and the server's own ``detail``."""

    def __init__(self, kind: str, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.kind, self.detail = kind, detail


def parse_address(server: str) -> tuple[str, int]:
    """Host and port of ``https://host:port``, ``host:port`` or ``host``."""
    text = server.strip().removeprefix("https://").rstrip("/")
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdecimal() else (text, "", str(DEFAULT_PORT))
    if not host or "/" in host or "://" in text or not 0 < int(port) < 65536:
        raise InvalidSettings(f"server {server!r}", "its name and port", "Write e.g. https://server.example.org:8000.")
    return host.strip("[]"), int(port)


def read_key(path: Path) -> EllipticCurvePrivateKey:
    """Read a node's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ValueError("a key of another kind")
    except (OSError, ValueError) as error:
        raise InvalidState(f"{path}: {error}", "this device's key", ENROL_AGAIN) from None
    return key


def public_pem(key: EllipticCurvePrivateKey) -> bytes:
    """The public key in PEM, the form that Flower stores."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def clock_difference(seconds: float) -> str:
    """A clock's difference from the server's in words: ``"60 s ahead of the server's"``."""
    return f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's"


class ServerConnection:
    """A TLS connection to a server, opened on the first request; without ``authority`` no certificate is checked."""

    def __init__(self, server: str, authority: Path | None) -> None:
        self.host, self.port = parse_address(server)
        if authority is None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        else:
            try:
                self._context = ssl.create_default_context(cafile=str(authority))
            except OSError as error:
                raise InvalidState(f"{authority}: {error}", "the authority's certificate", ENROL_AGAIN) from None
        self._connection: http.client.HTTPSConnection | None = None

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def request(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """Send a request and return the body of the response."""
        return b"".join(self.stream(method, path, body, headers, MAX_RESPONSE_BYTES))

    def stream(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, max_bytes: int = 1 << 40
    ) -> Iterator[bytes]:
        """Send a request and yield the body of the response in pieces of at most 1 MiB."""
        try:
            response = self._send(method, path, body, headers or {})
            if response.status != 200:
                raise _http_refusal(response.status, response.getheader("date"), response.read(1 << 16))
            while piece := response.read(1 << 20):
                max_bytes -= len(piece)
                if max_bytes < 0:
                    raise RefusedByServer("broken", "the server sends more than it should")
                yield piece
        except RefusedByServer:
            self.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise _certificate_refusal(error, self.host) from None
            reason = _one_line(str(error) or "no response in time")
            raise RefusedByServer("unreachable", f"{self.host}:{self.port} cannot be reached: {reason}") from None

    def _send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request, on a new connection where the server has closed the old one in the meantime."""
        if self._connection is not None:
            try:
                self._connection.request(method, path, body, headers)
                return self._connection.getresponse()
            except (ConnectionError, http.client.CannotSendRequest, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                self.close()
        options: dict[str, Any] = {"timeout": RESPONSE_TIMEOUT, "context": self._context}
        self._connection = http.client.HTTPSConnection(self.host, self.port, **options)
        self._connection.request(method, path, body, headers)
        return self._connection.getresponse()


def stream_roster(server: str, authority: Path, start: int = 0) -> Generator[bytes]:
    """The server's signed log of enrolled keys from a byte on, in pieces."""
    try:
        with contextlib.closing(ServerConnection(server, authority)) as connection:
            yield from connection.stream("GET", f"{API_PREFIX}roster?from={start}", max_bytes=MAX_ROSTER)
    except RefusedByServer as refused:
        needed = "a server that shows its roster"
        raise InvalidState(refused.detail or str(refused), needed, "Try again.") from None


class NodeConnection(ServerConnection):
    """Flower's fleet API for an enrolled node, which signs every request with its key."""

    def __init__(self, server: str, authority: Path, key: EllipticCurvePrivateKey) -> None:
        super().__init__(server, authority)
        self._key, self._public = key, public_pem(key)
        self.poll_interval = 0.0  # seconds between two polls that the server asks for

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: longer where the server has many nodes."""
        return max(HEARTBEAT_SECONDS, 2.5 * self.poll_interval)

    def activate(self) -> int:
        """Connect this node; returns its id."""
        request = bytes_field(1, self._public) + double_field(2, self.heartbeat_interval)
        return _first_number(self.call("activate-node", request))

    def deactivate(self, node: int) -> None:
        """Disconnect this node, so that it may connect again at once."""
        self.call("deactivate-node", number_field(1, node))

    def send_heartbeat(self, node: int) -> bool:
        """Send a heartbeat; False if the server no longer holds this node's connection."""
        request = bytes_field(1, number_field(1, node)) + double_field(2, self.heartbeat_interval)
        return _first_number(self.call("send-node-heartbeat", request)) == 1

    def pull(self, node: int) -> bytes | None:
        """Poll for the next message: Flower's serialized ``PullMessagesResponse``, or None."""
        response = self.call("pull-messages", bytes_field(1, number_field(1, node)))
        fields = _fields(response)
        if 2 in fields:
            return response
        # The gateway puts the seconds until the next poll into Flower's first field, `reconnect`.
        interval = fields.get(1, [b""])[0]
        seconds = _first_number(interval) if isinstance(interval, bytes) else 0
        self.poll_interval = float(min(seconds, MAX_POLL_SECONDS))
        return None

    def call(self, name: str, body: bytes) -> bytes:
        """Send a signed request to one of Flower's endpoints, and return the body of the response."""
        now = datetime.now(UTC).isoformat()
        signature = self._key.sign(now.encode(), ECDSA(hashes.SHA256()))
        headers = dict.fromkeys(("content-type", "accept"), "application/protobuf") | {"flwr-timestamp": now}
        headers["flwr-public-key"] = b64encode(self._public).decode()
        headers["flwr-signature"] = b64encode(signature).decode()
        return self.request("POST", FLEET_API + name, body, headers)


def _certificate_refusal(error: ssl.SSLCertVerificationError, host: str) -> RefusedByServer:
    if error.verify_code in (EXPIRED, NOT_YET_VALID):
        what = "has expired" if error.verify_code == EXPIRED else "is not yet valid"
        now = f"by this device's clock ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC)"
        return RefusedByServer("clock", f"the server's certificate {what} {now}: set the clock, or renew it")
    if error.verify_code in OTHER_HOST:
        return RefusedByServer("host", f"the server's certificate is not for {host}: use the name of `server init`")
    return RefusedByServer("authority", "wrong authority: this is not the server that this device has enrolled with")


def _http_refusal(status: int, date: str | None, body: bytes) -> RefusedByServer:
    content = json_object(body)
    detail = _one_line(content.get("detail") or content.get("message") or body[:200].decode(errors="replace"))
    if status == 401:
        try:
            ahead = time.time() - parsedate_to_datetime(date or "").timestamp()
        except (ValueError, TypeError, OverflowError):
            ahead = 0.0
        if not -CLOCK_BEHIND + 1 < ahead < CLOCK_AHEAD - 1:  # the header has no fractions of a second
            return RefusedByServer("clock", f"wrong clock: this device's is {clock_difference(ahead)}. Set it")
        return RefusedByServer("lost", "the server does not know this node by its key")
    if status == 403:
        return RefusedByServer("unregistered", f"unregistered: {detail}. Enrol this device with a new token", detail)
    if status == 409:
        return RefusedByServer("early", f"too early: {detail}. It ends within a minute", detail)
    if status in (408, 429, 502, 503, 504):
        return RefusedByServer("busy", f"the server is busy (status {status}): {detail}", detail)
    return RefusedByServer("refused", f"the server responds with status {status}: {detail}", detail)


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; an empty one for anything else."""
    try:
        return parse_json_object(body)
    except ValueError:
        return {}


def _one_line(text: object) -> str:
    """Untrusted text as one printable line of bounded length."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300])


def _fields(content: bytes) -> Fields:
    """The fields of one of the server's messages."""
    try:
        return parse_fields(content)
    except InvalidMessage:
        raise RefusedByServer("broken", "the server sends what is no message") from None


def _first_number(content: bytes) -> int:
    """The value of a message's first field; 0, which protobuf does not send, if it is absent."""
    first = _fields(content).get(1, [0])[0]
    return first if isinstance(first, int) else 0
