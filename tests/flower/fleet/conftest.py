"""Fixtures of a server's folder, and of a server that sends what the test sets."""

import ssl
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from fairfold.flower.fleet.credentials import (
    make_certificates,
)
from fairfold.flower.fleet.server import ServerFolder
from tests.support.fleet import FakeServer
from tests.support.settings import make_settings


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    return ServerFolder.create(tmp_path / "server", make_settings(rounds=2), "localhost", port=9, items=60)


@pytest.fixture
def fake_server(tmp_path: Path) -> Iterator[tuple[type[FakeServer], str]]:
    """A server of ours at home, and its address."""
    ca, certificate, key = make_certificates(tmp_path / "server-keys", ["localhost"])

    class Mine(FakeServer):
        pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    http_server.daemon_threads = True
    http_server.socket = context.wrap_socket(http_server.socket, server_side=True)
    http_server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Mine, f"localhost:{http_server.server_port}"
    http_server.shutdown()
    thread.join()
    http_server.server_close()
