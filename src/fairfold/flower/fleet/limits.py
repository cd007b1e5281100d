"""Limits on connections, before a request reaches an application: long headers, slow requests, too many of one address.

uvicorn alone stores headers of any length and waits for ever for a request that does not come. A connection here that
is too slow or sends too much is closed; where one address opens too many, its least recently used are closed, so that
devices behind the same address, which finish their requests at once, still get through.
"""

import asyncio
import functools
import ipaddress
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES = 16 << 10
HEADER_SECONDS = 10.0  # in which TLS is set up, and in which the headers of a request arrive from their first byte on
INCOMPLETE_EACH, INCOMPLETE_TOTAL = 256, 2048  # connections whose request has not wholly arrived: of an address, of all
OPEN_EACH = 4096  # connections of an address: a fleet behind one address has one for each device
KEEP_ALIVE = 90  # seconds that a silent connection stays open: longer than nodes pause, since opening one is costly


class ConnectionLimit:
    """Connections by address; of an address with too many, the least recently used is closed."""

    def __init__(self, each: int, total: int = sys.maxsize) -> None:
        self.each, self.total, self.size = each, total, 0
        self._by_address: dict[str, dict[Any, None]] = {}

    def use(self, connection: Any) -> None:
        """Add a connection, or note that it was used."""
        members = self._by_address.setdefault(connection.address, {})
        self.size += connection not in members
        members.pop(connection, None)
        members[connection] = None
        if self.size > self.total:
            members = max(self._by_address.values(), key=len)
        elif len(members) <= self.each:
            return
        oldest = next(iter(members))
        self.remove(oldest)
        oldest.drop()

    def remove(self, connection: Any) -> None:
        """Remove a connection, if it is there."""
        members = self._by_address.get(connection.address, {})
        if connection in members:
            self.size -= 1
            del members[connection]
            if not members:
                del self._by_address[connection.address]


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol of a connection, with limits."""

    incomplete, opened = (
        ConnectionLimit(INCOMPLETE_EACH, INCOMPLETE_TOTAL),
        ConnectionLimit(OPEN_EACH),
    )  # of this process

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for headers."""
        super().connection_made(transport)
        self.address = network_of(self.client[0] if self.client else "")
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.opened.use(self)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that has ended."""
        self._end_waiting()
        self.opened.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Hand bytes on, and count those of headers: all that come while no body is awaited."""
        before = self.cycle
        in_body = before is not None and before.more_body and not before.response_complete
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not before:  # headers are whole
            self._header_bytes = sum(len(name) + len(value) for name, value in self.cycle.scope["headers"])
            self.opened.use(self)
        elif not in_body:
            self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self.drop()
        elif self.cycle is before and not in_body:
            self._await_headers()
        elif self.cycle.more_body:
            self._cancel_deadline()
            self._header_bytes = 0
            self.incomplete.use(self)
        else:
            self._header_bytes = 0
            self._end_waiting()

    def drop(self) -> None:
        """Close the connection at once, whatever it was about to send or to read."""
        self._end_waiting()
        self.transport.abort()

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.drop)
            self.incomplete.use(self)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_waiting(self) -> None:
        self._cancel_deadline()
        self.incomplete.remove(self)


def network_of(address: str) -> str:
    """What is limited together: an IPv4 address, or the /64 network that one customer has of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))


class LimitedServer(uvicorn.Server):
    """uvicorn's server, with a deadline for the setup of TLS."""

    async def startup(self, sockets: Any = None) -> None:
        """Open the port."""
        loop: Any = asyncio.get_running_loop()
        timeout = {"ssl_handshake_timeout": HEADER_SECONDS} if self.config.is_ssl else {}
        loop.create_server = functools.partial(loop.create_server, **timeout)
        await super().startup(sockets)


def limit_connections() -> None:
    """Let every server that uvicorn starts in this process have these limits."""
    vars(sys.modules["uvicorn.main"]).update(Server=LimitedServer)
    uvicorn.run = functools.partial(uvicorn.run, timeout_keep_alive=KEEP_ALIVE, ws="none", http=LimitedProtocol)
