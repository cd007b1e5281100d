"""What one SuperLink bears: what idle devices cost, what looking up who is there costs, what answers cost.

    python benchmarks/superlink.py idle --nodes 50 200       # processor time of the server per device that waits
    python benchmarks/superlink.py nodes --connected 1000 10000 100000
    python benchmarks/superlink.py answers --devices 3 --megabytes 0.1 1 10

The server is real: a SuperLink behind the gate, TLS on loopback, keys, SQLite. Idle devices send what ``fairfold node
start`` sends while it waits. Shown is the processor time of the server, which others on the machine change little.
"""

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key

from fairfold import Settings
from fairfold.flower.federate import trial_of
from fairfold.flower.link import HEARTBEAT, Link, Refused, public_form
from fairfold.flower.processes import OFFLINE, Program, descendants, free_ports, stopping, wait_for_port
from fairfold.flower.server import ServerFolder
from fairfold.flower.watch import IDLE

SECONDS = 20.0  # that are measured
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
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_form(key), HEARTBEAT)
    return state, keys


@contextmanager
def serving(place: Path, many: int) -> Iterator[tuple[ServerFolder, Program, list[EllipticCurvePrivateKey]]]:
    """A server with so many nodes that may come in."""
    (port,) = free_ports(1)
    server = ServerFolder.create(place / "server", Settings(), "127.0.0.1", port=port, items=100)
    _, keys = registered(server.folder, many)
    with stopping([]) as programs:
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


def idle(many: int, threads: int = 8) -> None:
    """Devices that wait for work."""
    with tempfile.TemporaryDirectory() as place, serving(Path(place), many) as (server, program, keys):
        before = resident(program.pid)
        links = [Link(f"127.0.0.1:{server.port}", server.authority, key) for key in keys]
        counts, over, there = [0] * threads, threading.Event(), threading.Barrier(threads + 1)

        def wait(first: int) -> None:
            mine = [(link, link.activate()) for link in links[first::threads]]
            there.wait()
            turn = 0
            while not over.is_set():
                began = time.monotonic()
                for place, (link, node) in enumerate(mine):
                    with suppress(Refused):
                        link.pull(node)
                    if (turn + place) % round(0.7 * link.heartbeat / max(IDLE, link.pause)) == 0:
                        with suppress(Refused):
                            link.beat(node)
                        counts[first] += 1
                    counts[first] += 1
                turn += 1
                waits = max(IDLE, max((link.pause for link, _ in mine), default=0.0))
                time.sleep(max(waits - (time.monotonic() - began), 0.0))

        workers = [threading.Thread(target=wait, args=(first,), daemon=True) for first in range(threads)]
        for worker in workers:
            worker.start()
        there.wait()
        time.sleep(15.0)  # by then the server has told how often it wants to be asked
        took, asked, began = seconds_of(program.pid), sum(counts), time.monotonic()
        time.sleep(SECONDS)
        took, asked, seconds = seconds_of(program.pid) - took, sum(counts) - asked, time.monotonic() - began
        over.set()
        for worker in workers:
            worker.join()
        grown = resident(program.pid) - before
        print(f"{many:>6,} idle: {asked / seconds:6.1f} requests per s, {1000 * took / asked:5.2f} ms of processor "
              f"time each, {100 * took / seconds:5.1f} % of a core, memory {before:.0f} + {grown:.0f} MB")  # fmt: skip


def nodes(many: int) -> None:
    """Looking up who is there, as a run does before its rounds."""
    from flwr.supercore.state.schema.linkstate_models import Node
    from sqlalchemy import insert

    with tempfile.TemporaryDirectory() as place:
        state, _ = registered(Path(place), 0)
        now = "2026-01-01T00:00:00+00:00"
        rows = [
            {"node_id": number, "owner_aid": "", "owner_name": "", "status": "online", "registered_at": now,
             "last_activated_at": now, "online_until": 1e12, "heartbeat_interval": 30.0,
             "public_key": b"%0215d" % number}
            for number in range(1, many + 1)
        ]  # fmt: skip
        with state.session() as session:
            session.execute(insert(Node), rows)
        began = time.process_time()
        try:
            found = len({one.node_id for one in state.get_node_info(statuses=["online"])})
            words = f"{found:,} found in {time.process_time() - began:.2f} s of processor time"
        except Exception as error:
            words = f"refused: {type(error).__name__}: {str(error)[:60]}"
        size = (Path(place) / "state.db").stat().st_size / 1e6
        print(f"{many:>8,} connected: {words}, state.db {size:.0f} MB")


def answers(megabytes: float, devices: int, rounds: int) -> None:
    """Rounds of real devices whose orders and answers have some size."""
    factors = 32
    items = max(10, int(megabytes * 1e6 / 4 / factors))
    settings = Settings(
        algorithm={"kind": "closed_form"}, model={"factors": factors},
        data={"users": 2 * devices, "items": items, "interactions_per_user": 8},
        run={"rounds": rounds, "evaluate_every": 10**6},
        privacy={"level": "plain"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        trial, data = trial_of(settings, f"1x*{devices}", Path(place) / "trial")
        trial.prepare(data)
        seen: list[tuple[float, float, int]] = []

        def look(_round: int, _answers: int) -> None:
            for pid in descendants([trial.programs[0].pid]):
                words = Path(f"/proc/{pid}/cmdline").read_text()
                if "fairfold.flower.superlink" in words:
                    seen.append((seconds_of(pid), resident(pid), _answers))

        trial.run(lambda _words: None, look)
        took = seen[-1][0] - seen[0][0]
        many = sum(answers for _, _, answers in seen[1:])
        print(f"{megabytes:>5} MB both ways, {devices} devices: {took / many:.2f} s of the SuperLink's processor time "
              f"per answer, {max(size for _, size, _ in seen):.0f} MB of memory at most")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("idle")
    one.add_argument("--nodes", type=int, nargs="+", default=[50, 200])
    one = what.add_parser("nodes")
    one.add_argument("--connected", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    one = what.add_parser("answers")
    one.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    one.add_argument("--devices", type=int, default=3)
    one.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if given.what == "answers":
        for size in given.megabytes:
            answers(size, given.devices, given.rounds)
        return
    for many in given.nodes if given.what == "idle" else given.connected:
        (idle if given.what == "idle" else nodes)(many)


if __name__ == "__main__":
    main()
