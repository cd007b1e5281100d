"""Heartbeats of devices that wait: checked by Flower's own rules, and written down many at a time.

Flower opens a transaction for each of them, behind four layers of its web server: 9 ms of the server's processor time,
most of what a large fleet costs that has nothing to do. Here those that come within a moment share one transaction.
Whatever is not as it should be goes the whole way, so that it is Flower that refuses it.
"""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

GATHERED = 0.2  # seconds in which heartbeats come together


class Beats:
    """Says to a device whether it still counts as connected."""

    def __init__(self) -> None:
        self._open: dict[int, float] = {}  # what was said and is to be written, by node
        self._written: asyncio.Task[frozenset[int]] | None = None

    async def answer(self, scope: MutableMapping[str, Any], body: bytes) -> bytes | None:
        """What is said to a heartbeat; None where Flower has to say it."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

        app = scope["app"].state
        if not getattr(app, "enable_supernode_auth", False) or not hasattr(app.linkstate_factory.state(), "session"):
            return None
        found = await asyncio.to_thread(_checked, scope, body)
        if found is None:
            return None
        node, interval = found
        self._open[node] = interval
        if self._written is None:
            self._written = asyncio.create_task(self._write(app.linkstate_factory))
        try:
            known = await asyncio.shield(self._written)  # one that hangs up must not take the others along
        except Exception:  # e.g. a database that is locked
            return None
        return bytes(SendNodeHeartbeatResponse(success=True).SerializeToString()) if node in known else None

    async def _write(self, factory: Any) -> frozenset[int]:
        await asyncio.sleep(GATHERED)
        beats, self._open, self._written = self._open, {}, None
        return await asyncio.to_thread(_acknowledged, factory.state(), beats)


def _checked(scope: MutableMapping[str, Any], body: bytes) -> tuple[int, float] | None:
    """The node that says so, and its interval; None where Flower would refuse it."""
    from fastapi import Request
    from flwr.common.constant import HEARTBEAT_MAX_INTERVAL, HEARTBEAT_MIN_INTERVAL
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.superlink.routers.fleet.node_auth import authenticate_node

    request = Request({**scope, "state": {}})
    try:
        said = SendNodeHeartbeatRequest.FromString(body)
        request.state.protobuf_request = said
        authenticate_node(request)
    except Exception:  # no request, or not from whom it says: let Flower say so
        return None
    if not HEARTBEAT_MIN_INTERVAL <= said.heartbeat_interval <= HEARTBEAT_MAX_INTERVAL:
        return None
    return int(said.node.node_id), float(said.heartbeat_interval)


def _acknowledged(state: Any, beats: Mapping[int, float]) -> frozenset[int]:
    """Those of some nodes that are connected now, in one transaction."""
    with state.session():
        return frozenset(node for node, of in beats.items() if state.acknowledge_node_heartbeat(node, of))
