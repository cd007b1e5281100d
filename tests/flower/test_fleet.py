"""Tokens, certificates, the gate's own answers, a device's line to its server: what a fleet stands on, without one."""

import asyncio
import contextlib
import json
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import Message as MessageProto
from typer.testing import CliRunner

from fairfold import files
from fairfold.cli import app
from fairfold.errors import InvalidData, InvalidSettings, InvalidState
from fairfold.flower import link as link_module
from fairfold.flower import superlink, watch
from fairfold.flower.keys import RENEWED_BEFORE, fingerprint, make_certificates, make_node_key, renew
from fairfold.flower.link import Line, Link, Refused, address_of, fields, public_form, read_key
from fairfold.flower.node import NodeFolder, enrol
from fairfold.flower.processes import free_ports, listening
from fairfold.flower.reception import LARGEST, OWN, Reception
from fairfold.flower.server import ServerFolder, read_catalogue
from fairfold.flower.superlink import Gate
from fairfold.flower.tokens import Invitations, Token, seconds_of
from fairfold.flower.tokens import Refused as TokenRefused
from fairfold.privacy.accounting import part_of, sigma_for
from fairfold.privacy.ledger import LEDGER, Entry, Ledger
from fairfold.settings import Settings
from tests.flat import flat

AUTHORITY = bytes(range(32))
KEY = generate_private_key(SECP384R1())
PUBLIC = public_form(KEY)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_token_is_read_as_it_was_printed_and_a_typing_error_is_noticed() -> None:
    token = Token(b"s" * 16, AUTHORITY)
    assert Token.parse(f" {token}\n") == token
    text = str(token)
    wrong = ["", "ff1-", "ff1-ü", text[:-1], text + "A", text[4:], "x" * len(text)]
    wrong += [text[:place] + ("B" if text[place] != "B" else "C") + text[place + 1 :] for place in range(4, len(text))]
    for one in wrong:
        with pytest.raises(InvalidSettings, match="typing error"):
            Token.parse(one)


def used(folder: Path, secret: bytes, key: bytes = PUBLIC) -> bool:
    with Invitations(folder).use(secret, key) as first:
        return first


def test_a_token_serves_one_device_once(tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert used(tmp_path, token.secret)
    assert not used(tmp_path, token.secret), "the same device again, whose answer was lost"
    with pytest.raises(TokenRefused, match="used before") as refused:
        used(tmp_path, token.secret, b"another key")
    assert refused.value.status == 410
    with pytest.raises(TokenRefused, match="unknown"):
        used(tmp_path, b"x" * 16)
    assert Invitations(tmp_path).counts() == {"open": 0, "used": 1, "expired": 0}
    kept = b"".join(path.read_bytes() + path.name.encode() for path in tmp_path.iterdir())
    assert token.secret not in kept
    assert token.secret.hex().encode() not in kept, "known by its hash alone"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_a_token_that_could_not_be_used_is_given_back(tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    with pytest.raises(ZeroDivisionError), Invitations(tmp_path).use(token.secret, PUBLIC):
        _ = 1 / 0
    assert used(tmp_path, token.secret, b"another key")


def test_a_token_expires_and_is_forgotten_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, now = Invitations(tmp_path).create(AUTHORITY, 60.0), time.time()
    monkeypatch.setattr("fairfold.flower.tokens.time.time", lambda: now + 7261)
    with pytest.raises(TokenRefused, match="expired 2 h ago"):
        used(tmp_path, token.secret)
    assert Invitations(tmp_path).counts() == {"open": 0, "used": 0, "expired": 1}
    monkeypatch.setattr("fairfold.flower.tokens.time.time", lambda: now + 31 * 86400)
    Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert Invitations(tmp_path).counts() == {"open": 1, "used": 0, "expired": 0}


DAMAGED = [
    "", "{}", "[]", "null", '{"format": 1}', '{"format": 2, "made": 1.0}', "{" * 99999,
    '{"format": 1, "made": "a", "expires": "z", "used": null, "key": null}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_note_of_a_token_is_refused_with_words(content: str, tmp_path: Path) -> None:
    token = Invitations(tmp_path).create(AUTHORITY, 60.0)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    with pytest.raises(TokenRefused, match="damaged"):
        used(tmp_path, token.secret)
    Invitations(tmp_path).create(AUTHORITY, 60.0)
    assert Invitations(tmp_path).counts()["open"] == 1


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0s", "1y", "31d", "1.5h", "999999999d"])
def test_times_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidSettings, match="at most 30 days"):
        seconds_of(text)
    assert (seconds_of("90s"), seconds_of("24h"), seconds_of("7d")) == (90.0, 86400.0, 604800.0)


# -- certificates ------------------------------------------------------------------------------------------------------


def names_in(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def test_a_server_is_known_by_its_name_and_at_home(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["server.example.org"])
    assert names_in(tmp_path / "server.pem") == {"server.example.org", "localhost", "127.0.0.1"}
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600


def test_a_certificate_is_made_anew_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, certificate, _ = make_certificates(tmp_path, ["a.example"])
    before, authority = certificate.read_bytes(), ca.read_bytes()
    assert renew(tmp_path, ["a.example"]) is None
    assert certificate.read_bytes() == before
    assert "anew" in str(renew(tmp_path, ["b.example"]))
    assert "b.example" in names_in(certificate)
    monkeypatch.setattr("fairfold.flower.keys.SERVER_DAYS", RENEWED_BEFORE - 1)
    make_certificates(tmp_path / "old", ["a.example"])
    monkeypatch.undo()
    assert "anew" in str(renew(tmp_path / "old", ["a.example"]))
    assert renew(tmp_path / "old", ["a.example"]) is None
    (tmp_path / "ca.key").unlink()
    assert "ca.key" in str(renew(tmp_path, ["c.example"]))
    assert ca.read_bytes() == authority, "devices pin it"


# -- what the gate answers itself --------------------------------------------------------------------------------------


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


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    return ServerFolder.create(tmp_path / "server", flat(rounds=2), "localhost", port=9, items=60)


def ask(
    server: ServerFolder, state: State, path: str, body: bytes = b"", method: str = "POST", client: str = "192.0.2.7"
) -> tuple[int, Any]:
    """What the gate answers to somebody from elsewhere."""
    sent: list[Any] = []
    waiting = [body]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def nobody(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("a request that was not for the SuperLink")

    factory = SimpleNamespace(state=lambda: state)
    scope = {
        "type": "http", "path": path, "method": method, "client": (client, 5), "server": ("192.0.2.1", 8000),
        "app": SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory)),
    }  # fmt: skip
    gate = Gate(nobody, routes=Reception(server.folder, server.items).routes)
    asyncio.run(gate(scope, receive, send))
    content = b"".join(part.get("body", b"") for part in sent[1:])
    kind = dict(sent[0]["headers"]).get(b"content-type")
    return sent[0]["status"], json.loads(content) if kind == b"application/json" else content


def request(secret: bytes, key: bytes = PUBLIC, off: float = 0.0) -> bytes:
    return json.dumps({"secret": secret.hex(), "key": key.decode(), "time": time.time() + off}).encode()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "REFUSAL_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_a_device_is_enrolled_once_and_told_why_not(server: ServerFolder) -> None:
    state, other = State(), public_form(generate_private_key(SECP384R1()))
    assert ask(server, state, OWN + "authority", method="GET") == (200, server.authority.read_bytes())
    token = server.invite(60.0)
    assert token.authority == fingerprint(server.authority.read_bytes())
    for off, words in ((5.0, "5 s ahead"), (-301.0, "301 s behind")):
        status, told = ask(server, state, OWN + "enrol", request(token.secret, off=off))
        assert status == 403
        assert f"wrong clock: this device's is {words}" in told["detail"]
    assert ask(server, state, OWN + "enrol", request(token.secret)) == (
        200, {"node": "7", "items": 60, "catalogue": False}
    )  # fmt: skip
    assert ask(server, state, OWN + "enrol", request(token.secret))[0] == 200, "an answer that was lost"
    assert ask(server, state, OWN + "enrol", request(token.secret, other)) == (
        410, {"detail": "this token was used before, 0 s ago: it serves one device"}
    )  # fmt: skip
    second = server.invite(60.0)
    status, told = ask(server, state, OWN + "enrol", request(second.secret))
    assert (status, "registered already" in told["detail"]) == (409, True)
    assert ask(server, state, OWN + "enrol", request(second.secret, other))[0] == 200, "it was not used up"
    assert len(state.nodes) == 2
    assert ask(server, state, OWN + "catalogue", method="GET")[0] == 404


OTHER_CURVE = generate_private_key(SECP256R1()).public_key()
HOSTILE = [
    b"", b"null", b"[]", b"7", b'"x"', b"{}", b"\xff\xfe", b"[" * LARGEST, b'{"a":' * 600,
    b"{" + b" " * (LARGEST - 2) + b"}", request(b"short"), request(b"s" * 16, b"no key"), request(b"s" * 16, b""),
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
    status, told = ask(server, state, OWN + "enrol", body)
    assert (status, "not a request to enrol" in told["detail"]) == (400, True)
    assert not state.nodes


@pytest.mark.usefixtures("quick")
def test_long_requests_other_methods_and_operators_questions_from_elsewhere_are_refused(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State()
    assert ask(server, state, OWN + "enrol", bytes(LARGEST + 1))[0] == 413
    assert ask(server, state, OWN + "enrol", method="GET")[0] == 405
    for question in ("nodes", "runs"):
        assert ask(server, state, OWN + question, method="GET")[0] == 403
    state.create_node("", "", PUBLIC, 1)
    status, told = ask(server, state, OWN + "nodes", method="GET", client="192.0.2.1")
    assert (status, told["nodes"]) == (200, [{"node": "7", "state": "online", "since": "now"}])
    monkeypatch.delattr(State, "get_node_info")
    assert ask(server, state, OWN + "nodes", method="GET", client="192.0.2.1") == (
        500, {"detail": "the server could not answer: its log says more"}
    )  # fmt: skip


def test_a_refused_token_takes_its_time(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "REFUSAL_SECONDS", 0.2)
    before = time.monotonic()
    assert ask(server, State(), OWN + "enrol", request(b"s" * 16))[0] == 404
    assert time.monotonic() - before >= 0.2


def test_nodes_that_may_not_come_in_are_told_which_of_two_reasons_it_is() -> None:
    from fastapi import HTTPException
    from flwr.superlink.servicer.fleet import fleet_handlers

    class Known(State):
        def activate_node(self, _node: int, _interval: float) -> bool:
            return False

    handlers = SimpleNamespace(activate_node=fleet_handlers.activate_node)
    superlink.explain(handlers)
    asked = ActivateNodeRequest(public_key=PUBLIC, heartbeat_interval=30)
    with pytest.raises(HTTPException, match=superlink.UNREGISTERED) as unknown:
        handlers.activate_node(request=asked, state=Known())
    state = Known()
    state.create_node("", "", PUBLIC, 1)
    with pytest.raises(HTTPException, match=superlink.EARLY) as early:
        handlers.activate_node(request=asked, state=state)
    assert (unknown.value.status_code, early.value.status_code) == (403, 409)


# -- a device's line to its server -------------------------------------------------------------------------------------


class Office(BaseHTTPRequestHandler):
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


@pytest.fixture
def office(tmp_path: Path) -> Iterator[tuple[type[Office], str]]:
    """A server of ours at home, and its address."""
    ca, certificate, key = make_certificates(tmp_path / "office", ["localhost"])

    class Mine(Office):
        pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    listening.daemon_threads = True
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    listening.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Mine, f"localhost:{listening.server_port}"
    listening.shutdown()
    thread.join()
    listening.server_close()


def refused_with(line: Link, kind: str) -> str:
    with pytest.raises(Refused) as refused:
        line.activate()
    assert refused.value.kind == kind
    return str(refused.value)


def test_a_device_says_in_flower_s_words_what_it_wants(office: tuple[type[Office], str], tmp_path: Path) -> None:
    mine, address = office
    line, number = Link(address, tmp_path / "office" / "ca.crt", KEY), 2**63 + 12345
    mine.body = ActivateNodeResponse(node_id=number).SerializeToString()
    assert line.activate() == number
    asked = ActivateNodeRequest.FromString(mine.asked)  # type: ignore[attr-defined]
    assert (asked.public_key, asked.heartbeat_interval) == (PUBLIC, 30.0)
    assert {"flwr-public-key", "flwr-signature", "flwr-timestamp"} <= set(mine.headers_seen)  # type: ignore[attr-defined]
    for known in (True, False):
        mine.body = SendNodeHeartbeatResponse(success=known).SerializeToString()
        assert line.beat(number) is known
    beat = SendNodeHeartbeatRequest.FromString(mine.asked)  # type: ignore[attr-defined]
    assert (beat.node.node_id, beat.heartbeat_interval) == (number, 30.0)
    mine.body = PullMessagesResponse().SerializeToString()
    assert line.pull(number) is None
    assert PullMessagesRequest.FromString(mine.asked).node.node_id == number  # type: ignore[attr-defined]
    mine.body = PullMessagesResponse(messages_list=[MessageProto()]).SerializeToString()
    assert line.pull(number) == mine.body
    line.deactivate(number)
    assert DeactivateNodeRequest.FromString(mine.asked).node_id == number  # type: ignore[attr-defined]
    line.close()


def test_every_refusal_has_its_own_words(office: tuple[type[Office], str], tmp_path: Path) -> None:
    mine, address = office
    line = Link(address, tmp_path / "office" / "ca.crt", KEY)
    found = {}
    for kind, status, detail in (("unregistered", 403, superlink.UNREGISTERED), ("early", 409, superlink.EARLY),
                                 ("lost", 401, "Invalid"), ("busy", 503, "full"), ("refused", 500, "x")):  # fmt: skip
        mine.status, mine.body = status, json.dumps({"detail": detail}).encode()
        found[kind] = refused_with(line, kind)
    mine.status = 401
    for off, words in ((-60, "60 s ahead of"), (400, "400 s behind")):
        mine.date = format_datetime(datetime.now(UTC) + timedelta(seconds=off), usegmt=True)
        found[words] = refused_with(line, "clock")
        assert words.split()[-1] in found[words]
    mine.date, mine.status, mine.body = "", 200, b"\x08"  # a number that does not end
    found["broken"] = refused_with(line, "broken")
    make_certificates(tmp_path / "other", ["localhost"])
    found["authority"] = refused_with(Link(address, tmp_path / "other" / "ca.crt", KEY), "authority")
    found["unreachable"] = refused_with(Link("localhost:9", tmp_path / "office" / "ca.crt", KEY), "unreachable")
    assert len(set(found.values())) == len(found)
    assert "too early" in found["early"]
    assert "unregistered" in found["unregistered"]
    assert "wrong authority" in found["authority"]
    line.close()


def test_a_certificate_that_is_not_taken_is_told_apart_by_why() -> None:
    error, found = ssl.SSLCertVerificationError(), {}
    for code, kind in ((link_module.EXPIRED, "clock"), (link_module.TOO_NEW, "clock"), (62, "host"), (19, "authority")):
        error.verify_code = code
        refused = link_module._distrust(error, "a.example")
        assert refused.kind == kind
        found[code] = str(refused)
    assert len(set(found.values())) == 4
    assert "has expired by this device's clock" in found[link_module.EXPIRED]
    assert "not for a.example" in found[62]


def test_what_is_no_message_is_refused() -> None:
    for content in (b"\x08", b"\x12\x05a", b"\xff" * 20, b"\x0b", b"\x09abc"):
        with pytest.raises(Refused):
            list(fields(content))
    assert list(fields(b"\x08\x96\x01\x12\x02ab\x19" + bytes(8) + b"\x25" + bytes(4))) == [
        (1, 150),
        (2, 2),
        (3, 0),
        (4, 0),
    ]


def test_addresses() -> None:
    assert address_of("https://a.example:99/") == ("a.example", 99)
    assert address_of("a.example") == ("a.example", 8000)
    assert address_of("[::1]:99") == ("::1", 99)
    for wrong in ("", "http://a:1", "https://", "a.example:0", "a.example:99999", "a/b:1"):
        with pytest.raises(InvalidSettings, match="name and port"):
            address_of(wrong)


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_device_enrols_only_with_the_server_its_token_names(office: tuple[type[Office], str], tmp_path: Path) -> None:
    mine, address = office
    mine.body = (tmp_path / "office" / "ca.crt").read_bytes()
    (tmp_path / "mine.csv").write_text("item\n1\n")
    node = NodeFolder(tmp_path / "node", address, str(tmp_path / "mine.csv"), "1x")
    with pytest.raises(InvalidState, match="wrong authority"):
        enrol(node, Token(b"s" * 16, AUTHORITY))
    assert not (tmp_path / "node" / "key").exists()
    assert b"secret" not in mine.asked, "the secret is not shown to a stranger"  # type: ignore[attr-defined]
    with pytest.raises(InvalidSettings, match="no file"):
        enrol(NodeFolder(tmp_path / "node", address, str(tmp_path / "nothing.csv"), "1x"), Token(b"s" * 16, AUTHORITY))
    (tmp_path / "other.csv").write_text("user;thing\n1;2\n")
    with pytest.raises(InvalidData, match="a column 'item'"):
        enrol(NodeFolder(tmp_path / "node", address, str(tmp_path / "other.csv"), "1x"), Token(b"s" * 16, AUTHORITY))
    with pytest.raises(InvalidState, match="cannot be reached"):
        enrol(NodeFolder(tmp_path / "node", "localhost:9", node.data, "1x"), Token(b"s" * 16, AUTHORITY))


def test_a_node_s_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    node = NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "40MB", holdout=0.25, model="mine:Model")
    node.save()
    assert NodeFolder.open(tmp_path) == node
    assert node.status()["state"] == "stopped"
    make_node_key(node.key)
    assert public_form(read_key(node.key)).startswith(b"-----BEGIN PUBLIC KEY")
    for content in ("", "format = 2", "format = 1\nunknown = 7", "format = 1\nserver = 'x'", "]"):
        (tmp_path / "node.toml").write_text(content)
        with pytest.raises(InvalidState, match=r"node\.toml"):
            NodeFolder.open(tmp_path)


def test_an_idle_device_is_light() -> None:
    script = "import sys, fairfold.flower.watch as w; print({'torch', 'numpy', 'flwr', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_a_server_s_folder_is_read_as_it_was_written_and_not_overwritten(server: ServerFolder, tmp_path: Path) -> None:
    assert ServerFolder.open(server.folder) == server
    assert server.listen == "127.0.0.1"
    with pytest.raises(InvalidSettings, match="not empty"):
        ServerFolder.create(server.folder, flat(rounds=2), "localhost", items=60)
    assert ServerFolder.open(server.folder) == server
    with pytest.raises(InvalidState, match="server init"):
        ServerFolder.open(tmp_path)
    with pytest.raises(InvalidSettings, match="num_items"):
        ServerFolder.create(tmp_path / "new", flat(rounds=2), "localhost", items=0)
    assert not (tmp_path / "new").exists()
    told = server.status()
    assert (told["running"], told["run"]["rounds"]) == (False, 0)


def test_a_run_asks_no_index_for_anything(server: ServerFolder) -> None:
    from flwr.supercore.superexec.dependency_installer import _exclude_flwr_dependencies

    content = tomllib.loads((server.app / "pyproject.toml").read_text())
    assert _exclude_flwr_dependencies(content["project"]["dependencies"]) == []
    assert "--disable-runtime-dependency-installation" in server.superlink_command()
    assert server.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    example = tomllib.loads((Path(__file__).parents[2] / "examples" / "flower" / "pyproject.toml").read_text())
    assert _exclude_flwr_dependencies(example["project"]["dependencies"]) == []


def test_the_commands_say_what_is_missing(server: ServerFolder, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        found = CliRunner().invoke(app, list(words))
        assert found.exit_code == 2, found.output
        return " ".join(found.output.split())

    assert "server init" in said("server", "start", str(tmp_path))
    assert "one of them" in said("server", "init", str(tmp_path / "x"), "--host", "a")
    assert "does not answer" in said("server", "train", str(server.folder))
    assert "node enrol" in said("node", "start", str(tmp_path))
    assert "typing error" in said("node", "enrol", "x", "--server", "a", "--data", "b", "--capacity", "1x")
    assert "30 days" in said("server", "invite", str(server.folder), "--valid", "1y")
    token = CliRunner().invoke(app, ["server", "invite", str(server.folder)]).output
    assert Token.parse(token).authority == fingerprint(server.authority.read_bytes())
    status = CliRunner().invoke(app, ["server", "status", str(server.folder), "--json"])
    assert json.loads(status.output)["running"] is False


def test_a_port_that_another_program_uses_is_told_before_anything_starts(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_program(*_arguments: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("fairfold.flower.server.Program", no_program)
    monkeypatch.setattr("fairfold.flower.server.VACATED", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"port {port} of 127.0.0.1, which another program uses"
        with pytest.raises(InvalidState, match=taken):
            replace(server, listen="127.0.0.1", port=port).start(print, [])
        free = replace(server, listen="127.0.0.1", port=free_ports(1)[0])
        with pytest.raises(InvalidState, match=f"{taken}.*--watch"):
            free.start(print, [], page=port)
        found = CliRunner().invoke(app, ["watch", str(server.folder), "--port", str(port)])
        assert found.exit_code == 2
        assert taken in " ".join(found.output.split())
    with pytest.raises(InvalidState, match=r"192\.0\.2\.1, which cannot be listened on"):
        listening("192.0.2.1", 0, "")
    with listening("127.0.0.1", 0, "") as mine:
        assert mine.getsockname()[1]


def test_a_server_that_falls_again_while_it_starts_is_started_again(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time it is refused with words; later whatever keeps it down may pass."""

    class Falling:
        started = 0

        def __init__(self, *_arguments: object) -> None:
            Falling.started += 1
            self.number, self.pid = Falling.started, -1

        def wait(self, _seconds: float) -> int:
            if self.number == 4:
                raise KeyboardInterrupt
            return 1

        def status(self) -> int:
            return 1

        def stop(self) -> None:
            pass

    def wait_for_port(_port: int, program: Falling) -> None:
        if program.number == bad:
            raise InvalidState("the SuperLink ended", "a running program", "See above.")

    monkeypatch.setattr("fairfold.flower.server.Program", Falling)
    monkeypatch.setattr("fairfold.flower.server.stopping", contextlib.nullcontext)
    monkeypatch.setattr("fairfold.flower.server.wait_for_port", wait_for_port)
    monkeypatch.setattr("fairfold.flower.server.LONGEST_PAUSE", 0.0)
    mine, bad, said = replace(server, listen="127.0.0.1", port=free_ports(1)[0]), 2, list[str]()
    with pytest.raises(KeyboardInterrupt):
        mine.start(said.append, [])
    assert [words.split()[1] for words in said if "listens" in words] == ["server"] * 3
    bad, Falling.started = 1, 0
    with pytest.raises(InvalidState, match="ended"):
        mine.start(said.append, [])
    assert Falling.started == 1


@pytest.mark.parametrize(
    "host", ["https://a.example.org", "a.example.org:8000", "two words", "", "-a", "a.example.org/"]
)
def test_what_is_no_name_of_a_machine_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="the name or the address of a machine alone"):
        ServerFolder.create(tmp_path / "server", Settings(), host, items=10)
    assert not (tmp_path / "server").exists()


def words_of(table: str) -> str:
    """Without the lines of the table."""
    return " ".join(table.replace("│", " ").split())


def test_whoever_enrols_is_told_that_items_are_not_in_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairfold.flower.node.enrol", lambda *_: 10)
    token = Token(b"s" * 16, AUTHORITY)
    for content, told in (("item\n3\n", False), ("item\n12\n", True)):
        (tmp_path / "mine.csv").write_text(content)
        command = ["node", "enrol", str(token), "--server", "a.example", "--data", str(tmp_path / "mine.csv")]
        found = CliRunner().invoke(app, [*command, "--capacity", "1x", "--folder", str(tmp_path / "node")])
        assert found.exit_code == 0, found.output
        assert ("cannot answer yet" in found.output) is told


def test_a_device_tells_its_owner_why_it_failed_last_and_the_server_no_more_than_the_kind(tmp_path: Path) -> None:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fairfold.flower.worker import Worker

    node = NodeFolder(tmp_path, "a.example:8000", str(tmp_path / "gone.csv"), "1x")
    make_node_key(node.key)
    node.authority.write_bytes(make_certificates(tmp_path / "keys", ["a.example"])[0].read_bytes())
    node.save()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime does
    message = Message(RecordDict({"mine": ConfigRecord({"film": "secret"})}), 1, "query.survey")
    reply, problem = Worker(node)._reply(message)
    assert reply.has_error()
    assert "InvalidMessage on the device" in str(reply.error.reason)
    assert problem.startswith("InvalidMessage: ")
    assert "on the device" not in problem
    device = watch.Watch(node, lambda _: None)
    device._note("connected", problem, failures=1)
    device._note("connected", "answered", answers=1)
    shown = words_of(CliRunner().invoke(app, ["node", "status", str(tmp_path)]).output)
    assert "last failure" in shown
    assert "ago: InvalidMessage: " in shown


def test_a_device_tells_its_owner_what_was_spent(tmp_path: Path) -> None:
    def status(*more: str) -> str:
        return words_of(CliRunner().invoke(app, ["node", "status", str(tmp_path), *more]).output)

    NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "1x").save()
    assert "nothing: it answers whatever it is asked" in status()
    assert "ε spent" not in status()
    node = NodeFolder(tmp_path, "a.example:8000", "/mine.csv", "1x", privacy="private", epsilon=4, smallest_cohort=150)
    node.save()
    assert "noisy sums, of 150 devices or more" in status()
    assert "0.000 of 4 (δ = 1e-05), in 0 sums" in status()
    account = Ledger(node.state / LEDGER, 4, 1e-5, 150)
    account.spend(Entry("a", "survey", part_of(sigma_for(4, 1e-5), 0.1), 200))
    assert f"{account.spent():.3f} of 4" in status()
    assert "takes no further part" not in status()
    account.spend(Entry("a", "train 0", part_of(sigma_for(4, 1e-5), 0.9), 200))
    assert "4.000 of 4 (δ = 1e-05), in 2 sums; it takes no further part" in status()
    told = json.loads(status("--json"))["privacy"]
    assert (told["sums"], told["epsilon"], told["smallest cohort"]) == (2, 4, 150)
    (node.state / LEDGER / "ledger.json").write_text("{}")
    assert "not known: " in status()


def test_a_server_tells_what_its_run_costs_a_user(server: ServerFolder, tmp_path: Path) -> None:
    def status(folder: Path) -> str:
        return words_of(CliRunner().invoke(app, ["server", "status", str(folder)]).output)

    assert "privacy plain. The server sees what every device says" in status(server.folder)
    open_yet = ServerFolder.create(tmp_path / "open", flat(rounds=2), "localhost", items=60, privacy=False)
    assert "decided when a run begins" in status(open_yet.folder)
    settings = Settings(algorithm={"kind": "correlations"}, privacy={"level": "private", "epsilon": 4.0})
    private = ServerFolder.create(tmp_path / "private", settings, "localhost", items=60)
    assert "ε = 4, δ = 1e-05" in status(private.folder)
    assert "Nothing of it is spent yet" in status(private.folder)
    private.run.mkdir()
    assert "Being spent" in status(private.folder)
    (private.run / "result.json").write_text("{}")
    assert "Spent; every device keeps an account of its own" in status(private.folder)


@pytest.mark.parametrize("text", ["item,title\na,A\nb,B\n", "a\nb\n", "\ufeffitem\na\nb\n", "title;item\nA;a\nB;b"])
def test_catalogues(text: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(text, encoding="utf-8")
    assert read_catalogue(tmp_path / "items.csv") == ["a", "b"]


@pytest.mark.parametrize("text", ["", "item\n", "a\n\nb\n", "a\na\n", "item,x\n,1\n"])
def test_catalogues_without_a_name_for_every_item_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(text)
    with pytest.raises(InvalidData, match="name"):
        read_catalogue(tmp_path / "items.csv")


def test_a_line_without_trust_shows_nothing(office: tuple[type[Office], str]) -> None:
    mine, address = office
    mine.body = b"certificate"
    line = Line(address, None)
    assert line.ask("GET", OWN + "authority") == b"certificate"
    line.close()
    assert "flwr-signature" not in mine.headers_seen  # type: ignore[attr-defined]


# -- a device that waits -----------------------------------------------------------------------------------------------


class Fake:
    """A server that does, in turn, what the test says; then the device is asked to end."""

    def __init__(self, *turns: object) -> None:
        self.turns, self.calls = list(turns), list[str]()

    def _turn(self, name: str) -> Any:
        self.calls.append(name)
        if not self.turns:
            raise KeyboardInterrupt
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn

    heartbeat, pause = 30.0, 0.0

    def activate(self) -> Any:
        return self._turn("activate")

    def beat(self, _node: int) -> Any:
        return self._turn("beat")

    def pull(self, _node: int) -> Any:
        return self._turn("pull")

    def deactivate(self, _node: int) -> None:
        self.calls.append("deactivate")

    def close(self) -> None:
        self.calls.append("close")


class FakeHand:
    """A worker that says, in turn, what the test says."""

    said: ClassVar[list[dict[str, Any]]] = []
    given: ClassVar[list[tuple[bytes, int]]] = []

    def __init__(self, _folder: Path) -> None:
        self.message: bytes | None = None
        self.until, self.kind, self.used = float("inf"), watch.WORK, time.monotonic()

    def give(self, message: bytes, kind: int = watch.WORK) -> None:
        self.message, self.kind = message, kind
        self.given.append((message, kind))

    def hear(self, _seconds: float) -> list[dict[str, Any]]:
        facts = self.said.pop(0)
        if facts.get("done"):
            self.message = None
        return [facts]

    def end(self) -> None:
        self.given.append((b"ended", -1))


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("fairfold.flower.watch.time.sleep", found.append)
    monkeypatch.setattr("fairfold.flower.watch.random.uniform", lambda _low, _high: 1.0)
    monkeypatch.setattr(watch, "Hand", FakeHand)
    FakeHand.said, FakeHand.given = [], []
    return found


def watched(folder: Path, line: Fake, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    node = NodeFolder(folder, "localhost:9", "mine.csv", "1x")
    if not node.key.exists():
        make_node_key(node.key)
    said: list[str] = []
    monkeypatch.setattr(watch, "Link", lambda *_: line)
    with pytest.raises(KeyboardInterrupt):
        watch.Watch(node, said.append).run()
    assert line.calls[-1] == "close"
    return said, json.loads((folder / "status.json").read_text())


def test_a_device_tries_again_with_growing_pauses_and_says_a_thing_once(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, unknown = Refused("early", "too early"), Refused("unregistered", "unregistered")
    gone = Refused("unreachable", "gone")
    line = Fake(early, early, early, *[unknown] * 9, 7, True, gone, gone, gone, gone, True, None)
    said, told = watched(tmp_path, line, monkeypatch)
    assert said == [
        "too early",
        "unregistered",
        "connected to localhost:9 as node 7",
        "gone",
        "connected again",
        "stopped",
    ]
    assert waited[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert waited[11:16] == [watch.LONGEST_PAUSE, 1.0, 2.0, 4.0, 8.0]
    assert line.calls.count("activate") == 13, "a line that broke is no reason to come in anew"
    assert line.calls[-2:] == ["deactivate", "close"]
    assert (told["state"], told["node"]) == ("stopped", "7")


def test_a_device_that_the_server_has_lost_comes_in_again(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Fake(7, False, 8, Refused("lost", "who?"), 9)
    watched(tmp_path, line, monkeypatch)
    assert line.calls == ["activate", "beat", "activate", "beat", "activate", "beat", "deactivate", "close"]


def test_a_worker_is_given_messages_and_the_server_is_told_of_its_death_once(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHand.said = [
        {"kind": "train", "round": "3", "until": 1e12}, {"done": True, "seconds": 2.0, "peak": 5, "problem": ""},
        {"died": -9}, {"done": True, "problem": "told"}, {"died": -9}, {"died": 1},
    ]  # fmt: skip
    line = Fake(7, True, b"one", b"two", b"three")
    said, told = watched(tmp_path, line, monkeypatch)
    assert FakeHand.given == [
        (b"one", watch.WORK), (b"two", watch.WORK), (b"ended", -1), (b"two", watch.REFUSE), (b"three", watch.WORK),
        (b"ended", -1), (b"three", watch.REFUSE), (b"ended", -1),
    ]  # fmt: skip
    assert (told["answers"], told["failures"]) == (1, 4)
    assert "works on train of round 3" in said


def test_a_device_that_was_ended_at_work_tells_the_server_when_it_is_back(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and before it asks for more: nobody waits for an answer that nobody works on."""
    FakeHand.said = [{"kind": "train", "round": "3", "until": 1e12}]
    hear = FakeHand.hear

    def killed(self: FakeHand, seconds: float) -> list[dict[str, Any]]:
        if not FakeHand.said:
            raise KeyboardInterrupt
        return hear(self, seconds)

    monkeypatch.setattr(FakeHand, "hear", killed)
    watched(tmp_path, Fake(7, True, b"one"), monkeypatch)
    assert (tmp_path / watch.OPEN).read_bytes() == b"one"
    FakeHand.said, FakeHand.given = [{"done": True, "problem": "told"}, {"done": True, "problem": ""}], []
    line = Fake(Refused("early", "too early"), 7, True, b"two")
    said, told = watched(tmp_path, line, monkeypatch)
    assert FakeHand.given == [(b"one", watch.REFUSE), (b"two", watch.WORK), (b"ended", -1)]
    assert "ended at work" in " ".join(said)
    assert told["answers"] == 1
    assert not (tmp_path / watch.OPEN).exists()
    watched(tmp_path, Fake(7, True), monkeypatch)
    assert FakeHand.given[3:] == []


def test_a_worker_that_hangs_or_has_nothing_to_do_is_ended(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHand.said = [{"until": 0.0}]
    monkeypatch.setattr(FakeHand, "until", property(lambda _: 0.0, lambda *_: None), raising=False)
    said, told = watched(tmp_path, Fake(7, True, b"one", None), monkeypatch)
    assert "not answered in its time" in " ".join(said)
    assert told["failures"] == 1
    assert FakeHand.given[-1] == (b"ended", -1)


def test_a_folder_has_one_device(tmp_path: Path) -> None:
    with files.locked(tmp_path):
        node = NodeFolder(tmp_path, "localhost:9", "mine.csv", "1x")
        assert node.running()
        with pytest.raises(InvalidState, match="is running"):
            watch.Watch(node, lambda _: None).run()
    assert not node.running()
