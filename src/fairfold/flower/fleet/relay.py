"""A plain entrance to a server on this machine, for browsers: to them http://localhost is a secure context.

No browser knows the server's own authority: over TLS it would warn, and store nothing for a page without a network. The
relay accepts connections of this machine alone and passes their bytes on over TLS, to the pinned authority; so the
server keeps its one entrance. In public a reverse proxy with a public certificate has its place (docs/devices.md).
"""

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from typing import Self

from fairfold.flower.fleet.processes import bind_port

LOOPBACK = "127.0.0.1"
PIECE = 1 << 16


class Relay:
    """Passes connections to a port of this machine on to a server's port, in a thread; a context manager."""

    def __init__(self, port: int, server: int, authority: Path) -> None:
        self.server = server
        self._context = ssl.create_default_context(cafile=str(authority))
        self._socket = bind_port(LOOPBACK, port, "End it, or name another with --port.")
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._accept, sock=self._socket)
        self._listening = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._listening.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _accept(self, browser: asyncio.StreamReader, to_browser: asyncio.StreamWriter) -> None:
        with contextlib.closing(to_browser), contextlib.suppress(OSError):
            server, to_server = await asyncio.open_connection(LOOPBACK, self.server, ssl=self._context)
            with contextlib.closing(to_server):
                ways = [_pass_on(browser, to_server), _pass_on(server, to_browser)]
                passing = [asyncio.ensure_future(way) for way in ways]
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
                for way in passing:
                    way.cancel()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            target.write(piece)
            await target.drain()
