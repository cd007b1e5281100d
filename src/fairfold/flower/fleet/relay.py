"""A plain entrance to a server on this machine, for browsers: to them http://localhost is a secure context.

No browser knows the server's own authority: over TLS it would warn, and store nothing for a page without a network. The
relay accepts connections of this machine alone and passes their bytes on over TLS, to the pinned authority; so the
server keeps its one entrance. In public a reverse proxy with a public certificate has its place (docs/devices.md).
"""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
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
        self._writers = set[asyncio.StreamWriter]()  # that are open
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, sock=self._socket)
        self._listening.set()
        await self._ended.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # in which they are closed

    async def _accept(self, browser: asyncio.StreamReader, to_browser: asyncio.StreamWriter) -> None:
        with self._closing(to_browser), contextlib.suppress(OSError, asyncio.CancelledError):
            server, to_server = await asyncio.open_connection(LOOPBACK, self.server, ssl=self._context)
            with self._closing(to_server):
                ways = (_pass_on(browser, to_server), _pass_on(server, to_browser))
                passing = [asyncio.ensure_future(way) for way in ways]
                try:
                    await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in passing:
                        way.cancel()

    @contextlib.contextmanager
    def _closing(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.close()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            target.write(piece)
            await target.drain()
