"""The page of a fleet: static, strict about what it may load, and open to everybody before joining."""

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

from fairfold.config import Settings
from fairfold.flower.fleet.enrolment import SAMPLE, Enrolment
from fairfold.flower.fleet.gateway import Gateway
from fairfold.flower.fleet.page import page_routes
from fairfold.flower.fleet.server import ServerFolder


async def nothing(*_: Any) -> None:
    raise AssertionError("forwarded to Flower")


def requested(gateway: Gateway, path: str, method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, Any]] = []
    state = type("State", (), {"linkstate_factory": type("Factory", (), {"state": lambda _self: None})()})()
    scope = {"type": "http", "path": path, "method": method, "headers": [], "client": ["127.0.0.1", 1]}
    scope["app"] = type("App", (), {"state": state})()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(gateway(scope, receive, send))  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), body


def test_page_and_script_are_static_and_load_nothing_from_elsewhere() -> None:
    gateway = Gateway(nothing, routes=page_routes())
    for path, kind in (("/", b"text/html"), ("/device.js", b"text/javascript")):
        status, headers, body = requested(gateway, path)
        assert status == 200
        assert headers[b"content-type"].startswith(kind)
        assert headers[b"x-content-type-options"] == b"nosniff"
        policy = dict(
            part.strip().partition(" ")[::2] for part in headers[b"content-security-policy"].decode().split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert {policy[key] for key in ("script-src", "worker-src", "connect-src")} == {"'self'"}
        assert not re.search(rb"""(src|href)=["']?(https?:)?//""", gzip.decompress(body))
    assert requested(gateway, "/", "POST")[0] == 405
    for other in ("/device.html", "/../server.toml", "/keys/ca.key", "//device.js"):
        assert requested(gateway, other)[0] in (403, 404)


def test_a_person_reads_who_runs_the_fleet_before_joining(tmp_path: Path) -> None:
    server = ServerFolder.create(tmp_path / "server", Settings(), "localhost", items=50, operator="A library")
    gateway = Gateway(nothing, routes=Enrolment.of(server.folder).routes)
    described = json.loads(requested(gateway, "/v1/fairfold/fleet")[2])
    assert described == {
        "operator": "A library", "items": 50, "privacy": "plain", "authority": described["authority"],
        "catalogue": False, "sample": False,
    }  # fmt: skip
    assert len(described["authority"]) == 64


def test_example_data_is_there_where_the_operator_put_it(tmp_path: Path) -> None:
    server = ServerFolder.create(tmp_path / "server", Settings(), "localhost", items=50, privacy=False)
    gateway = Gateway(nothing, routes=Enrolment.of(server.folder).routes)
    assert json.loads(requested(gateway, "/v1/fairfold/fleet")[2])["privacy"] == ""  # decided when a run begins
    (server.folder / SAMPLE).write_text("user,item\na,1\n")
    assert requested(gateway, "/v1/fairfold/sample")[2] == b"user,item\na,1\n"
