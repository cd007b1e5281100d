"""What a node with a key can do to the SuperLink: fill its share, and no more; nothing but what nodes need."""

import asyncio
import hashlib
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.supercore.state.schema.linkstate_models import Node as NodeRow
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.routers.fleet import router
from flwr.superlink.servicer.fleet import fleet_handlers
from sqlalchemy import select

from fairfold.errors import InvalidState
from fairfold.flower import beats, superlink
from fairfold.flower.idle import Idle
from fairfold.flower.link import Link, _number, public_form
from fairfold.flower.quota import SMALLEST_CHARGE, TRIES, Quota, Refused
from fairfold.flower.superlink import LIMITS, Gate, require_known

PIECE = b"x" * (1 << 20)


def name(number: object) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def tree(root: object, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name(root), children=children)


class State(SimpleNamespace):
    """What the quota needs of Flower's state: its real store of pieces."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(object_store=store or InMemoryObjectStore(verify=False), deleted=set())

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        self.deleted |= message_ins_ids


def announced(quota: Quota, state: State, asked: str, root: ObjectTree, node: int = 1) -> None:
    quota.announce(node, asked, root, 100, state)
    state.object_store.preregister(1, root)


def soon() -> float:
    return time.time() + 100


def test_a_node_may_only_answer_what_it_was_given_and_not_for_ever() -> None:
    quota, state = Quota(1 << 30, 1 << 30), State()
    quota.given(2, "asked", soon())
    for node, asked in ((1, "asked"), (2, "other"), (2, "")):
        with pytest.raises(Refused, match="was not given"):
            announced(quota, state, asked, tree("a"), node)
    for _ in range(TRIES):
        announced(quota, state, "asked", tree("a"), 2)
    with pytest.raises(Refused, match="too often"):
        announced(quota, state, "asked", tree("a"), 2)
    quota.given(2, "old", time.time() - 1)
    with pytest.raises(Refused, match="too late"):
        announced(quota, state, "old", tree("b"), 2)
    with pytest.raises(Refused, match="announced"):
        quota.upload(2, name("c"), 5, state)
    assert quota.stored == quota.accounts[2].used == SMALLEST_CHARGE


def test_pieces_count_until_they_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.quota.PAUSE", 0.0)
    quota, state = Quota(4 << 20, 6 << 20), State()
    for node in (1, 2):
        for number in range(3):
            quota.given(node, f"asked-{number}", soon())
    root = tree("root", *(tree(number) for number in range(5)))
    announced(quota, state, "asked-0", root)
    for number in range(3):
        quota.upload(1, name(number), len(PIECE), state)
        state.object_store.put(name(number), PIECE)
    with pytest.raises(Refused, match="a node may have stored") as refused:
        quota.upload(1, name(3), len(PIECE), state)
    assert not refused.value.later
    with pytest.raises(Refused, match="a node may have stored"):
        announced(quota, state, "asked-1", tree("many", *(tree(("many", number)) for number in range(64))))
    announced(quota, state, "asked-0", tree("two", *(tree(("two", number)) for number in range(2))), node=2)
    quota.upload(2, name(("two", 0)), len(PIECE), state)
    state.object_store.put(name(("two", 0)), PIECE)
    with pytest.raises(Refused, match="all nodes") as refused:
        quota.upload(2, name(("two", 1)), 2 * len(PIECE), state)
    assert refused.value.later
    state.object_store.delete(name("root"))  # the server has fetched it
    quota.upload(2, name(("two", 1)), 2 * len(PIECE), state)
    assert quota.accounts[1].used == 0
    assert quota.stored == quota.accounts[2].used == 3 * len(PIECE) + SMALLEST_CHARGE


def test_what_nobody_fetched_in_time_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.quota.PAUSE", 0.0)
    quota, state = Quota(2 << 20, 1 << 30), State()
    quota.given(1, "first", time.time() + 0.2)
    announced(quota, state, "first", tree("root", tree(0)))
    quota.upload(1, name(0), len(PIECE), state)
    state.object_store.put(name(0), PIECE)
    quota.given(1, "second", soon())
    announced(quota, state, "second", tree("next", tree(1)))
    with pytest.raises(Refused):
        quota.upload(1, name(1), len(PIECE), state)
    time.sleep(0.3)
    quota.upload(1, name(1), len(PIECE), state)
    assert state.deleted == {"first"}
    assert len(state.object_store) == 2
    with pytest.raises(Refused, match="announced"):
        quota.upload(1, name(0), len(PIECE), state)


def database() -> SqlObjectStore:
    """What ``--database`` uses."""
    store = SqlObjectStore(":memory:", verify=False)
    store.initialize()
    return store


@pytest.mark.parametrize("store", [InMemoryObjectStore, database])
def test_trees_that_would_grow_when_they_are_read_are_refused(store: Callable[[], Any]) -> None:
    """Each piece contains the next one twice, which is said once: two to the thirtieth when it is written out."""
    quota, state = Quota(1 << 30, 1 << 30), State(store())
    quota.given(1, "asked", soon())
    bomb = tree(0)
    for number in range(1, 30):
        bomb = tree(number, bomb, tree(number - 1))
    with pytest.raises(Refused, match="two contents"):
        announced(quota, state, "asked", bomb)
    array = tree("array", *(tree(("part", number)) for number in range(9)))
    announced(quota, state, "asked", tree("m", array))
    announced(quota, state, "asked", tree("m", array))
    for grown in (tree("m", array, array), tree("n", tree("array")), tree("n", tree("m"), tree("m"))):
        with pytest.raises(Refused, match="that is stored"):
            announced(quota, state, "asked", grown)
    assert len(state.object_store) == 11


def test_a_quota_counts_in_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.quota.PAUSE", 0.0)
    quota, state = Quota(2 << 20, 1 << 30), State(database())
    quota.given(1, "asked", soon())
    announced(quota, state, "asked", tree("root", tree(0), tree(1)))
    quota.upload(1, name(0), len(PIECE), state)
    state.object_store.put(name(0), PIECE)
    with pytest.raises(Refused):
        quota.upload(1, name(1), len(PIECE), state)
    state.object_store.delete(name("root"))
    announced(quota, state, "asked", tree("next", tree(2)))
    quota.upload(1, name(2), 2 * len(PIECE) - SMALLEST_CHARGE, state)
    assert quota.stored == quota.accounts[1].used == 2 * len(PIECE)


# -- the gate ----------------------------------------------------------------------------------------------------------


class Caller:
    """One request, piece by piece, and what came back."""

    def __init__(self, path: str, body: list[bytes], client: str = "192.0.2.7") -> None:
        self.scope: dict[str, Any] = {
            "type": "http",
            "path": path,
            "client": (client, 5),
            "server": ("192.0.2.1", 8000),
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

    def call(self, slowest: float = 5.0, **options: Any) -> int:
        async def echo(_scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": message["body"][:10]})

        asyncio.run(Gate(echo, slowest=slowest, **options)(self.scope, self.receive, self.send))
        return int(self.sent[0]["status"])


def test_nodes_reach_what_nodes_need_and_this_machine_everything() -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleetx", "/v1/control/../fleet/x"):
        assert Caller(path, [b""]).call() == 403
        assert Caller(path, [b""], client="192.0.2.1").call() == 200
        assert Caller(path, [b""]).call(trusted=frozenset({"192.0.2.7"})) == 200
    unknown = Caller("/v1/control/start-run", [b""])
    del unknown.scope["client"]
    assert unknown.call() == 403
    good = Caller("/v1/fleet/pull-messages", [b"hello ", b"world"])
    assert good.call() == 200
    assert b"".join(part["body"] for part in good.sent[1:]) == b"hello worl"


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
    assert caller.call(slowest=0.05) == 408


def test_only_so_many_are_at_work_and_a_turn_lasts_until_the_response_is_read() -> None:
    """Callers who do not read their responses keep the next ones waiting, not the server's memory filling."""
    served = 0

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        nonlocal served
        served += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECE})

    async def many() -> int:
        gate, reading = Gate(app), asyncio.Event()

        async def one() -> None:
            caller = Caller("/v1/fleet/pull-object", [b""])

            async def send(message: Any) -> None:
                if caller.sent and caller.sent[-1].get("body"):
                    await reading.wait()  # as the server does when what it sent has not been read
                caller.sent.append(message)

            await gate(caller.scope, caller.receive, send)

        tasks = [asyncio.create_task(one()) for _ in range(100)]
        for _ in range(100):  # on a busy machine it takes a moment until they are at work
            if served >= LIMITS["/v1/fleet/pull-object"][1]:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        at_first = served
        reading.set()
        await asyncio.gather(*tasks)
        return at_first

    assert asyncio.run(many()) == LIMITS["/v1/fleet/pull-object"][1]
    assert served == 100


def test_another_flower_is_refused() -> None:
    require_known("1.41.0", fleet_handlers, router)
    other = SimpleNamespace(**vars(fleet_handlers))
    other.push_object = lambda request: request
    for version, handlers, routes in (
        ("1.42.0", fleet_handlers, router),
        ("1.41.0", other, SimpleNamespace(fleet_handlers=other)),
        ("1.41.0", fleet_handlers, SimpleNamespace(fleet_handlers=other)),
        ("1.41.0", SimpleNamespace(), router),
    ):
        with pytest.raises(InvalidState, match=r"1\.41"):
            require_known(version, handlers, routes)


def test_the_command_is_light_and_refuses_a_quota_that_is_none() -> None:
    script = "import sys, fairfold.flower.superlink; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    for quota in ("0", "16x", "-1", "2GB"):
        command = [sys.executable, "-m", "fairfold.flower.superlink", "--node-quota", quota]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "a whole number of megabytes" in done.stderr


def test_the_handlers_flower_calls_are_counted() -> None:
    from fastapi import HTTPException

    calls = []
    asked = Metadata(message_id=name("asked"), created_at=time.time(), ttl=100)

    def pull_messages(request: Any, state: Any, store: Any) -> Any:
        return SimpleNamespace(messages_list=[SimpleNamespace(metadata=asked)])

    def push_messages(request: Any, state: Any) -> None:
        state.object_store.preregister(1, request.message_object_trees[0])

    def push_object(request: Any, state: Any) -> None:
        calls.append(request.object_id)

    handlers = SimpleNamespace(pull_messages=pull_messages, push_messages=push_messages, push_object=push_object)
    superlink.count(handlers, Quota(2 << 20, 1 << 30))
    node, state = Node(node_id=7), State()
    answer = Metadata(message_id=name("root"), reply_to_message_id=name("asked"))
    request = PushMessagesRequest(
        node=node, messages_list=[MessageProto(metadata=answer)], message_object_trees=[tree("root", tree(0))]
    )
    with pytest.raises(HTTPException, match="was not given"):
        handlers.push_messages(request=request, state=state)
    handlers.pull_messages(request=PullMessagesRequest(node=node), state=state, store=state.object_store)
    handlers.push_messages(request=request, state=state)
    handlers.push_object(request=PushObjectRequest(node=node, object_id=name(0), object_content=PIECE), state=state)
    more = PushObjectRequest(node=node, object_id=name(0), object_content=2 * PIECE)
    assert not handlers.push_object(request=more, state=state).stored
    assert calls == [name(0)]
    for wrong in (PushMessagesRequest(node=node), request.__class__()):
        with pytest.raises(HTTPException, match="one answer"):
            handlers.push_messages(request=wrong, state=state)
    request.message_object_trees[0].object_id = name("other")
    with pytest.raises(HTTPException, match="another answer"):
        handlers.push_messages(request=request, state=state)


# -- devices that wait -------------------------------------------------------------------------------------------------


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


def test_a_device_for_which_there_is_nothing_is_answered_at_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, large = Database(tmp_path), (1 << 63) + 5  # such a number is negative in the database
    database.add(
        MessageIns(message_id="a", dst_node_id=7, delivered_at=""),
        MessageIns(message_id="b", dst_node_id=8, delivered_at="2026-01-01"),
        MessageIns(message_id="c", dst_node_id=large - (1 << 64), delivered_at=""),
    )
    monkeypatch.setattr("fairfold.flower.idle.FRESH", 0.05)

    async def talk() -> None:
        idle = Idle()
        assert await idle.answer(asked_for(8), database.state) == b"\x0a\x00"
        assert await idle.answer(asked_for(7), database.state) is None, "Flower has a message for it"
        assert await idle.answer(asked_for(large), database.state) is None
        assert await idle.answer(b"\xff\xff", database.state) is None, "no request"
        assert await idle.answer(asked_for(8), object()) is None, "another kind of state"
        database.add(MessageIns(message_id="d", dst_node_id=8, delivered_at=""))
        await asyncio.sleep(0.1)
        assert await idle.answer(asked_for(8), database.state) is None, "it is not forgotten for long"

    asyncio.run(talk())


def test_a_larger_fleet_is_asked_to_wait_longer_and_a_device_understands(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.add(*(NodeRow(node_id=number, status="online", public_key=b"%d" % number) for number in range(1, 1001)))
    said = asyncio.run(Idle().answer(asked_for(5), database.state))
    assert PullMessagesResponse.FromString(said or b"").reconnect.reconnect == 10
    link = Link.__new__(Link)
    link._call = lambda _name, _body: said or b""  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert (link.pause, link.heartbeat) == (10.0, 30.0)
    link._call = lambda _name, _body: b""  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert link.pause == 0.0, "a SuperLink without a gate"
    link._call = lambda _name, _body: b"\x0a\x04\x08\xff\xff\x03"  # type: ignore[method-assign,assignment]
    assert link.pull(5) is None
    assert (link.pause, link.heartbeat) == (120.0, 300.0), "no server sends a device to sleep"


def test_the_gate_answers_such_a_question_and_passes_on_the_others(tmp_path: Path) -> None:
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

        await gate(scope, receive, send)
        return sent

    gate = Gate(flower)
    assert [message.get("status") for message in asyncio.run(ask(6))] == [200, None]
    assert not passed
    asyncio.run(ask(7))
    assert passed == ["flower"]


class Heart:
    """A device with a key, whose heartbeats go to a gate before a real database."""

    def __init__(self, database: Database, node: int, status: str = "offline") -> None:
        self.key, self.node = generate_private_key(SECP384R1()), node
        database.add(NodeRow(node_id=node, status=status, public_key=public_form(self.key), online_until=0.0))

    def beat(self, *, node: int | None = None, late: float = 0.0, interval: float = 30.0) -> tuple[Any, bytes]:
        """Headers and body as ``fairfold node start`` sends them."""
        sent: dict[str, Any] = {}
        link = Link.__new__(Link)
        link._key, link._public, link.pause = self.key, public_form(self.key), interval / 2.5
        link.ask = lambda _method, _path, body, headers: sent.update(body=body, headers=headers) or b""  # type: ignore
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fairfold.flower.link.HEARTBEAT", 0.0)
            patch.setattr("fairfold.flower.link.datetime", Late(late))
            link.beat(self.node if node is None else node)
        return [(key.encode(), value.encode()) for key, value in sent["headers"].items()], sent["body"]


class Late(SimpleNamespace):
    """A clock that is some seconds off."""

    def __init__(self, seconds: float) -> None:
        super().__init__(now=lambda _zone: datetime.now(UTC) - timedelta(seconds=seconds))


async def said_to(gate: Gate, state: Any, *beats: tuple[Any, bytes]) -> list[bytes | None]:
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

        scope = {"type": "http", "path": superlink.BEAT, "client": ["10.0.0.1", 1], "server": ["10.0.0.2", 2],
                 "app": app, "headers": headers}  # fmt: skip
        await gate(scope, receive, send)
        return sent[-1]["body"] if sent else None

    return list(await asyncio.gather(*(one(*beat) for beat in beats)))


async def flower_says_nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """In the place of Flower's own server."""


def test_heartbeats_that_come_together_are_written_in_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path)
    hearts = [Heart(database, node) for node in (5, (1 << 63) - 9, 7)]
    commits = list[int]()
    acknowledge = beats._acknowledged

    def noted(state: Any, of: Any) -> frozenset[int]:
        commits.append(len(of))
        return acknowledge(state, of)

    monkeypatch.setattr(beats, "_acknowledged", noted)
    said = asyncio.run(said_to(Gate(flower_says_nothing), database.state, *(heart.beat() for heart in hearts)))
    assert [_number(words or b"") for words in said] == [1, 1, 1]
    assert sum(commits) == 3
    assert len(commits) < 3, "checking a signature takes less than they wait for each other"
    with database.state.session() as session:
        for row in session.scalars(select(NodeRow)):
            assert (row.status, row.heartbeat_interval) == ("online", 30.0)
            assert row.online_until == pytest.approx(time.time() + 60.0, abs=10.0)


def test_a_heartbeat_that_is_not_right_is_flowers_to_refuse(tmp_path: Path) -> None:
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
    said = asyncio.run(said_to(Gate(flower_says_nothing), database.state, *wrong))
    assert said == [None] * len(wrong)
    with database.state.session() as session:
        assert {row.node_id: row.online_until for row in session.scalars(select(NodeRow))} == {5: 0.0, 6: 0.0, 7: 0.0}


def test_who_hangs_up_does_not_take_the_others_along(tmp_path: Path) -> None:
    database = Database(tmp_path)
    first, second = Heart(database, 5), Heart(database, 6)

    async def talk() -> list[bytes | None]:
        gate = Gate(flower_says_nothing)
        one = asyncio.create_task(said_to(gate, database.state, first.beat()))
        await asyncio.sleep(0.1)  # its heartbeat waits to be written
        other = asyncio.create_task(said_to(gate, database.state, second.beat()))
        await asyncio.sleep(0.05)
        one.cancel()
        return await other

    assert [_number(words or b"") for words in asyncio.run(talk())] == [1]


STARTED = """
import sys
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore import log
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.cli import flower_superlink as module
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from sqlalchemy import text
from fairfold.flower import superlink

def started():
    state = LinkStateFactory(sys.argv[1], NoOpFederationManager(), ObjectStoreFactory()).state()
    with state.session() as session:
        log(20, "waits %s ms", session.execute(text("PRAGMA busy_timeout")).scalar())

sys.modules["flwr.superlink.cli.flower_superlink"].flower_superlink = started
superlink.main()
"""


def test_a_transaction_waits_for_others_and_a_log_has_times_and_no_colours(tmp_path: Path) -> None:
    """Where a disk is slow, Flower's own 5 s end in "database is locked", and the answer that was sent is lost."""
    command = [sys.executable, "-c", STARTED, str(tmp_path / "state.db")]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert re.search(rf"^INFO \d{{4}}-\d\d-\d\d .* waits {1000 * superlink.BUSY} ms$", said, re.MULTILINE), said
