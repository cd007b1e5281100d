"""The page over HTTP: an ASGI application of four addresses, for the loopback interface, or for who has the token."""

import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from fairfold.watch.prometheus import exposition
from fairfold.watch.told import Watched, finite

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
STATIC = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
          "/page.css": ("page.css", "text/css")}  # fmt: skip
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d+)?")  # a name or an address, and a port
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


def watching(run: Watched, token: str | None = None) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The application for one run.

    With a token only who brings it is answered (``Authorization: Bearer``, or ``?token=`` for the page itself); without
    one only who calls this machine by a name of its loopback interface, so that no other site can ask in a browser.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            status, kind, content = _answer(scope, run, token)
            headers = [*HEADERS, (b"content-type", f"{kind}; charset=utf-8".encode())]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = b"" if scope["method"] == "HEAD" else content
            await send({"type": "http.response.body", "body": body})

    return app


def _answer(scope: Scope, run: Watched, token: str | None) -> tuple[int, str, bytes]:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    if scope["method"] not in ("GET", "HEAD"):
        return 405, "text/plain", b"This page only shows.\n"
    path = scope["path"]
    if token is None:
        host = HOST.fullmatch(headers.get("host", ""))
        if host is None or host[1] not in LOOPBACK:
            return 403, "text/plain", b"Without a token this page is for this machine alone: see --token.\n"
    elif path not in ("/page.js", "/page.css"):  # which say nothing of any run
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        given = headers.get("authorization", "").removeprefix("Bearer ") or asked
        if not hmac.compare_digest(given.encode(), token.encode()):
            return 401, "text/plain", b"This page asks for its token: ?token=... or Authorization: Bearer.\n"
    if path in STATIC:
        file, kind = STATIC[path]
        return 200, kind, (resources.files("fairfold.watch") / "static" / file).read_bytes()
    if path == "/status.json":
        return 200, "application/json", json.dumps(finite(run.told()), allow_nan=False).encode()
    if path == "/metrics":
        return 200, "text/plain; version=0.0.4", exposition(run.told()).encode()
    return 404, "text/plain", b"There is /, /status.json and /metrics.\n"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return
