"""The gateway: limits of requests, the poll cache, and batched heartbeats."""

import asyncio
import time
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from fastapi.routing import iter_route_contexts
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.supercore.state.schema.linkstate_models import Node as NodeRow
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.main import create_app
from sqlalchemy import select

from fairfold.flower.fleet import gateway
from fairfold.flower.fleet.connection import NodeConnection, _first_number, public_pem
from fairfold.flower.fleet.control import HEADER
from fairfold.flower.fleet.enrolment import HttpResponse, Route
from fairfold.flower.fleet.gateway import LIMITS, Gateway, PollCache

PIECE = b"x" * (1 << 20)


class Caller:
    """One request, piece by piece, and what came back."""

    def __init__(self, path: str, body: list[bytes], client: str = "192.0.2.7", secret: str = "") -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "path": path,
            "client": (client, 5),
            "server": ("192.0.2.1", 8000),
            "headers": [(HEADER.encode(), secret.encode())] if secret else [],
        }
        self.waiting, self.read, self.sent = list(body), 0, list[Any]()

    async def receive(self) -> dict[str, Any]:
        if not self.waiting:
            await asyncio.sleep(100)
        part = self.waiting.pop(0)
        self.read += len(part)
        return {"type": "http.request", "body": part, "more_body": bool(self.waiting)}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def call(self, timeout: float = 5.0, **options: Any) -> int:
        async def echo(_scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": message["body"][:10]})

        asyncio.run(Gateway(echo, timeout=timeout, **options)(self.scope, self.receive, self.send))
        return int(self.sent[0]["status"])


def flower_paths() -> list[str]:
    """All paths of Flower's own SuperLink that are not for nodes."""
    paths = [route.path for route in iter_route_contexts(create_app().routes)]
    assert len(paths) > 40
    return [path for path in paths if path and not path.startswith("/v1/fleet/")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nodes_reach_what_nodes_need_and_the_server_s_account_all_of_flower_s_endpoints() -> None:
    here, right = "192.0.2.1", "5" * 64
    for path in [*flower_paths(), "/v1/fleetx", "/v1/control/../fleet/x"]:
        for client, secret in ((here, ""), (here, "6" * 64), (here, right + "5"), ("192.0.2.7", right)):
            assert Caller(path, [b""], client, secret).call(secret=right) == 403, path
        assert Caller(path, [b""], here, "").call(secret="") == 403, "no secret is not an empty one"
        assert Caller(path, [b""], here, right).call(secret=right) == (200 if path.startswith("/v1/") else 404), path
    unknown = Caller("/v1/control/start-run", [b""], secret=right)
    del unknown.scope["client"]
    assert unknown.call(secret=right) == 403
    good = Caller("/v1/fleet/pull-messages", [b"hello ", b"world"])
    assert good.call() == 200
    assert b"".join(part["body"] for part in good.sent[1:]) == b"hello worl"


def test_a_websocket_is_closed_and_no_error() -> None:
    caller = Caller("/v1/fleet/pull-messages", [b""])
    caller.scope["type"] = "websocket"
    asyncio.run(Gateway(flower_sends_nothing)(caller.scope, caller.receive, caller.send))
    assert [message["type"] for message in caller.sent] == ["websocket.close"]


@pytest.mark.parametrize("path", [*(path for path in LIMITS if "fleet" in path), "/v1/fleet/push-messages"])
def test_a_request_that_is_too_long_is_not_read_to_its_end(path: str) -> None:
    most = LIMITS.get(path, LIMITS["/v1/fleet/"])[0]
    caller = Caller(path, [bytes(1 << 18)] * 1000)
    assert caller.call() == 413
    assert caller.read <= most + (1 << 18)
    assert Caller(path, [bytes(most)]).call() == 200


def test_a_request_that_does_not_come_ends() -> None:
    caller = Caller("/v1/fleet/push-object", [b"a"])
    caller.waiting.clear()
    assert caller.call(timeout=0.05) == 408


def test_half_requests_hold_up_nobody_and_long_ones_need_an_enrolled_key(tmp_path: Path) -> None:
    """64 half requests stopped every call of a fleet, and 4 every enrolment."""
    database = Database(tmp_path)
    heart, stranger = Heart(database, 5), Heart(Database(make_folder(tmp_path / "other")), 6)
    factory = SimpleNamespace(state=lambda: database.state)
    app = SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory, enable_supernode_auth=True))
    route = Route("POST", lambda _state, _body: HttpResponse(200, {}))

    async def flower(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def talk() -> None:
        gateway_app = Gateway(flower, routes={"/v1/fairfold/enrol": route})

        async def begin(path: str, start: bytes) -> None:
            parts = [{"type": "http.request", "body": start, "more_body": True}]

            async def receive() -> Any:
                return parts.pop() if parts else await asyncio.Event().wait()

            scope = Caller(path, []).scope | {"method": "POST", "app": app, "headers": heart.beat()[0]}
            await gateway_app(scope, receive, Caller(path, []).send)

        paths = ["/v1/fleet/push-object", "/v1/fleet/pull-object", "/v1/fleet/push-messages", "/v1/fairfold/enrol"]
        halves = [asyncio.create_task(begin(path, b"half")) for path in paths * 100]
        halves += [asyncio.create_task(begin(paths[0], bytes(1 << 17))) for _ in range(100)]  # an enrolled device's
        await asyncio.sleep(0.5)
        other = Heart(database, 7)
        for who, length, path, status in (
            (other, 5, paths[0], 200), (other, 1 << 20, paths[0], 200), (other, 5, paths[1], 200),
            (other, 5, paths[2], 200), (stranger, 5, paths[3], 200), (stranger, 1 << 20, paths[0], 401),
        ):  # fmt: skip
            caller = Caller(path, [bytes(length // 5)] * 5)
            caller.scope |= {"method": "POST", "app": app, "headers": who.beat()[0]}
            await asyncio.wait_for(gateway_app(caller.scope, caller.receive, caller.send), 20)
            assert caller.sent[0]["status"] == status, (path, length)
        for half in halves:
            half.cancel()

    asyncio.run(talk())


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_request_without_a_length_is_refused() -> None:
    caller = Caller("/v1/fleet/push-object", [PIECE] * 9)
    caller.scope["headers"] = [(b"transfer-encoding", b"chunked")]
    assert (caller.call(), caller.read) == (411, 0)


@pytest.mark.parametrize(("devices", "at_once"), [(100, LIMITS["/v1/fleet/pull-object"][1]), (1, gateway.TURNS_EACH)])
def test_only_so_many_are_at_work_and_a_turn_lasts_until_the_response_is_read(devices: int, at_once: int) -> None:
    """Callers who do not read their responses keep the next ones waiting, not the server's memory filling."""
    served = 0

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal served
        served += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE})

    async def many() -> int:
        gateway_app, reading = Gateway(app), asyncio.Event()

        async def one(number: int) -> None:
            caller = Caller("/v1/fleet/pull-object", [b""])
            caller.scope["headers"] = [(gateway.KEY_HEADER, b"%d" % (number % devices))]

            async def send(message: Any) -> None:
                if caller.sent and caller.sent[-1].get("body"):
                    await reading.wait()  # as the server does when what it sent has not been read
                caller.sent.append(message)

            await gateway_app(caller.scope, caller.receive, send)

        tasks = [asyncio.create_task(one(number)) for number in range(100)]
        for _ in range(100):  # on a busy machine it takes a moment until they are at work
            if served >= at_once:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        at_first = served
        reading.set()
        await asyncio.gather(*tasks)
        return at_first

    assert asyncio.run(many()) == at_once
    assert served == 100


class Database:
    """A state in a real database of Flower's form."""

    def __init__(self, folder: Path) -> None:
        factory = LinkStateFactory(str(folder / "state.db"), NoOpFederationManager(), ObjectStoreFactory())
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what Flower uses
            self.state: Any = factory.state()

    def add(self, *rows: Any) -> None:
        with self.state.session() as session:
            session.add_all(rows)


def asked_for(node: int) -> bytes:
    return bytes(PullMessagesRequest(node=Node(node_id=node)).SerializeToString())


def test_polls_of_nodes_without_messages_are_served_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, large = Database(tmp_path), (1 << 63) + 5  # such a number is negative in the database
    database.add(
        MessageIns(message_id="a", dst_node_id=7, delivered_at=""),
        MessageIns(message_id="b", dst_node_id=8, delivered_at="2026-01-01"),
        MessageIns(message_id="c", dst_node_id=large - (1 << 64), delivered_at=""),
    )
    monkeypatch.setattr("fairfold.flower.fleet.gateway.CACHE_SECONDS", 0.05)

    async def talk() -> None:
        cache = PollCache()
        assert await cache.respond(asked_for(8), database.state) == b"\x0a\x00"
        assert await cache.respond(asked_for(7), database.state) is None, "Flower has a message for it"
        assert await cache.respond(asked_for(large), database.state) is None
        assert await cache.respond(b"\xff\xff", database.state) is None, "no request"
        assert await cache.respond(asked_for(8), object()) is None, "another kind of state"
        database.add(MessageIns(message_id="d", dst_node_id=8, delivered_at=""))
        await asyncio.sleep(0.1)
        assert await cache.respond(asked_for(8), database.state) is None, "it is not forgotten for long"

    asyncio.run(talk())


def test_a_larger_fleet_is_asked_to_wait_longer_and_a_device_understands(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.add(*(NodeRow(node_id=number, status="online", public_key=b"%d" % number) for number in range(1, 1001)))
    response = asyncio.run(PollCache().respond(asked_for(5), database.state))
    assert PullMessagesResponse.FromString(response or b"").reconnect.reconnect == 10
    link = NodeConnection.__new__(NodeConnection)
    link.call = lambda _name, _body: response or b""  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert (link.poll_interval, link.heartbeat_interval) == (10.0, 30.0)
    link.call = lambda _name, _body: b""  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert link.poll_interval == 0.0, "a SuperLink without a gate"
    link.call = lambda _name, _body: b"\x0a\x04\x08\xff\xff\x03"  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert (link.poll_interval, link.heartbeat_interval) == (120.0, 300.0), "no server sends a device to sleep"


def test_the_gateway_serves_such_polls_and_forwards_the_others(tmp_path: Path) -> None:
    database, passed = Database(tmp_path), list[str]()
    database.add(MessageIns(message_id="a", dst_node_id=7, delivered_at=""))
    factory = SimpleNamespace(state=lambda: database.state)
    scope = {"type": "http", "path": "/v1/fleet/pull-messages", "client": ["10.0.0.1", 1], "server": ["10.0.0.2", 2],
             "app": SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory))}  # fmt: skip

    async def flower(_scope: Any, _receive: Any, _send: Any) -> None:
        passed.append("flower")

    async def ask(node: int) -> list[Any]:
        sent = list[Any]()

        async def receive() -> Any:
            return {"type": "http.request", "body": asked_for(node)}

        async def send(message: Any) -> None:
            sent.append(message)

        await gateway_app(scope, receive, send)
        return sent

    gateway_app = Gateway(flower)
    assert [message.get("status") for message in asyncio.run(ask(6))] == [200, None]
    assert not passed
    asyncio.run(ask(7))
    assert passed == ["flower"]


class Heart:
    """A device with a key, whose heartbeats go to a gate before a real database."""

    def __init__(self, database: Database, node: int, status: str = "offline") -> None:
        self.key, self.node = generate_private_key(SECP384R1()), node
        database.add(NodeRow(node_id=node, status=status, public_key=public_pem(self.key), online_until=0.0))

    def beat(self, *, node: int | None = None, late: float = 0.0, interval: float = 30.0) -> tuple[Any, bytes]:
        """Headers and body as ``fairfold node start`` sends them."""
        sent: dict[str, Any] = {}
        link = NodeConnection.__new__(NodeConnection)
        link._key, link._public, link.poll_interval = self.key, public_pem(self.key), interval / 2.5
        link.request = lambda _method, _path, body, headers: sent.update(body=body, headers=headers) or b""  # type: ignore
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fairfold.flower.fleet.connection.HEARTBEAT_SECONDS", 0.0)
            patch.setattr("fairfold.flower.fleet.connection.datetime", Late(late))
            link.send_heartbeat(self.node if node is None else node)
        return [(key.encode(), value.encode()) for key, value in sent["headers"].items()], sent["body"]


class Late(SimpleNamespace):
    """A clock that is some seconds off."""

    def __init__(self, seconds: float) -> None:
        super().__init__(now=lambda _zone: datetime.now(UTC) - timedelta(seconds=seconds))


async def responses_to(gateway_app: Gateway, state: Any, *heartbeats: tuple[Any, bytes]) -> list[bytes | None]:
    """What the gate itself says to some heartbeats at once; None where it hands them on."""
    app = SimpleNamespace(
        state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state), enable_supernode_auth=True)
    )

    async def one(headers: Any, body: bytes) -> bytes | None:
        sent = list[Any]()

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": gateway.HEARTBEAT, "client": ["10.0.0.1", 1], "server": ["10.0.0.2", 2],
                 "app": app, "headers": headers}  # fmt: skip
        await gateway_app(scope, receive, send)
        return sent[-1]["body"] if sent else None

    return list(await asyncio.gather(*(one(*beat) for beat in heartbeats)))


async def flower_sends_nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """In the place of Flower's own server."""


def test_heartbeats_that_come_together_are_written_in_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path)
    hearts = [Heart(database, node) for node in (5, (1 << 63) - 9, 7)]
    commits = list[int]()
    acknowledge = gateway._acknowledge

    def noted(state: Any, of: Any) -> frozenset[int]:
        commits.append(len(of))
        return acknowledge(state, of)

    monkeypatch.setattr(gateway, "_acknowledge", noted)
    response = asyncio.run(
        responses_to(Gateway(flower_sends_nothing), database.state, *(heart.beat() for heart in hearts))
    )
    assert [_first_number(words or b"") for words in response] == [1, 1, 1]
    assert sum(commits) == 3
    assert len(commits) < 3, "checking a signature takes less than they wait for each other"
    with database.state.session() as session:
        for row in session.scalars(select(NodeRow)):
            assert (row.status, row.heartbeat_interval) == ("online", 30.0)
            assert row.online_until == pytest.approx(time.time() + 60.0, abs=10.0)


def test_a_wrong_heartbeat_is_forwarded_to_flower(tmp_path: Path) -> None:
    database = Database(tmp_path)
    heart, other = Heart(database, 5), Heart(database, 6)
    gone = Heart(database, 7, "unregistered")
    headers, body = heart.beat()
    forged = [(key, other.beat()[0][4][1] if key == b"flwr-signature" else value) for key, value in headers]
    assert forged != headers
    wrong = [
        heart.beat(node=6), heart.beat(late=400.0), heart.beat(late=-30.0), heart.beat(interval=5.0),
        heart.beat(interval=4_000.0), (forged, body), ([], body), (headers, b"\xff\xff"), gone.beat(),
    ]  # fmt: skip
    response = asyncio.run(responses_to(Gateway(flower_sends_nothing), database.state, *wrong))
    assert response == [None] * len(wrong)
    with database.state.session() as session:
        assert {row.node_id: row.online_until for row in session.scalars(select(NodeRow))} == {5: 0.0, 6: 0.0, 7: 0.0}


def test_who_hangs_up_does_not_take_the_others_along(tmp_path: Path) -> None:
    database = Database(tmp_path)
    first, second = Heart(database, 5), Heart(database, 6)

    async def talk() -> list[bytes | None]:
        gateway_app = Gateway(flower_sends_nothing)
        one = asyncio.create_task(responses_to(gateway_app, database.state, first.beat()))
        await asyncio.sleep(0.1)  # its heartbeat waits to be written
        other = asyncio.create_task(responses_to(gateway_app, database.state, second.beat()))
        await asyncio.sleep(0.05)
        one.cancel()
        return await other

    assert [_first_number(words or b"") for words in asyncio.run(talk())] == [1]
