"""Quotas of nodes, and the SuperLink's handlers and options."""

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.routers.fleet import router
from flwr.superlink.servicer.fleet import fleet_handlers

from fairfold.errors import InvalidState
from fairfold.flower.fleet import superlink
from fairfold.flower.fleet.superlink import MAX_TRIES, MIN_CHARGE, Quota, UploadRefused, require_supported_flower

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


def test_a_node_may_only_reply_to_messages_that_it_was_given_and_not_for_ever() -> None:
    quota, state = Quota(1 << 30, 1 << 30), State()
    quota.give(2, "asked", soon())
    for node, asked in ((1, "asked"), (2, "other"), (2, "")):
        with pytest.raises(UploadRefused, match="was not given"):
            announced(quota, state, asked, tree("a"), node)
    for _ in range(MAX_TRIES):
        announced(quota, state, "asked", tree("a"), 2)
    with pytest.raises(UploadRefused, match="too often"):
        announced(quota, state, "asked", tree("a"), 2)
    quota.give(2, "old", time.time() - 1)
    with pytest.raises(UploadRefused, match="too late"):
        announced(quota, state, "old", tree("b"), 2)
    with pytest.raises(UploadRefused, match="announced"):
        quota.upload(2, name("c"), 5, state)
    assert quota.stored == quota.accounts[2].used == MIN_CHARGE


def test_pieces_count_until_they_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.fleet.superlink.RELEASE_PAUSE", 0.0)
    quota, state = Quota(4 << 20, 6 << 20), State()
    for node in (1, 2):
        for number in range(3):
            quota.give(node, f"asked-{number}", soon())
    root = tree("root", *(tree(number) for number in range(5)))
    announced(quota, state, "asked-0", root)
    for number in range(3):
        quota.upload(1, name(number), len(PIECE), state)
        state.object_store.put(name(number), PIECE)
    with pytest.raises(UploadRefused, match="a node may have stored") as refused:
        quota.upload(1, name(3), len(PIECE), state)
    assert not refused.value.later
    with pytest.raises(UploadRefused, match="a node may have stored"):
        announced(quota, state, "asked-1", tree("many", *(tree(("many", number)) for number in range(64))))
    announced(quota, state, "asked-0", tree("two", *(tree(("two", number)) for number in range(2))), node=2)
    quota.upload(2, name(("two", 0)), len(PIECE), state)
    state.object_store.put(name(("two", 0)), PIECE)
    with pytest.raises(UploadRefused, match="all nodes") as refused:
        quota.upload(2, name(("two", 1)), 2 * len(PIECE), state)
    assert refused.value.later
    state.object_store.delete(name("root"))  # the server has fetched it
    quota.upload(2, name(("two", 1)), 2 * len(PIECE), state)
    assert quota.accounts[1].used == 0
    assert quota.stored == quota.accounts[2].used == 3 * len(PIECE) + MIN_CHARGE


def test_what_nobody_fetched_in_time_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.fleet.superlink.RELEASE_PAUSE", 0.0)
    quota, state = Quota(2 << 20, 1 << 30), State()
    quota.give(1, "first", soon())
    announced(quota, state, "first", tree("root", tree(0)))
    quota.upload(1, name(0), len(PIECE), state)
    state.object_store.put(name(0), PIECE)
    quota.give(1, "second", soon() + 1_000)
    announced(quota, state, "second", tree("next", tree(1)))
    with pytest.raises(UploadRefused):
        quota.upload(1, name(1), len(PIECE), state)
    later = time.time() + 500
    monkeypatch.setattr("fairfold.flower.fleet.superlink.time.time", lambda: later)
    quota.upload(1, name(1), len(PIECE), state)
    assert state.deleted == {"first"}
    assert len(state.object_store) == 2
    with pytest.raises(UploadRefused, match="announced"):
        quota.upload(1, name(0), len(PIECE), state)


def database() -> SqlObjectStore:
    """What ``--database`` uses."""
    store = SqlObjectStore(":memory:", verify=False)
    store.initialize()
    return store


@pytest.mark.parametrize("store", [InMemoryObjectStore, database])
def test_trees_that_would_grow_when_they_are_read_are_refused(store: Callable[[], Any]) -> None:
    """Each piece contains the next one twice, which is response once: two to the thirtieth when it is written out."""
    quota, state = Quota(1 << 30, 1 << 30), State(store())
    quota.give(1, "asked", soon())
    bomb = tree(0)
    for number in range(1, 30):
        bomb = tree(number, bomb, tree(number - 1))
    with pytest.raises(UploadRefused, match="two contents"):
        announced(quota, state, "asked", bomb)
    array = tree("array", *(tree(("part", number)) for number in range(9)))
    announced(quota, state, "asked", tree("m", array))
    announced(quota, state, "asked", tree("m", array))
    for grown in (tree("m", array, array), tree("n", tree("array")), tree("n", tree("m"), tree("m"))):
        with pytest.raises(UploadRefused, match="the stored one"):
            announced(quota, state, "asked", grown)
    assert len(state.object_store) == 11


def test_a_quota_counts_in_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairfold.flower.fleet.superlink.RELEASE_PAUSE", 0.0)
    quota, state = Quota(2 << 20, 1 << 30), State(database())
    quota.give(1, "asked", soon())
    announced(quota, state, "asked", tree("root", tree(0), tree(1)))
    quota.upload(1, name(0), len(PIECE), state)
    state.object_store.put(name(0), PIECE)
    with pytest.raises(UploadRefused):
        quota.upload(1, name(1), len(PIECE), state)
    state.object_store.delete(name("root"))
    announced(quota, state, "asked", tree("next", tree(2)))
    quota.upload(1, name(2), 2 * len(PIECE) - MIN_CHARGE, state)
    assert quota.stored == quota.accounts[1].used == 2 * len(PIECE)


def test_another_flower_is_refused() -> None:
    require_supported_flower("1.41.0", fleet_handlers, router)
    other = SimpleNamespace(**vars(fleet_handlers))
    other.push_object = lambda request: request
    for version, handlers, routes in (
        ("1.42.0", fleet_handlers, router),
        ("1.41.0", other, SimpleNamespace(fleet_handlers=other)),
        ("1.41.0", fleet_handlers, SimpleNamespace(fleet_handlers=other)),
        ("1.41.0", SimpleNamespace(), router),
    ):
        with pytest.raises(InvalidState, match=r"1\.41"):
            require_supported_flower(version, handlers, routes)


def test_the_command_is_light_and_refuses_a_quota_that_is_none() -> None:
    script = "import sys, fairfold.flower.fleet.superlink; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    for quota in ("0", "16x", "-1", "2GB"):
        command = [sys.executable, "-m", "fairfold.flower.fleet.superlink", "--node-quota", quota]
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
    superlink.enforce_quota(handlers, Quota(2 << 20, 1 << 30))
    node, state = Node(node_id=7), State()
    reply = Metadata(message_id=name("root"), reply_to_message_id=name("asked"))
    request = PushMessagesRequest(
        node=node, messages_list=[MessageProto(metadata=reply)], message_object_trees=[tree("root", tree(0))]
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
        with pytest.raises(HTTPException, match="one reply"):
            handlers.push_messages(request=wrong, state=state)
    request.message_object_trees[0].object_id = name("other")
    with pytest.raises(HTTPException, match="another reply"):
        handlers.push_messages(request=request, state=state)


STARTED = """
import sys
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore import log
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.cli import flower_superlink as module
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from sqlalchemy import text
from fairfold.flower.fleet import superlink

def started():
    state = LinkStateFactory(sys.argv[1], NoOpFederationManager(), ObjectStoreFactory()).state()
    with state.session() as session:
        log(20, "waits %s ms", session.execute(text("PRAGMA busy_timeout")).scalar())

sys.modules["flwr.superlink.cli.flower_superlink"].flower_superlink = started
superlink.main()
"""


def test_a_transaction_waits_for_others_and_a_log_has_times_and_no_colors(tmp_path: Path) -> None:
    """Where a disk is slow, Flower's own 5 s end in "database is locked", and the reply that was sent is lost."""
    command = [sys.executable, "-c", STARTED, str(tmp_path / "state.db")]
    response = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert re.search(
        rf"^INFO \d{{4}}-\d\d-\d\d .* waits {1000 * superlink.DATABASE_TIMEOUT} ms$", response, re.MULTILINE
    ), response
