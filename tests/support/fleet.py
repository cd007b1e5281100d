"""What tests of a fleet share: a key, and a server over TLS that sends what the test sets."""

from http.server import BaseHTTPRequestHandler
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key

from fairfold.flower.fleet.connection import (
    public_pem,
)

AUTHORITY = bytes(range(32))
KEY = generate_private_key(SECP384R1())
PUBLIC = public_pem(KEY)


class FakeServer(BaseHTTPRequestHandler):
    """A server that answers what the test says, over TLS."""

    protocol_version = "HTTP/1.1"
    status, body, date = 200, b"", ""

    def do_POST(self) -> None:
        type(self).asked = self.rfile.read(int(self.headers["content-length"] or 0))  # type: ignore[attr-defined]
        type(self).headers_seen = self.headers  # type: ignore[attr-defined]
        body = self.body  # the test may set the next one as soon as it has seen the headers
        self.send_response_only(self.status)
        for name, value in (("content-length", str(len(body))), ("date", self.date or self.date_time_string())):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass
