"""The gateway in front of Flower's SuperLink: an ASGI middleware that limits and answers requests.

- Nodes reach Flower's endpoints for nodes; all others need the secret of the server's folder (:mod:`.control`).
- The length of requests is bounded, and so is how many are handled at once. A request waits for its turn when it has
  arrived, or when it is long and its headers are signed with a registered key: half a request holds up nobody.
- Polls of idle nodes and heartbeats, most of what a fleet sends, are answered from a :class:`PollCache` and by a
  :class:`HeartbeatBatcher`: Flower would open a transaction for each.
- The gateway's own routes (:mod:`.enrolment`) are answered without Flower.
"""

import asyncio
import binascii
import contextlib
import gc
import hmac
import json
import logging
import os
import time
from base64 import b64decode
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from fastapi import HTTPException, Request
from flwr.common.constant import HEARTBEAT_MAX_INTERVAL, HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PullMessagesResponse, Reconnect
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.supercore.state.schema.linkstate_models import Node as NodeRow
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from sqlalchemy import func, select
from starlette.types import ASGIApp, Receive, Scope, Send

from fairfold.flower.fleet.connection import API_PREFIX, FLEET_API
from fairfold.flower.fleet.control import HEADER
from fairfold.flower.fleet.enrolment import MAX_REQUEST_BYTES, HttpResponse, Route, error_response

API = "/v1/"  # all of Flower's endpoints
POLL, HEARTBEAT = FLEET_API + "pull-messages", FLEET_API + "send-node-heartbeat"
LIMITS = {
    FLEET_API + "push-object": (8 << 20, 16),
    FLEET_API + "pull-object": (1 << 20, 16),
    FLEET_API: (1 << 20, 64),
    API_PREFIX: (MAX_REQUEST_BYTES, 4),
}
"""Bytes of a request, and how many such are handled at once; others wait, unread. Flower cuts arrays into objects of
5 MiB; all else that a node sends is short. Limits are separate, so that heartbeats do not wait for objects."""

OBJECTS = frozenset(list(LIMITS)[:2])  # requests that are long, or whose response is
TURNS_EACH = 2  # objects of one device, and files of one address, that are handled at once
SHORT_BYTES = 1 << 16  # read of anybody's request without a turn: uvicorn holds as much of each connection anyway
KEY_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()
REFUSAL_SECONDS = 1.0  # delay of a refused enrolment, so that guesses cost the server little
GC_BYTES = 64 << 20  # of requests, after which garbage is collected: Flower leaves them in cycles
REQUEST_TIMEOUT = 120.0  # seconds in which a request must have arrived, and its response must have been read
CACHE_SECONDS = 0.2  # lifetime of the set of nodes that have messages
COUNT_SECONDS = 10.0  # lifetime of the number of connected nodes
POLLS_PER_SECOND = 100  # of all idle nodes together
MAX_POLL_SECONDS = 60  # between two polls of a node
BATCH_SECONDS = 0.2  # in which heartbeats are gathered
DATABASE = "session"  # what Flower's state has if it is in a database; one in memory is fast enough without a cache

log = logging.getLogger("fairfold.flower")


class _Refused(Exception):
    """A request that is refused, with an HTTP ``status`` and the ``reason``; its connection is closed."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Gateway:
    """ASGI middleware in front of a SuperLink."""

    def __init__(
        self,
        app: ASGIApp,
        secret: str = "",  # with which programs of this machine may use all endpoints; without one nobody may
        timeout: float = REQUEST_TIMEOUT,
        routes: Mapping[str, Route] | None = None,  # paths that the gateway answers itself
    ) -> None:
        self.app = app
        self.timeout = timeout
        self.routes = routes or {}
        self._secret = secret.encode()
        self._poll_cache, self._heartbeats = PollCache(), HeartbeatBatcher()
        self._uncollected = 0
        self._turns: MutableMapping[object, asyncio.Semaphore] = WeakValueDictionary()
        self._slots = {path: asyncio.Semaphore(at_once) for path, (_, at_once) in LIMITS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":  # a WebSocket: none is served here
            await send({"type": "websocket.close", "code": 1008})
        else:
            try:
                await self._serve(scope, receive, send)
            except _Refused as refused:
                # The connection is closed: the rest of a body that is too long must not be read.
                response = error_response(refused.status, refused.reason)
                await asyncio.wait_for(_respond(send, response, (b"connection", b"close")), self.timeout)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, path = self.routes.get(scope["path"]), scope["path"]
        if any(name == b"transfer-encoding" for name, _ in scope.get("headers") or ()):  # nobody here needs that
            raise _Refused(411, "a request has to say its length")
        if route is not None and (not route.control or self._may_control(scope)):
            await self._handle_route(route, scope, receive, send)
        elif path.startswith(FLEET_API):
            await self._forward(path if path in LIMITS else FLEET_API, scope, receive, send)
        elif not self._may_control(scope):
            raise _Refused(403, "only for the server's own account")
        elif not path.startswith(API):  # Flower's /docs, which loads scripts from elsewhere
            raise _Refused(404, "not served here")
        else:
            await self.app(scope, receive, send)

    def _may_control(self, scope: Scope) -> bool:
        """Whether a request comes from this machine, with the secret of the server's folder."""
        client, server = scope.get("client") or [None], scope.get("server") or [""]
        given = dict(scope.get("headers") or []).get(HEADER.encode(), b"")
        return bool(self._secret) and client[0] == server[0] and hmac.compare_digest(given, self._secret)

    def _turn(self, kind: str, who: object) -> asyncio.Semaphore:
        """The turns of one device or address, of which it has some at a time."""
        return self._turns.setdefault((kind, who), asyncio.Semaphore(TURNS_EACH))

    async def _handle_route(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request to one of the gateway's own routes; errors are logged, and the response has no details."""
        if scope["method"] != route.method:
            raise _Refused(405, f"only {route.method}")
        body = bytearray()
        await self._read(body, LIMITS[API_PREFIX][0], receive)
        _require_short(body, LIMITS[API_PREFIX][0])
        try:
            sent = scope.get("query_string", b"") if route.method == "GET" else bytes(body)
            async with contextlib.nullcontext() if route.control else self._slots[API_PREFIX]:
                state = scope["app"].state.linkstate_factory.state()
                response = await asyncio.to_thread(route.handler, state, sent)
        except Exception:
            log.exception("%s", scope["path"])
            response = error_response(500, "the server failed: see its log")
        if response.status != 200:
            await asyncio.sleep(REFUSAL_SECONDS)
        address = (scope.get("client") or [""])[0]
        async with self._turn(API_PREFIX, address) if isinstance(response.content, Path) else contextlib.nullcontext():
            await asyncio.wait_for(_respond(send, response), self.timeout)

    async def _read(self, body: bytearray, max_bytes: int, receive: Receive) -> bool:
        """Read a body on: True when it is whole, False when ``max_bytes`` came and there is more."""
        try:
            async with asyncio.timeout(self.timeout):
                while len(body) <= max_bytes:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _Refused(400, "the request breaks off")
                    body += message.get("body", b"")
                    if not message.get("more_body"):
                        return True
        except TimeoutError:
            raise _Refused(408, "too slow") from None
        return False

    async def _forward(self, kind: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a node's request to the SuperLink when it is its turn."""
        max_bytes, body = LIMITS[kind][0], bytearray()
        is_whole = await self._read(body, min(max_bytes, SHORT_BYTES), receive)
        _require_short(body, max_bytes)
        if not is_whole and not await asyncio.to_thread(_is_enrolled, scope):
            raise _Refused(401, "a long request of nobody who has enrolled")
        key = dict(scope.get("headers") or ()).get(KEY_HEADER, b"")
        async with self._turn(kind, key) if kind in OBJECTS else contextlib.nullcontext(), self._slots[kind]:
            if not is_whole:
                await self._read(body, max_bytes, receive)
            _require_short(body, max_bytes)
            await self._forward_whole(bytes(body), scope, receive, send)

    async def _forward_whole(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request that has arrived, unless the cache or the batcher has a response."""
        response = None
        if scope["path"] == POLL and "app" in scope:
            response = await self._poll_cache.respond(body, scope["app"].state.linkstate_factory.state())
        elif scope["path"] == HEARTBEAT and "app" in scope:
            response = await self._heartbeats.respond(scope, body)
        if response is not None:
            await _send_whole(send, 200, response, (b"content-type", b"application/protobuf"))
            return
        requests, size = [{"type": "http.request", "body": body, "more_body": False}], len(body)
        del body

        async def replay() -> Scope:
            return requests.pop() if requests else await receive()

        async def send_and_wait(message: Scope) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            await send({**message, "more_body": True} if last else message)
            if last:  # wait until the response has been read, so that the slot is held until then
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), self.timeout)

        await self.app(scope, replay, send_and_wait)
        self._uncollected += size
        if self._uncollected > GC_BYTES:
            self._uncollected = 0
            gc.collect()


def _require_short(body: bytearray, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise _Refused(413, f"more than {max_bytes} bytes")


async def _send_whole(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def _respond(send: Send, response: HttpResponse, *headers: tuple[bytes, bytes]) -> None:
    """Send bytes, an object as JSON, or a file piece by piece."""
    if isinstance(response.content, bytes):
        await _send_whole(send, response.status, response.content, *response.headers, *headers)
        return
    if not isinstance(response.content, Path):
        body = json.dumps(response.content).encode()
        await _send_whole(send, response.status, body, (b"content-type", b"application/json"), *headers)
        return
    with response.content.open("rb") as file:
        size = max(os.fstat(file.fileno()).st_size - response.start, 0)
        file.seek(response.start)
        kind = (b"content-type", b"application/octet-stream")
        headers = (kind, (b"content-length", str(size).encode()), *headers)
        await send({"type": "http.response.start", "status": response.status, "headers": list(headers)})
        while size > 0:
            piece = await asyncio.to_thread(file.read, min(size, SHORT_BYTES))
            size = size - len(piece) if piece else 0
            await send({"type": "http.response.body", "body": piece, "more_body": size > 0})


class PollCache:
    """Answers polls of nodes that have no messages, from one query of the database for all polls within 0.2 s.

    The empty response reveals nothing but the seconds until the next poll, which grow with the fleet: no signature is
    checked. Nodes with messages are forwarded to Flower; wrong keys and clocks are refused with the next heartbeat.
    """

    def __init__(self) -> None:
        self._with_messages = frozenset[int]()
        self._num_online = 0
        self._queried, self._counted = -CACHE_SECONDS, -COUNT_SECONDS
        self._lock = asyncio.Lock()

    async def respond(self, body: bytes, state: Any) -> bytes | None:
        """The response to a poll of a node without messages; None where Flower has to respond."""
        if not hasattr(state, DATABASE):
            return None
        try:
            node = int(PullMessagesRequest.FromString(body).node.node_id)
        except Exception:  # not such a request: Flower refuses it
            return None
        async with self._lock:
            if time.monotonic() - self._queried >= CACHE_SECONDS:
                await asyncio.to_thread(self._query, state)
        until_next = Reconnect(reconnect=min(self._num_online // POLLS_PER_SECOND, MAX_POLL_SECONDS))
        response = PullMessagesResponse(reconnect=until_next)
        return None if node in self._with_messages else bytes(response.SerializeToString())

    def _query(self, state: Any) -> None:
        self._queried = time.monotonic()
        with state.session() as session:
            nodes = session.scalars(select(MessageIns.dst_node_id).where(MessageIns.delivered_at == "").distinct())
            self._with_messages = frozenset(node % (1 << 64) for node in nodes)
            if self._queried - self._counted >= COUNT_SECONDS:
                self._counted = self._queried
                online = select(func.count()).select_from(NodeRow).where(NodeRow.status == "online")
                self._num_online = int(session.scalar(online) or 0)


class HeartbeatBatcher:
    """Batches heartbeats into one transaction per 0.2 s: Flower takes 9 ms of processor time for each.

    They are checked by Flower's own rules; those that do not pass are forwarded, so that Flower refuses them.
    """

    def __init__(self) -> None:
        self._pending: dict[int, float] = {}  # interval by node
        self._written: asyncio.Task[frozenset[int]] | None = None

    async def respond(self, scope: Scope, body: bytes) -> bytes | None:
        """The response to a heartbeat of a connected node; None where Flower has to respond."""
        app = scope["app"].state
        if not getattr(app, "enable_supernode_auth", False) or not hasattr(app.linkstate_factory.state(), DATABASE):
            return None
        heartbeat = await asyncio.to_thread(_parse_heartbeat, scope, body)
        if heartbeat is None:
            return None
        node, interval = heartbeat
        self._pending[node] = interval
        if self._written is None:
            self._written = asyncio.create_task(self._write(app.linkstate_factory))
        try:
            connected = await asyncio.shield(self._written)  # one cancelled request must not cancel the others
        except Exception:  # e.g. a locked database
            return None
        return bytes(SendNodeHeartbeatResponse(success=True).SerializeToString()) if node in connected else None

    async def _write(self, factory: Any) -> frozenset[int]:
        await asyncio.sleep(BATCH_SECONDS)
        heartbeats, self._pending, self._written = self._pending, {}, None
        return await asyncio.to_thread(_acknowledge, factory.state(), heartbeats)


def _is_enrolled(scope: Scope) -> bool:
    """Whether a registered key has signed a request's headers, by Flower's own check; all are where it checks none."""
    app: Any = getattr(scope.get("app"), "state", None)
    if not getattr(app, "enable_supernode_auth", False):
        return True
    request = Request({**scope, "state": {}})
    try:
        key = b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)
        authenticate_node(request)
    except (KeyError, binascii.Error, HTTPException):
        return False
    return app.linkstate_factory.state().get_node_id_by_public_key(key) is not None


def _parse_heartbeat(scope: Scope, body: bytes) -> tuple[int, float] | None:
    """Node and interval of an authentic heartbeat; None where Flower would refuse it."""
    request = Request({**scope, "state": {}})
    try:
        heartbeat = SendNodeHeartbeatRequest.FromString(body)
        request.state.protobuf_request = heartbeat
        authenticate_node(request)
    except Exception:  # malformed or forged: Flower refuses it
        return None
    interval = float(heartbeat.heartbeat_interval)
    allowed = HEARTBEAT_MIN_INTERVAL <= interval <= HEARTBEAT_MAX_INTERVAL
    return (int(heartbeat.node.node_id), interval) if allowed else None


def _acknowledge(state: Any, heartbeats: Mapping[int, float]) -> frozenset[int]:
    """Acknowledge heartbeats in one transaction; returns the nodes that are connected."""
    with state.session():
        acknowledge = state.acknowledge_node_heartbeat
        return frozenset(node for node, interval in heartbeats.items() if acknowledge(node, interval))
