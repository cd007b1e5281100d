"""Flower's SuperLink behind a gate: ``python -m fairfold.flower.superlink``, with the options of ``flower-superlink``.

Flower's own takes bodies of any length, keeps whatever a node with a key uploads, and lets whoever reaches its port
register keys and start runs, which is to run code. Here

- nodes reach what nodes need; everything else is for this machine alone, and for the addresses it is told;
- no request is longer than a piece of an answer can be, and only so many are at work at once;
- what a node has stored is counted (``quota``);
- a node that is refused is told why: Flower has one answer for a key that it does not know and for a node whose old
  connection is still open;
- a device that waits costs little: its questions for work (``idle``), and its heartbeats (``beats``);
- devices enrol (``reception``), where the folder of a server is given (``--fleet``).
"""

import argparse
import asyncio
import functools
import gc
import inspect
import json
import logging
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from fairfold.errors import FairfoldError, InvalidState
from fairfold.flower.beats import Beats
from fairfold.flower.idle import Idle
from fairfold.flower.quota import Quota, Refused
from fairfold.flower.reception import LARGEST, OWN, Answer, Reception, Route, refusal

FLEET = "/v1/fleet/"
PULL, BEAT = FLEET + "pull-messages", FLEET + "send-node-heartbeat"
PROTOBUF = (b"content-type", b"application/protobuf")
LIMITS = {
    FLEET + "push-object": (8 << 20, 16), FLEET + "pull-object": (1 << 20, 16), FLEET: (1 << 20, 64), OWN: (LARGEST, 4),
}  # fmt: skip
"""Bytes of a request, and how many such are at work at once; others wait, unread, for their turn. Flower cuts arrays
into pieces of 5 MiB; all else that a node says is short. Turns are apart, so that heartbeats do not wait for pieces."""

REFUSAL_SECONDS = 1.0  # that a refused token takes: with four turns, four guesses a second from all of the world

# Bytes of requests after which garbage is collected: served ones are left behind in cycles, and until it looks for
# those Python counts objects, not bytes.
COLLECTED_AFTER = 64 << 20
BUSY = 60  # seconds that a transaction waits for others; after Flower's 5 an answer is lost where a disk is slow
SLOWEST = 120.0  # seconds in which a request must have come, and its response must have been read
KEPT = 90  # seconds that a silent connection is kept, longer than devices pause: to open one costs more than a question
MEGABYTE = 10**6
KNOWN = "1.41."
PARAMETERS = {
    "activate_node": ("request", "state"),
    "pull_messages": ("request", "state", "store"),
    "push_messages": ("request", "state"),
    "push_object": ("request", "state"),
}
"""The handlers that are counted, as Flower of the known version has them."""

UNREGISTERED = "this key is not registered here"
EARLY = "the old connection of this node is still open"

log = logging.getLogger("fairfold.flower")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]  # what serves requests, by the ASGI convention


class Gate:
    """Stands before a SuperLink; ``trusted`` addresses may do everything, beside this machine's own.

    What it answers itself are ``routes``, by path.
    """

    def __init__(
        self,
        app: App,
        trusted: frozenset[str] = frozenset(),
        slowest: float = SLOWEST,
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        self.app, self.trusted, self.slowest, self.routes = app, trusted, slowest, routes or {}
        self._uncollected, self._idle, self._beats = 0, Idle(), Beats()
        self._turns = {path: asyncio.Semaphore(at_once) for path, (_, at_once) in LIMITS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        route = self.routes.get(scope.get("path", ""))
        if scope["type"] == "http" and route is not None and (not route.home or self._at_home(scope)):
            async with self._turns[OWN]:
                await self._answer(route, scope, receive, send)
        elif scope["type"] == "lifespan" or (not scope["path"].startswith(FLEET) and self._at_home(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await _refuse(send, 403, "only for the server's own machine")
        else:
            kind = scope["path"] if scope["path"] in LIMITS else FLEET
            async with self._turns[kind]:
                await self._serve(LIMITS[kind][0], scope, receive, send)

    def _at_home(self, scope: Scope) -> bool:
        """Whoever comes from the address that he came to is on this machine."""
        client, server = scope.get("client") or [None], scope.get("server") or [""]
        return client[0] == server[0] or client[0] in self.trusted

    async def _answer(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request without the SuperLink; whatever goes wrong, no more than that is told."""
        if scope["method"] != route.method:
            await _refuse(send, 405, f"only {route.method}")
            return
        body = await self._body(LIMITS[OWN][0], receive, send)
        if body is None:
            return
        try:
            state = scope["app"].state.linkstate_factory.state()
            answer = await asyncio.to_thread(route.answer, state, body)
        except Exception:
            log.exception("%s", scope["path"])
            answer = refusal(500, "the server could not answer: its log says more")
        if answer.status != 200:
            await asyncio.sleep(REFUSAL_SECONDS)
        await asyncio.wait_for(_send(send, answer), self.slowest)

    async def _body(self, most: int, receive: Receive, send: Send) -> bytes | None:
        """A request's body; None if it was refused."""
        try:
            body = await asyncio.wait_for(_read(receive, most), self.slowest)
        except TimeoutError:
            await _refuse(send, 408, "too slow")
            return None
        if body is None:
            await _refuse(send, 413, f"more than {most} bytes")
        return body

    async def _serve(self, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(most, receive, send)
        if body is None:
            return
        if scope["path"] in (PULL, BEAT) and "app" in scope:
            if scope["path"] == PULL:
                answer = await self._idle.answer(body, scope["app"].state.linkstate_factory.state())
            else:
                answer = await self._beats.answer(scope, body)
            if answer is not None:
                await send({"type": "http.response.start", "status": 200, "headers": [PROTOBUF]})
                await send({"type": "http.response.body", "body": answer})
                return
        waiting, size = [{"type": "http.request", "body": body, "more_body": False}], len(body)
        del body

        async def replay() -> Scope:
            return waiting.pop() if waiting else await receive()

        async def patient(message: Scope) -> None:
            """The server's ``send`` waits until what was sent before has been read: so the turn lasts until then."""
            last = message["type"] == "http.response.body" and not message.get("more_body")
            await send({**message, "more_body": True} if last else message)
            if last:
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), self.slowest)

        await self.app(scope, replay, patient)
        self._uncollected += size
        if self._uncollected > COLLECTED_AFTER:
            self._uncollected = 0
            gc.collect()


async def _read(receive: Receive, most: int) -> bytes | None:
    """A request's body; None if it is longer than allowed or breaks off."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def _refuse(send: Send, status: int, reason: str) -> None:
    # The connection is closed: the rest of a body that is too long must not be read.
    await _say(send, status, {"detail": reason}, [(b"connection", b"close")])


async def _say(send: Send, status: int, content: dict[str, Any], more: list[tuple[bytes, bytes]] | None = None) -> None:
    headers = [(b"content-type", b"application/json"), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _send(send: Send, answer: Answer) -> None:
    """Send an object, or a file piece by piece."""
    if not isinstance(answer.content, Path):
        await _say(send, answer.status, answer.content)
        return
    with answer.content.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        while size > 0:
            piece = await asyncio.to_thread(file.read, min(size, 1 << 20))
            size = size - len(piece) if piece else 0
            await send({"type": "http.response.body", "body": piece, "more_body": size > 0})


def explain(handlers: Any) -> None:
    """Tell a node that may not come in whether its key is unknown or its old connection is still open."""
    from fastapi import HTTPException
    from flwr.supercore.error import FlowerError

    activate_node = handlers.activate_node

    @functools.wraps(activate_node)
    def activate(request: Any, state: Any) -> Any:
        try:
            return activate_node(request=request, state=state)
        except FlowerError:
            if state.get_node_id_by_public_key(request.public_key) is None:
                raise HTTPException(403, UNREGISTERED) from None
            raise HTTPException(409, EARLY) from None

    handlers.activate_node = activate


def count(handlers: Any, quota: Quota) -> None:
    """Put a quota before the handlers that take in what nodes upload."""
    from fastapi import HTTPException
    from flwr.proto.message_pb2 import PushObjectResponse

    pull_messages, push_messages, push_object = handlers.pull_messages, handlers.push_messages, handlers.push_object

    @functools.wraps(pull_messages)
    def pull(request: Any, state: Any, store: Any) -> Any:
        response = pull_messages(request=request, state=state, store=store)
        for message in response.messages_list:
            facts = message.metadata
            quota.given(request.node.node_id, facts.message_id, facts.created_at + facts.ttl)
        return response

    @functools.wraps(push_messages)
    def announce(request: Any, state: Any) -> Any:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "one answer with one tree")
        facts, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if facts.message_id != tree.object_id:
            raise HTTPException(400, "a tree of another answer")
        with quota.lock:  # two trees that do not fit together must not be stored at the same time
            node, size = request.node.node_id, request.ByteSize()
            try:
                quota.announce(node, facts.reply_to_message_id, tree, size, state)
            except Refused as refused:  # 503 is what a SuperNode tries again
                raise HTTPException(503 if refused.later else 429, str(refused)) from None
            return push_messages(request=request, state=state)

    @functools.wraps(push_object)
    def upload(request: Any, state: Any) -> Any:
        try:
            quota.upload(request.node.node_id, request.object_id, len(request.object_content), state)
        except Refused as refused:
            if not refused.later:
                return PushObjectResponse(stored=False)  # Flower's own way to say so
            raise HTTPException(503, str(refused)) from None
        return push_object(request=request, state=state)

    handlers.pull_messages, handlers.push_messages, handlers.push_object = pull, announce, upload


def require_known(version: str, handlers: Any, router: Any) -> None:
    """Refuse a Flower that may not be built as expected: a gate that stands beside the door is worse than none."""
    found = {name: tuple(inspect.signature(getattr(handlers, name, lambda: None)).parameters) for name in PARAMETERS}
    if not version.startswith(KNOWN) or found != PARAMETERS or getattr(router, "fleet_handlers", None) is not handlers:
        given = f"Flower {version}, whose SuperLink may be built differently"
        remedy = "pip install 'fairfold[flower]', or start flower-superlink itself, which has no such limits."
        raise InvalidState(given, f"Flower {KNOWN}x", remedy)


def _megabytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; needed: a whole number of megabytes, at least 1")
    return int(text)


def main() -> None:
    """Start a SuperLink behind a gate."""
    parser = argparse.ArgumentParser(
        prog="python -m fairfold.flower.superlink",
        description="Flower's SuperLink with limits on what nodes can do. All other options are flower-superlink's.",
        allow_abbrev=False,
    )
    half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // MEGABYTE
    stored = "megabytes that {} may have stored (default: {}%(default)s)"
    for name, most, words in (
        ("--node-quota", 2000, stored.format("one node", "")),
        ("--total-quota", half_of_memory, stored.format("all nodes", "half of this machine's memory, ")),
    ):
        parser.add_argument(name, type=_megabytes, default=most, metavar="MB", help=words)
    control = "another machine that may start runs and register keys; may be repeated (default: this one alone)"
    parser.add_argument("--control-from", action="append", default=[], metavar="ADDRESS", help=control)
    fleet = "the folder of a server (`fairfold server init`) whose devices may enrol here (default: none)"
    parser.add_argument("--fleet", type=Path, metavar="FOLDER", help=fleet)
    own, others = parser.parse_known_args()
    quota = Quota(own.node_quota * MEGABYTE, own.total_quota * MEGABYTE)
    try:
        guard(quota, frozenset(own.control_from), None if own.fleet is None else Reception.of(own.fleet))
    except FairfoldError as error:
        parser.exit(2, f"{error}\n")
    sys.stderr.write(f"A node may store {own.node_quota} MB, all nodes {own.total_quota} MB.\n")
    import uvicorn
    from flwr.supercore.logger import update_console_handler
    from flwr.superlink.cli.flower_superlink import flower_superlink

    if not sys.stderr.isatty():  # a file or a journal
        update_console_handler(timestamps=True, colored=False)
    uvicorn.run = functools.partial(uvicorn.run, timeout_keep_alive=KEPT)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a connection is an open file: all that are allowed
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.argv = ["flower-superlink", *others]
    flower_superlink()


def guard(quota: Quota, trusted: frozenset[str], reception: Reception | None = None) -> None:
    """Make every SuperLink that this process starts one behind a gate."""
    import flwr
    from flwr.supercore import sql_mixin
    from flwr.supercore.constant import SQLITE_PRAGMAS
    from flwr.superlink import extensions
    from flwr.superlink.routers.fleet import router
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    require_known(flwr.__version__, fleet_handlers, router)
    for legacy in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        os.environ.pop(legacy, None)  # other doors, without a gate
    count(fleet_handlers, quota)
    explain(fleet_handlers)
    vars(sql_mixin).update(SQLITE_PRAGMAS=(*SQLITE_PRAGMAS, ("busy_timeout", str(1000 * BUSY))))
    routes = {} if reception is None else reception.routes
    # Flower's own log leaves out what nodes do all the time; so does this one what the operator's programs do.
    logging.getLogger("uvicorn.access").addFilter(lambda record: OWN not in record.getMessage())
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate, trusted=trusted, routes=routes), *others())


if __name__ == "__main__":
    main()
