"""Devices that ask for work while there is none for them: most of what a fleet does, so it has to cost little.

Flower looks at the key and writes to its database for every such question. Here one look at the database serves all
that ask within a moment, and whoever there is nothing for is answered by the gate: with nothing, which tells a stranger
nothing, and with a pause until the next question, which grows with the fleet. Whoever there is a message for goes the
whole way; and a device whose key or clock is wrong hears of it with its next heartbeat.
"""

import asyncio
import time
from typing import Any

FRESH = 0.2  # seconds that a look at who has messages is good for
COUNTED = 10.0  # and one at how many are connected
QUESTIONS = 100  # that an idle fleet asks per second, all together
LONGEST = 60  # seconds between two questions of a device


class Idle:
    """Knows for whom there is no message."""

    def __init__(self) -> None:
        self._waiting = frozenset[int]()
        self._online, self._looked, self._counted = 0, -FRESH, -COUNTED
        self._lock = asyncio.Lock()

    async def answer(self, body: bytes, state: Any) -> bytes | None:
        """What is said to a device that asks for work, where there is none for it; None where Flower has to say it."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, Reconnect

        if not hasattr(state, "session"):  # a state in memory, which is quick
            return None
        try:
            node = int(PullMessagesRequest.FromString(body).node.node_id)
        except Exception:  # no request: let Flower say so
            return None
        async with self._lock:
            if time.monotonic() - self._looked >= FRESH:
                await asyncio.to_thread(self._look, state)
        if node in self._waiting:
            return None
        told = PullMessagesResponse(reconnect=Reconnect(reconnect=self.pause))
        return bytes(told.SerializeToString())

    @property
    def pause(self) -> int:
        """Seconds until a device that has nothing to do should ask again."""
        return min(self._online // QUESTIONS, LONGEST)

    def _look(self, state: Any) -> None:
        from flwr.supercore.state.schema.linkstate_models import MessageIns
        from flwr.supercore.state.schema.linkstate_models import Node as NodeRow
        from sqlalchemy import func, select

        self._looked = time.monotonic()
        with state.session() as session:
            found = session.scalars(select(MessageIns.dst_node_id).where(MessageIns.delivered_at == "").distinct())
            self._waiting = frozenset(node % (1 << 64) for node in found)
            if self._looked - self._counted >= COUNTED:
                self._counted = self._looked
                there = select(func.count()).select_from(NodeRow).where(NodeRow.status == "online")
                self._online = int(session.scalar(there) or 0)
