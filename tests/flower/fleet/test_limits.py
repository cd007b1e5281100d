"""Connections that send too much, too slowly or too often are closed before any application sees them."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from fairfold.flower.fleet import limits
from fairfold.flower.fleet.limits import ConnectionLimit, LimitedProtocol, LimitedServer, network_of

REQUEST = b"GET /quick HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the body has arrived."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Link:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def response(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"ok"), 5)

    async def is_closed(self, seconds: float = 3.0) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), seconds) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


Connect = Callable[[], Awaitable[Link]]


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    config = uvicorn.Config(app, port=0, http=LimitedProtocol, ws="none", lifespan="off", log_level="critical")
    server = LimitedServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    links = list[Link]()

    async def connect() -> Link:
        links.append(Link(*await asyncio.open_connection("127.0.0.1", port)))
        return links[-1]

    try:
        yield connect
    finally:
        for link in links:
            link.writer.close()
        server.should_exit = server.force_exit = True
        await task


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(LimitedProtocol, "incomplete", ConnectionLimit(8, 12))
    monkeypatch.setattr(LimitedProtocol, "opened", ConnectionLimit(20))


def test_headers_are_bounded_in_bytes_also_behind_a_request() -> None:
    async def talk() -> None:
        async with serving() as connect:
            whole = await connect()
            await whole.send(REQUEST.replace(b"host: x", b"host: x\r\na: " + b"x" * 15_000) % 0)
            assert (await whole.response()).startswith(b"HTTP/1.1 200")
            for head in (b"", REQUEST.replace(b"quick", b"slow") % 0):  # the second is sent while the first is served
                for line in (b"a: b\r\n", b"x"):  # many lines, or one without an end
                    link = await connect()
                    await link.send(head + b"GET / HTTP/1.1\r\n")
                    sent = 0
                    try:
                        while sent < 4 << 20:
                            await link.send(line * (4096 // len(line)))
                            await asyncio.sleep(0)
                            sent += 4096
                    except ConnectionError:
                        pass
                    assert sent < 4 << 20 or await link.is_closed()

    asyncio.run(talk())


def test_a_connection_without_headers_ends_and_one_with_requests_stays() -> None:
    async def talk() -> None:
        async with serving() as connect:
            silent, slow, good = await connect(), await connect(), await connect()
            await slow.send(b"GET / HTTP/1.1\r\n")
            for _ in range(4):
                await good.send(REQUEST % 3)
                await asyncio.sleep(0.2)
                await good.send(b"abc")
                assert (await good.response()).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.1)
            assert await silent.is_closed(0.5)
            assert await slow.is_closed(0.5)
            assert not await good.is_closed(0.6), "idle ones end by the keep-alive time alone"
            await good.send(b"GET")  # the next headers begin, and do not end
            assert await good.is_closed(2.0)

    asyncio.run(talk())


def test_of_too_many_the_oldest_half_requests_end_and_new_whole_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 60.0)

    async def talk() -> None:
        async with serving() as connect:
            halves = list[Link]()
            for number in range(16):
                halves.append(await connect())
                await halves[-1].send(b"GET / HTTP" if number % 2 else REQUEST % 9)
            await asyncio.sleep(0.2)
            assert [await link.is_closed(0.05) for link in halves] == [True] * 8 + [False] * 8
            for _ in range(30):
                link = await connect()
                await link.send(REQUEST % 0)
                assert (await link.response()).startswith(b"HTTP/1.1 200")
            assert LimitedProtocol.opened.size <= 20
            assert LimitedProtocol.incomplete.size <= 8
        await asyncio.sleep(0.1)
        assert (LimitedProtocol.opened.size, LimitedProtocol.incomplete.size) == (0, 0), "what has ended is forgotten"

    asyncio.run(talk())


def test_of_all_addresses_together_the_one_with_most_loses_its_oldest() -> None:
    class One:
        def __init__(self, address: str) -> None:
            self.address = address

        def drop(self) -> None:
            dropped.append(self)

    dropped, limit = list[One](), ConnectionLimit(8, 12)
    many, few = [One("a") for _ in range(7)], [One(name) for name in "bcdef"]
    for one in [*many, *few]:
        limit.use(one)
    limit.use(many[0])  # again: now the second is the oldest
    assert not dropped
    limit.use(One("g"))
    assert dropped == [many[1]]
    limit.remove(many[1])
    assert limit.size == 12


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("192.0.2.1", "192.0.2.2", False), ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False), ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "x", False),
    ],
)  # fmt: skip
def test_addresses_of_one_network_count_together(one: str, other: str, together: bool) -> None:
    assert (network_of(one) == network_of(other)) is together


@pytest.mark.slow
def test_a_thousand_half_open_connections_leave_a_fleet_working(tmp_path: Any) -> None:
    """Half of them have not even set up TLS; from the address of the devices themselves."""
    import socket
    import ssl

    from fairfold.flower.fleet.local_fleet import HOST, make_local_fleet
    from fairfold.flower.fleet.processes import descendants, stop_on_exit
    from tests.flower.test_hostile import WORLD, command_of, memory_of
    from tests.support.settings import make_settings

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limit[1]), limit[1]))
    fleet, data = make_local_fleet(make_settings(rounds=2, evaluate_every=100, data=WORLD), "1x,2x", tmp_path / "trial")
    fleet.round_timeout, fleet.wait_for = 240.0, 2
    fleet.prepare(data)
    opened = list[socket.socket]()
    body = b"host: x\r\ncontent-length: 99\r\n\r\nx"
    starts = [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"]
    starts += [b"POST /v1/%s HTTP/1.1\r\n" % path + body for path in (b"fleet/push-object", b"fairfold/enrol")]
    with stop_on_exit(fleet.programs):
        server = fleet.start_server()
        superlink = next(pid for pid in descendants([server.pid]) if "fleet.superlink" in command_of(pid))
        before = memory_of(superlink, "VmRSS")
        context = ssl.create_default_context(cafile=str(fleet.server.authority))
        for number in range(1000):
            one = socket.create_connection((HOST, fleet.port), timeout=30)
            if number % 2:
                one = context.wrap_socket(one, server_hostname=HOST)
                one.sendall(starts[number // 2 % len(starts)])
            opened.append(one)
        for number in range(2):
            fleet.enrol(number)
            fleet.start_node(number)
        job = fleet.start_run("--wait-for", "2")
        assert job.wait(600) == 0, job.tail(40)
        assert server.status() is None
        assert memory_of(superlink, "VmHWM") < before + (300 << 20)
    assert [updates for _, updates in fleet.server.completed_rounds()] == [2, 2]
    for one in opened:
        one.close()
