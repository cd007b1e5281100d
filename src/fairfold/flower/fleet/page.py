"""The page by which a browser becomes a device of the fleet: two static files, from the origin of the fleet's API.

A browser lets a page call no other origin. The page loads nothing from elsewhere, no other site may frame it, and its
script is the built file of ``browser/`` (docs/devices.md).
"""

import gzip
from importlib.resources import files

from fairfold.flower.fleet.enrolment import HttpResponse, Route

SHELL = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>A device of a fleet</title><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<script defer src="/device.js"></script></head>
<body><main><noscript>This page is a program that trains in your browser: it needs JavaScript.</noscript></main></body>
</html>
"""
POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-encoding", b"gzip"),
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # a new server's page must not work with an old script
)


def page_routes() -> dict[str, Route]:
    """The routes of the page and its script, which is a page's worker and its service worker too."""
    script = files("fairfold.device").joinpath("browser.js").read_bytes()
    return {
        "/": _static(SHELL.encode(), b"text/html; charset=utf-8"),
        "/device.js": _static(script, b"text/javascript; charset=utf-8"),
    }


def _static(content: bytes, kind: bytes) -> Route:
    response = HttpResponse(200, gzip.compress(content, mtime=0), ((b"content-type", kind), *HEADERS))
    return Route("GET", lambda _state, _body: response)
