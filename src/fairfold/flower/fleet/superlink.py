"""Flower's SuperLink behind a gateway: ``python -m fairfold.flower.fleet.superlink``, with Flower's own options.

Flower's own accepts bodies of any length, stores whatever a node with a key uploads, and lets everyone who reaches its
port register keys and start runs, which is to run code. Here :mod:`.gateway` limits what reaches it; a node may upload
only replies to messages that it was given, within its quota: what was fetched is taken off, what was not in time is
deleted. A node that is refused learns why, and devices enrol (:mod:`.enrolment`) with the server of ``--fleet``.
"""

import argparse
import functools
import inspect
import logging
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from flwr.proto.message_pb2 import ObjectTree, PushObjectResponse
from flwr.supercore.error import FlowerError

from fairfold.errors import FairfoldError, InvalidState, install_hint
from fairfold.flower.fleet.connection import API_PREFIX
from fairfold.flower.fleet.control import pass_on_to_superexec, read_secret
from fairfold.flower.fleet.enrolment import Enrolment
from fairfold.flower.fleet.gateway import Gateway
from fairfold.flower.fleet.limits import limit_connections
from fairfold.flower.fleet.page import page_routes

DATABASE_TIMEOUT = 60  # seconds that a transaction waits for others; after Flower's 5 a reply is lost on a slow disk
MEGABYTE = 10**6
SUPPORTED = "1.41."
PARAMETERS = {
    "activate_node": ("request", "state"),
    "pull_messages": ("request", "state", "store"),
    "push_messages": ("request", "state"),
    "push_object": ("request", "state"),
}
"""The handlers that are wrapped, with their parameters in the supported version of Flower."""

UNREGISTERED = "this key is not registered here"
EARLY = "the old connection of this node is still open"

MIN_CHARGE = 1 << 16  # bytes that an announced object counts at least: its names and lists take memory too
MAX_TRIES = 8  # how often a node may reply to one message: a connection may break in the middle
MAX_OPEN_MESSAGES = 64  # of a node; Flower gives it one at a time
RELEASE_PAUSE = 1.0  # seconds between two looks at what is still stored, so that refusals cost the server little


class UploadRefused(Exception):
    """An upload that is not accepted; ``later`` where other nodes fill the server, so that it may be tried again."""

    def __init__(self, reason: str, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later


@dataclass
class _Reply:
    """An announced reply: the message replied to, its deadline, and the charge of every object."""

    message: str
    deadline: float
    charges: dict[str, int] = field(default_factory=dict)


@dataclass
class _Account:
    """The messages that a node was given, and the replies that it has stored."""

    given: dict[str, tuple[int, float]] = field(default_factory=dict)  # tries left and deadline, by message
    replies: dict[str, _Reply] = field(default_factory=dict)
    used: int = 0


class Quota:
    """Limits the bytes that each node, and all together, may have stored."""

    def __init__(self, each: int, total: int) -> None:
        self.each, self.total = each, total
        self.lock = threading.RLock()
        self.stored = 0  # bytes charged to all nodes now
        self.accounts: dict[int, _Account] = {}
        self._released = -RELEASE_PAUSE

    def give(self, node: int, message: str, deadline: float) -> None:
        """Note that a node was given a message, to which it may reply until a time (seconds since the epoch)."""
        with self.lock:
            account = self.accounts.setdefault(node, _Account())
            account.given[message] = (MAX_TRIES, deadline)
            while len(account.given) > MAX_OPEN_MESSAGES:
                del account.given[next(iter(account.given))]  # the oldest

    def announce(self, node: int, message: str, tree: ObjectTree, size: int, state: Any) -> None:
        """Charge a node for a reply that it announces, in ``size`` bytes, if it was given the message and has room."""
        with self.lock:
            account = self.accounts.get(node, _Account())
            if message not in account.given:
                raise UploadRefused("a reply to a message that this node was not given")
            tries, deadline = account.given[message]
            if tries < 1 or deadline < time.time():
                raise UploadRefused("a reply too late or too often")
            account.given[message] = (tries - 1, deadline)
            names = _consistent_names(tree, state.object_store)
            charges = account.replies.setdefault(tree.object_id, _Reply(message, deadline)).charges
            wanted = {name: max(charges.get(name, 0), MIN_CHARGE) for name in names}
            wanted[tree.object_id] = max(wanted[tree.object_id], size)
            try:
                self._charge(account, charges, wanted, state)
            except UploadRefused:
                if not charges:
                    account.replies.pop(tree.object_id, None)
                raise

    def upload(self, node: int, name: str, size: int, state: Any) -> None:
        """Charge a node for an object of a reply that it has announced."""
        with self.lock:
            account = self.accounts.get(node, _Account())
            for reply in account.replies.values():
                if name in reply.charges:
                    self._charge(account, reply.charges, {name: max(reply.charges[name], size)}, state)
                    return
            raise UploadRefused("an object of no reply that this node has announced")

    def _charge(self, account: _Account, charges: dict[str, int], wanted: dict[str, int], state: Any) -> None:
        def added() -> int:
            return sum(size - charges.get(name, 0) for name, size in wanted.items())

        room = min(self.each - account.used, self.total - self.stored)
        if added() > room and time.monotonic() - self._released >= RELEASE_PAUSE:
            for other in self.accounts.values():
                self._release(other, state, keep=charges)
            self._released = time.monotonic()
        if account.used + added() > self.each:
            raise UploadRefused(f"more than the {self.each} bytes that a node may have stored")
        if self.stored + added() > self.total:
            raise UploadRefused(f"more than the {self.total} bytes that all nodes may have stored", later=True)
        self._book(account, added())
        charges.update(wanted)

    def _book(self, account: _Account, size: int) -> None:
        account.used += size
        self.stored += size

    def _release(self, account: _Account, state: Any, keep: dict[str, int]) -> None:
        """Delete replies that were not fetched in time, and take off objects that are no longer stored."""
        store = state.object_store
        for root, reply in list(account.replies.items()):
            if reply.deadline < time.time():
                state.delete_messages({reply.message})
                store.delete(root)
            for name in [name for name in reply.charges if name not in store]:
                self._book(account, -reply.charges.pop(name))
            if not reply.charges and reply.charges is not keep:
                del account.replies[root]


def _consistent_names(tree: ObjectTree, store: Any) -> set[str]:
    """The names in a tree; refused if a name stands for two contents, here or in the store.

    Flower stores the children of every object once, by its name, and expands the tree again for the server. A few
    objects that each contain the next one twice would become more than any memory holds.
    """
    children = _children(tree)
    waiting, visited = [tree], set[str]()
    while waiting:
        node = waiting.pop()
        if node.object_id not in visited and node.object_id not in store:
            waiting.extend(node.children)
        elif node.object_id not in visited:
            stored = _children(store.get_object_tree(node.object_id))
            if any(children.get(name) != content for name, content in stored.items()):
                raise UploadRefused("an object with another content than the stored one")
        visited.add(node.object_id)
    return set(children)


def _children(tree: ObjectTree) -> dict[str, list[str]]:
    """The sorted children of every object in a tree (not every store preserves the order)."""
    found: dict[str, list[str]] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        children = sorted(child.object_id for child in node.children)
        if found.setdefault(node.object_id, children) != children:
            raise UploadRefused("an object with two contents")
        waiting.extend(node.children)
    return found


def explain_refusals(handlers: Any) -> None:
    """Let a refused node know whether its key is unknown or its old connection is open: Flower has one response."""
    activate_node = handlers.activate_node

    def activate(request: Any, state: Any) -> Any:
        try:
            return activate_node(request=request, state=state)
        except FlowerError:
            if state.get_node_id_by_public_key(request.public_key) is None:
                raise HTTPException(403, UNREGISTERED) from None
            raise HTTPException(409, EARLY) from None

    handlers.activate_node = activate


def enforce_quota(handlers: Any, quota: Quota) -> None:
    """Put a quota before the handlers that accept uploads of nodes."""
    pull_messages, push_messages, push_object = handlers.pull_messages, handlers.push_messages, handlers.push_object

    def pull(request: Any, state: Any, store: Any) -> Any:
        response = pull_messages(request=request, state=state, store=store)
        for message in response.messages_list:
            metadata = message.metadata
            quota.give(request.node.node_id, metadata.message_id, metadata.created_at + metadata.ttl)
        return response

    def announce(request: Any, state: Any) -> Any:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "one reply with one tree")
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if metadata.message_id != tree.object_id:
            raise HTTPException(400, "a tree of another reply")
        with quota.lock:  # two trees that contradict each other must not be stored at the same time
            try:
                node, message = request.node.node_id, metadata.reply_to_message_id
                quota.announce(node, message, tree, request.ByteSize(), state)
            except UploadRefused as refused:  # a SuperNode tries again after 503
                raise HTTPException(503 if refused.later else 429, str(refused)) from None
            return push_messages(request=request, state=state)

    def upload(request: Any, state: Any) -> Any:
        try:
            quota.upload(request.node.node_id, request.object_id, len(request.object_content), state)
        except UploadRefused as refused:
            if not refused.later:
                return PushObjectResponse(stored=False)  # Flower's own refusal
            raise HTTPException(503, str(refused)) from None
        return push_object(request=request, state=state)

    handlers.pull_messages, handlers.push_messages, handlers.push_object = pull, announce, upload


def require_supported_flower(version: str, handlers: Any, router: Any) -> None:
    """Refuse a version of Flower whose SuperLink may be built differently, so that requests could pass unchecked."""
    found = {name: tuple(inspect.signature(getattr(handlers, name, lambda: None)).parameters) for name in PARAMETERS}
    is_wired = getattr(router, "fleet_handlers", None) is handlers
    if not version.startswith(SUPPORTED) or found != PARAMETERS or not is_wired:
        given = f"Flower {version}, whose SuperLink may be built differently"
        remedy = f"{install_hint('flower')}, or start flower-superlink itself, which has no such limits."
        raise InvalidState(given, f"Flower {SUPPORTED}x", remedy)


def _megabytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; needed: a whole number of megabytes, at least 1")
    return int(text)


def main() -> None:
    """Start a SuperLink behind a gateway."""
    parser = argparse.ArgumentParser(
        prog="python -m fairfold.flower.fleet.superlink",
        description="Flower's SuperLink with limits on what nodes can do. All other options are flower-superlink's.",
        allow_abbrev=False,
    )
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // MEGABYTE
    add_quota = functools.partial(parser.add_argument, type=_megabytes, metavar="MB")
    add_quota("--node-quota", default=2000, help="megabytes that one node may have stored (default: %(default)s)")
    text = "megabytes that all nodes may have stored (default: half of this machine's memory, %(default)s)"
    add_quota("--total-quota", default=half_of_memory, help=text)
    fleet = "the folder of a server (`fairfold server init`): its devices may enrol here, its account may start runs"
    parser.add_argument("--fleet", type=Path, metavar="FOLDER", help=fleet)
    own, others = parser.parse_known_args()
    quota = Quota(own.node_quota * MEGABYTE, own.total_quota * MEGABYTE)
    try:
        install_gateway(quota, own.fleet)
    except FairfoldError as error:
        parser.exit(2, f"{error}\n")
    sys.stderr.write(f"A node may store {own.node_quota} MB, all nodes {own.total_quota} MB.\n")
    from flwr.supercore.logger import update_console_handler
    from flwr.superlink.cli.flower_superlink import flower_superlink

    if not sys.stderr.isatty():  # a file or a journal
        update_console_handler(timestamps=True, colored=False)
    limit_connections()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a connection is an open file: as many as allowed
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sys.argv = ["flower-superlink", *others]
    flower_superlink()


def install_gateway(quota: Quota, fleet: Path | None = None) -> None:
    """Put the gateway and the quota before every SuperLink that this process starts."""
    import flwr
    from flwr.supercore import sql_mixin
    from flwr.supercore.constant import SQLITE_PRAGMAS
    from flwr.superlink import extensions
    from flwr.superlink.routers.fleet import router
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    require_supported_flower(flwr.__version__, fleet_handlers, router)
    for legacy in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(legacy, None)  # other entrances, without a gateway
    enforce_quota(fleet_handlers, quota)
    explain_refusals(fleet_handlers)
    vars(sql_mixin).update(SQLITE_PRAGMAS=(*SQLITE_PRAGMAS, ("busy_timeout", str(1000 * DATABASE_TIMEOUT))))
    options: dict[str, Any] = {}
    if fleet is not None:
        enrolment = Enrolment.of(fleet)
        options = {"routes": enrolment.routes | page_routes(), "secret": read_secret(enrolment.secret)}
        pass_on_to_superexec()
    # Flower's log omits the frequent requests of nodes, and this filter those of the operator's programs.
    logging.getLogger("uvicorn.access").addFilter(lambda record: API_PREFIX not in record.getMessage())
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gateway, **options), *others())


if __name__ == "__main__":
    main()
