"""What one SuperLink bears: what idle devices cost, what looking up who is there costs, what replies cost.

    python benchmarks/superlink.py idle --nodes 50 200       # processor time of the server per device that waits
    python benchmarks/superlink.py idle --nodes 1000 5000 --processes 12      # with cores for those who ask
    python benchmarks/superlink.py requests                  # and by what they ask
    python benchmarks/superlink.py nodes --connected 1000 10000 100000
    python benchmarks/superlink.py status --connected 10000  # `fairfold server status`, as it is typed
    python benchmarks/superlink.py replies --devices 3 --megabytes 0.1 1 10

The server is real: a SuperLink behind the gateway, TLS on loopback, keys, SQLite. Idle devices send what
``fairfold node start`` sends while it waits. Shown is the processor time of the server, which others on the
machine change little.
"""

import argparse
import multiprocessing
import os
import random
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from threading import Thread
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fairfold.flower.fleet.connection import HEARTBEAT_SECONDS, NodeConnection, RefusedByServer, public_pem
from fairfold.flower.fleet.node_loop import IDLE_POLL_SECONDS
from fairfold.flower.fleet.processes import OFFLINE, Program, descendants, free_ports, stop_on_exit, wait_for_port
from fairfold.flower.fleet.server import ServerFolder

SECONDS = 30.0  # that are measured
TICK = os.sysconf("SC_CLK_TCK")


def registered(folder: Path, many: int) -> tuple[Any, list[EllipticCurvePrivateKey]]:
    """Flower's state in a file, with so many nodes."""
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

    state = LinkStateFactory(str(folder / "state.db"), NoOpFederationManager(), ObjectStoreFactory()).state()
    keys = [generate_private_key(SECP384R1()) for _ in range(many)]
    for key in keys:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_pem(key), HEARTBEAT_SECONDS)
    return state, keys


@contextmanager
def serving(place: Path, many: int) -> Iterator[tuple[ServerFolder, Program, list[EllipticCurvePrivateKey]]]:
    """A server with so many nodes that may come in."""
    from fairfold import Settings  # not above: what stands for devices does without torch

    (port,) = free_ports(1)
    server = ServerFolder.create(place / "server", Settings(), "127.0.0.1", port=port, items=100)
    _, keys = registered(server.folder, many)
    with stop_on_exit([]) as programs:
        program = Program("SuperLink", server.superlink_command(), place / "log", OFFLINE | server.environment)
        programs.append(program)
        wait_for_port(port, program)
        time.sleep(3.0)  # until it has started its helper
        yield server, program, keys


def seconds_of(pid: int) -> float:
    """Seconds of processor time of a process, without its helpers."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def resident(pid: int) -> float:
    """Megabytes of memory."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1000


@dataclass
class Fleet:
    """Devices that wait, in a process of their own: what ``fairfold node start`` sends, when it sends it.

    Attributes:
        server: Address of the server.
        authority: Certificate of its authority.
        keys: Of the devices, as they are written.
        first: Seconds after the start when each of them comes in.
        threads: That share the devices out.
        begins: When (``time.time``) what is asked begins to be counted.
        ends: And when all is over.
    """

    server: str
    authority: Path
    keys: list[bytes]
    first: list[float]
    threads: int
    begins: float
    ends: float

    def run(self, results: "SimpleQueue[tuple[list[float], dict[str, int], dict[str, int], float]]") -> None:
        """Be these devices until the end.

        Reports how long replies took, why some were refused while devices came in and later, and how late they asked.
        """
        context, start = ssl.create_default_context(cafile=str(self.authority)), time.time()
        seconds, late = list[float](), list[float]()
        coming, refused = dict[str, int](), dict[str, int]()

        def live(mine: list[tuple[float, NodeConnection]]) -> None:
            line = [(start + first, number) for number, (first, _) in enumerate(mine)]
            heapify(line)
            names, heartbeats, tries = dict[int, int](), dict[int, float](), dict[int, int]()
            while line and time.time() < self.ends:
                due, place = heappop(line)
                time.sleep(max(0.0, min(due, self.ends) - time.time()))
                began, link = time.time(), mine[place][1]
                counts = began >= self.begins
                try:
                    if place not in names:
                        names[place], heartbeats[place] = link.activate(), 0.0
                    if began >= heartbeats[place]:
                        if not link.send_heartbeat(names[place]):
                            raise RefusedByServer("lost", "gone")
                        heartbeats[place] = time.time() + link.heartbeat_interval * random.uniform(0.6, 0.8)
                        if counts:
                            seconds.append(time.time() - began)
                        began = time.time()
                    link.pull(names[place])
                    tries[place] = 0
                    if counts:
                        seconds.append(time.time() - began)
                        late.append(began - due)
                    waits = max(IDLE_POLL_SECONDS, link.poll_interval * random.uniform(0.8, 1.2))
                except RefusedByServer as why:
                    kinds = refused if counts else coming
                    kinds[why.kind] = kinds.get(why.kind, 0) + 1
                    if why.kind not in ("unreachable", "busy", "broken"):
                        names.pop(place, None)
                    waits = min(2.0 ** tries.get(place, 0), 20.0) * random.uniform(0.8, 1.2)
                    tries[place] = min(tries.get(place, 0) + 1, 10)
                heappush(line, (time.time() + waits, place))

        links = []
        for key, first in zip(self.keys, self.first, strict=True):
            link = NodeConnection(self.server, self.authority, load_pem_private_key(key, None))  # type: ignore[arg-type]
            link._context = context  # else each takes half a megabyte here
            links.append((first, link))
        workers = [Thread(target=live, args=(links[of :: self.threads],), daemon=True) for of in range(self.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        results.put((seconds, coming, refused, statistics.median(late) if late else float("nan")))


def idle(many: int, processes: int, threads: int, arrive: float, settle: float) -> None:
    """Devices that wait for work."""
    with tempfile.TemporaryDirectory() as place, serving(Path(place), many) as (server, program, keys):
        before = resident(program.pid)
        written = [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) for key in keys]
        first = [number / arrive for number in range(many)]
        begins = time.time() + 5.0 + many / arrive + settle
        spawning, address = multiprocessing.get_context("spawn"), f"127.0.0.1:{server.port}"
        results = spawning.SimpleQueue()
        started = []
        for of in range(processes):
            part = slice(of, None, processes)
            fleet = Fleet(address, server.authority, written[part], first[part], threads, begins, begins + SECONDS)
            started.append(spawning.Process(target=fleet.run, args=(results,), daemon=True))
            started[-1].start()
        before_them, arrived = seconds_of(program.pid), begins - settle
        while (left := arrived - time.time()) > 0:
            time.sleep(min(left, 15.0))
            there, spent = server.count_online()[0], seconds_of(program.pid) - before_them
            print(
                f"       … {there:,} of {many:,} are in, {spent:.0f} s of processor time", file=sys.stderr, flush=True
            )
        each = 1000 * (seconds_of(program.pid) - before_them) / many
        time.sleep(max(0.0, begins - time.time()))
        took, began = seconds_of(program.pid), time.monotonic()
        time.sleep(SECONDS - 1.0)
        took, took_for = seconds_of(program.pid) - took, time.monotonic() - began
        memory, online = resident(program.pid), server.count_online()[0]
        parts = [results.get() for _ in started]
        for process in started:
            process.join()
        asked = sorted(second for seconds, *_ in parts for second in seconds)
        rate, late = len(asked) / SECONDS, max(late for *_, late in parts)
        share = took / took_for
        print(
            f"{many:>6,} idle: {online:,} online, {rate:6.1f} requests per s, {1000 * share / rate:5.2f} ms of "
            f"processor time each, {100 * share:5.1f} % of a core, memory {before:.0f} + "
            f"{memory - before:.0f} MB, answered in {1000 * asked[len(asked) // 2]:.0f} ms (median), "
            f"{1000 * asked[-1 - len(asked) // 100]:.0f} ms (99 of 100), asked {late:.2f} s late, "
            f"refused {added(of for _, _, of, _ in parts)}; coming in at {arrive:g} per s: {each:.1f} ms of processor "
            f"time each, what they asked meanwhile in it, refused {added(of for _, of, _, _ in parts)}",
            flush=True,
        )


def added(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Counts of several together."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def requests(many: int, at_once: int) -> None:
    """What a device asks, by kind: so many devices, some of them at once."""
    with tempfile.TemporaryDirectory() as place, serving(Path(place), many) as (server, program, keys):
        context = ssl.create_default_context(cafile=str(server.authority))
        links = [NodeConnection(f"127.0.0.1:{server.port}", server.authority, key) for key in keys]
        names = dict[NodeConnection, int]()

        def connect(_link: NodeConnection) -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as plain:
                context.wrap_socket(plain, server_hostname="127.0.0.1").close()

        def come_in(link: NodeConnection) -> None:
            names[link] = link.activate()

        for what, do in (
            ("a connection", connect), ("a connection and coming in", come_in),
            ("a heartbeat", lambda link: link.send_heartbeat(names[link])),
            ("a poll", lambda link: link.pull(names[link])),
        ):  # fmt: skip
            before = seconds_of(program.pid)
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(do, links))
            time.sleep(0.5)
            took = 1000 * (seconds_of(program.pid) - before) / many
            print(f"{what:28} {took:5.2f} ms of processor time, {at_once} at once", flush=True)


def nodes(many: int) -> None:
    """Looking up who is there, as a run does before its rounds."""
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import insert

    with tempfile.TemporaryDirectory() as place:
        state, _ = registered(Path(place), 0)
        with state.session() as session:
            session.execute(insert(Node), node_rows(many))
        began = time.process_time()
        try:
            found = len({one.node_id for one in state.get_node_info(statuses=["online"])})
            words = f"{found:,} found in {time.process_time() - began:.2f} s of processor time"
        except Exception as error:
            words = f"refused: {type(error).__name__}: {str(error)[:60]}"
        size = (Path(place) / "state.db").stat().st_size / 1e6
        print(f"{many:>8,} connected: {words}, state.db {size:.0f} MB")


def status(many: int) -> None:
    """What `fairfold server status` takes as it is typed, for a server with so many devices."""
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import insert

    def spent() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime + seconds_of(program.pid)

    with tempfile.TemporaryDirectory() as place, serving(Path(place), 0) as (server, program, _):
        state, _ = registered(server.folder, 0)
        with state.session() as session:
            session.execute(insert(Node), node_rows(many))
        for options in ([], [], [], ["--json"]):
            began, before = time.monotonic(), spent()
            command = [sys.executable, "-m", "fairfold", "server", "status", str(server.folder), *options]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            took = f"{time.monotonic() - began:.2f} s, {spent() - before:.2f} s of processor time with the server's"
            print(f"{many:>8,} devices: {' '.join(['status', *options])} in {took}, {len(printed):,} characters")


def node_rows(many: int) -> list[dict[str, Any]]:
    """Rows of so many connected nodes in Flower's table."""
    now = "2026-01-01T00:00:00+00:00"
    return [
        {"node_id": number, "owner_aid": "", "owner_name": "", "status": "online", "registered_at": now,
         "last_activated_at": now, "online_until": 1e12, "heartbeat_interval": 30.0,
         "public_key": b"%0215d" % number}
        for number in range(1, many + 1)
    ]  # fmt: skip


def replies(megabytes: float, devices: int, rounds: int) -> None:
    """Rounds of real devices whose tasks and updates have some size."""
    from fairfold import Settings
    from fairfold.flower.fleet.local_fleet import make_local_fleet

    factors = 32
    items = max(10, int(megabytes * 1e6 / 4 / factors))
    settings = Settings(
        algorithm={"kind": "closed_form"}, model={"factors": factors},
        data={"users": 2 * devices, "items": items, "interactions_per_user": 8},
        run={"rounds": rounds, "evaluate_every": 10**6},
        privacy={"level": "plain"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        local_fleet, data = make_local_fleet(settings, f"1x*{devices}", Path(place) / "trial")
        local_fleet.prepare(data)
        seen: list[tuple[float, float, int]] = []

        def look(_round: int, _updates: int) -> None:
            for pid in descendants([local_fleet.programs[0].pid]):
                words = Path(f"/proc/{pid}/cmdline").read_text()
                if "fairfold.flower.fleet.superlink" in words:
                    seen.append((seconds_of(pid), resident(pid), _updates))

        local_fleet.run(lambda _words: None, look)
        took = seen[-1][0] - seen[0][0]
        many = sum(updates for _, _, updates in seen[1:])
        print(f"{megabytes:>5} MB both ways, {devices} devices: {took / many:.2f} s of the SuperLink's processor time "
              f"per update, {max(size for _, size, _ in seen):.0f} MB of memory at most")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("idle")
    one.add_argument("--nodes", type=int, nargs="+", default=[50, 200])
    one.add_argument("--processes", type=int, default=1, help="that stand for the devices")
    one.add_argument("--threads", type=int, default=8, help="of each of these")
    one.add_argument("--arrive", type=float, default=40.0, help="devices that come in per second")
    one.add_argument("--settle", type=float, default=20.0, help="seconds between the last of these and measuring")
    one = what.add_parser("requests")
    one.add_argument("--devices", type=int, default=300)
    one.add_argument("--at-once", type=int, default=30)
    one = what.add_parser("nodes")
    one.add_argument("--connected", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    one = what.add_parser("status")
    one.add_argument("--connected", type=int, nargs="+", default=[10_000])
    one = what.add_parser("replies")
    one.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    one.add_argument("--devices", type=int, default=3)
    one.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if given.what == "replies":
        for size in given.megabytes:
            replies(size, given.devices, given.rounds)
        return
    if given.what == "requests":
        requests(given.devices, given.at_once)
        return
    if given.what == "idle":
        for many in given.nodes:
            idle(many, given.processes, given.threads, given.arrive, given.settle)
        return
    for many in given.connected:
        (status if given.what == "status" else nodes)(many)


if __name__ == "__main__":
    main()
