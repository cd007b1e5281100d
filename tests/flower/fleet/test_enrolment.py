"""The routes that the gateway answers itself."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
)

from fairfold.flower.fleet import gateway, superlink
from fairfold.flower.fleet.connection import (
    API_PREFIX,
    public_pem,
)
from fairfold.flower.fleet.control import HEADER, read_secret
from fairfold.flower.fleet.credentials import (
    fingerprint,
)
from fairfold.flower.fleet.enrolment import MAX_REQUEST_BYTES, Enrolment
from fairfold.flower.fleet.gateway import Gateway
from fairfold.flower.fleet.server import ServerFolder
from tests.support.fleet import PUBLIC


class State(SimpleNamespace):
    """What is asked of Flower's state."""

    def __init__(self) -> None:
        super().__init__(nodes={})

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        found: int | None = self.nodes.get(key)
        return found

    def create_node(self, _aid: str, _name: str, key: bytes, _interval: float) -> int:
        self.nodes[key] = 7 + len(self.nodes)
        return int(self.nodes[key])

    def get_node_info(self) -> list[Any]:
        return [SimpleNamespace(node_id=number, status="online", last_activated_at="", registered_at="now")
                for number in self.nodes.values()]  # fmt: skip


def ask(
    server: ServerFolder, state: State, path: str, body: bytes = b"", method: str = "POST", *, operator: bool = False
) -> tuple[int, Any]:
    """What the gateway answers to somebody on the server's machine, or to its operator."""
    sent: list[Any] = []
    waiting = [body]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def nobody(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("a request that was not for the SuperLink")

    factory, secret = SimpleNamespace(state=lambda: state), read_secret(server.control)
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "path": path, "query_string": query.encode(), "method": method,
        "client": ("192.0.2.1", 5), "server": ("192.0.2.1", 8000),
        "headers": [(HEADER.encode(), secret.encode())] if operator else [],
        "app": SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory)),
    }  # fmt: skip
    app = Gateway(nobody, secret=secret, routes=Enrolment(server.folder, server.items, server.roster()).routes)
    asyncio.run(app(scope, receive, send))
    content = b"".join(part.get("body", b"") for part in sent[1:])
    kind = dict(sent[0]["headers"]).get(b"content-type")
    return sent[0]["status"], json.loads(content) if kind == b"application/json" else content


def request(secret: bytes, key: bytes = PUBLIC, off: float = 0.0) -> bytes:
    return json.dumps({"secret": secret.hex(), "key": key.decode(), "time": time.time() + off}).encode()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "REFUSAL_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_device_is_enrolled_once_and_a_refusal_has_a_reason(server: ServerFolder) -> None:
    state, other = State(), public_pem(generate_private_key(SECP384R1()))
    assert ask(server, state, API_PREFIX + "authority", method="GET") == (200, server.authority.read_bytes())
    token = server.invite(60.0)
    assert token.authority == fingerprint(server.authority.read_bytes())
    for off, words in ((5.0, "5 s ahead"), (-301.0, "301 s behind")):
        status, content = ask(server, state, API_PREFIX + "enrol", request(token.secret, off=off))
        assert status == 403
        assert f"wrong clock: this device's is {words}" in content["detail"]
    facts = {"node": "7", "items": 60, "catalogue": False, "users": 1, "signer": server.roster().public.hex()}
    assert ask(server, state, API_PREFIX + "enrol", request(token.secret)) == (200, facts)
    assert ask(server, state, API_PREFIX + "enrol", request(token.secret))[0] == 200, "an answer that was lost"
    assert ask(server, state, API_PREFIX + "enrol", request(token.secret, other)) == (
        410, {"detail": "this token was used before, 0 s ago: it serves one device"}
    )  # fmt: skip
    second = server.invite(60.0)
    many = server.invite(60.0, users=50)
    status, content = ask(server, state, API_PREFIX + "enrol", request(second.secret))
    assert (status, "registered already" in content["detail"]) == (409, True)
    assert ask(server, state, API_PREFIX + "enrol", request(second.secret, other))[0] == 200, "it was not used up"
    third = public_pem(generate_private_key(SECP384R1()))
    assert ask(server, state, API_PREFIX + "enrol", request(many.secret, third))[1]["users"] == 50
    assert [(one.node, one.users) for one in server.roster().entries()] == [(7, 1), (8, 1), (9, 50)]
    assert ask(server, state, API_PREFIX + "catalogue", method="GET")[0] == 404
    log = server.roster().content()
    assert ask(server, state, API_PREFIX + "roster", method="GET") == (200, log)
    for start in (0, 10, len(log), len(log) + 5):
        assert ask(server, state, f"{API_PREFIX}roster?from={start}", method="GET") == (200, log[start:])
    for wrong in ("from=-1", "from=", "from=1&from=2", "from=" + "9" * 30, "line=1"):
        assert ask(server, state, f"{API_PREFIX}roster?{wrong}", method="GET")[0] == 400, wrong


OTHER_CURVE = generate_private_key(SECP256R1()).public_key()
HOSTILE = [
    b"", b"null", b"[]", b"7", b'"x"', b"{}", b"\xff\xfe", b"[" * MAX_REQUEST_BYTES, b'{"a":' * 600,
    b"{" + b" " * (MAX_REQUEST_BYTES - 2) + b"}", request(b"short"), request(b"s" * 16, b"no key"),
    request(b"s" * 16, b""),
    request(b"s" * 16, OTHER_CURVE.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)),
    request(b"s" * 16, PUBLIC[:80]), request(b"s" * 16).replace(b'"time": ', b'"time": "'),
    request(b"s" * 16).replace(b"PUBLIC", b"PRIVATE"), b'{"secret": 7, "key": 7, "time": 7}',
    b'{"secret": "' + b"00" * 16 + b'", "key": "", "time": 1e999}', b'{"secret": null, "key": null, "time": null}',
    b'{"secret": "\\ud800", "key": "\\ud800", "time": 0}',
    request(b"s" * 16).replace(b'"time": ', b'"time": true, "x": '),
]  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_request_is_refused_and_registers_nobody(body: bytes, server: ServerFolder) -> None:
    state = State()
    status, content = ask(server, state, API_PREFIX + "enrol", body)
    assert (status, "not a request to enrol" in content["detail"]) == (400, True)
    assert not state.nodes


@pytest.mark.usefixtures("quick")
def test_long_requests_other_methods_and_operators_questions_without_the_secret_are_refused(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    assert ask(server, state, API_PREFIX + "enrol", bytes(MAX_REQUEST_BYTES + 1))[0] == 413
    assert ask(server, state, API_PREFIX + "enrol", method="GET")[0] == 405
    for question in ("nodes", "runs"):
        assert ask(server, state, API_PREFIX + question, method="GET")[0] == 403
    state.create_node("", "", PUBLIC, 1)
    status, content = ask(server, state, API_PREFIX + "nodes", method="GET", operator=True)
    assert (status, content["nodes"]) == (200, [{"node": "7", "state": "online", "since": "now"}])
    monkeypatch.delattr(State, "get_node_info")
    assert ask(server, state, API_PREFIX + "nodes", method="GET", operator=True) == (
        500, {"detail": "the server failed: see its log"}
    )  # fmt: skip


def test_a_refused_token_takes_its_time(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "REFUSAL_SECONDS", 0.2)
    before = time.monotonic()
    assert ask(server, State(), API_PREFIX + "enrol", request(b"s" * 16))[0] == 404
    assert time.monotonic() - before >= 0.2


def test_refused_nodes_learn_which_of_two_reasons_it_is() -> None:
    from fastapi import HTTPException
    from flwr.superlink.servicer.fleet import fleet_handlers

    class Known(State):
        def activate_node(self, _node: int, _interval: float) -> bool:
            return False

    handlers = SimpleNamespace(activate_node=fleet_handlers.activate_node)
    superlink.explain_refusals(handlers)
    asked = ActivateNodeRequest(public_key=PUBLIC, heartbeat_interval=30)
    with pytest.raises(HTTPException, match=superlink.UNREGISTERED) as unknown:
        handlers.activate_node(request=asked, state=Known())
    state = Known()
    state.create_node("", "", PUBLIC, 1)
    with pytest.raises(HTTPException, match=superlink.EARLY) as early:
        handlers.activate_node(request=asked, state=state)
    assert (unknown.value.status_code, early.value.status_code) == (403, 409)
