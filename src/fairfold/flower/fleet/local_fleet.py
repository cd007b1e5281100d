"""A complete fleet on this machine, for trying out: a server and nodes with their own files, as separate programs.

Its folder holds ``server/`` (``fairfold server``), ``nodes/N/`` (``fairfold node``, with its own file of interactions)
and ``logs/``, the output of every program.
"""

import csv
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairfold.atomic_io import make_folder, make_private_folder, write_atomically
from fairfold.config import Settings
from fairfold.config.files import tables_to_toml
from fairfold.config.fleet import DifferentialPrivacy, SecurePrivacy
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.federation.federation import load_unnumbered
from fairfold.flower.fleet import Echo, PathInside
from fairfold.flower.fleet.node import NodeFolder, enrol
from fairfold.flower.fleet.processes import Program, free_ports, stop_on_exit, wait_for_port
from fairfold.flower.fleet.server import ServerFolder
from fairfold.flower.fleet.training import RunFollower
from fairfold.flower.preparation import refuse_simulation_only
from fairfold.runs.events import participants, read_events
from fairfold.runs.folder import DATA, METRICS, RESULT, read_json
from fairfold.subspace import Capacity, assign_groups

HOST = "127.0.0.1"
COMMAND = [sys.executable, "-c", "from fairfold.cli import app; app()"]


@dataclass
class LocalFleet:
    """A fleet on this machine in a folder of its own, with one node per capacity."""

    settings: Settings
    capacities: list[Capacity]
    folder: Path
    half: bool = False  # send vectors in half precision
    round_timeout: float = 600.0  # seconds the nodes have to reply
    wait_for: int = 0  # nodes that every round waits for; 0 for all
    app: str = ""  # a custom ClientApp in place of fairfold's
    variables: dict[str, str] = field(default_factory=dict)  # of the programs' environment
    programs: list[Program] = field(default_factory=list)  # those that are running
    num_users: list[int] = field(default_factory=list)  # of each node's file

    roster = PathInside("roster")  # all nodes' public keys; not the server's to distribute in a real fleet
    run_folder = PathInside("server/run")  # what the server writes

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        (self.port,) = free_ports(1)

    def prepare(self, data: Dataset) -> None:
        """Make the server, and every node's own files of interactions."""
        if data.held_out_users is not None:
            remedy = "Hold out interactions of every user: --split random, newest or newest-share."
            raise InvalidSettings("held-out users in a fleet", "devices that evaluate their own users", remedy)
        self._require_users(data.num_users)
        rounds = {"half": self.half, "round_timeout": self.round_timeout, "wait_timeout": 300.0}
        options: dict[str, Any] = {"items": data.num_items, "rounds": rounds | {"min_nodes": self.min_nodes}}
        self.server = ServerFolder.create(self.folder / "server", self.settings, HOST, port=self.port, **options)
        make_folder(self.folder / "logs")
        write_atomically(self.folder / DATA, tables_to_toml(self.settings.plain()["data"]).encode())
        groups = assign_groups(data.num_users, len(self.capacities))
        for number in range(len(self.capacities)):
            users = (groups == number).nonzero().flatten().tolist()
            self.num_users.append(len(users))
            make_private_folder(self.node(number))
            for name, part in (("train.csv", data.train), ("test.csv", data.test)):
                _write_interactions(self.node(number) / name, part, users)

    def _require_users(self, users: int) -> None:
        """Refuse more nodes than users: every node brings some."""
        nodes = len(self.capacities)
        if users < nodes:
            fewer = ",".join(map(str, self.capacities[:users]))
            given, remedy = f"{users} users for {nodes} nodes", f'Start fewer: --nodes "{fewer}".'
            raise InvalidSettings(given, "a user per node", remedy)

    def node(self, number: int) -> Path:
        """The folder of a node."""
        return self.folder / "nodes" / str(number)

    @property
    def min_nodes(self) -> int:
        """The number of nodes that every round waits for."""
        return self.wait_for or len(self.capacities)

    @property
    def server_environment(self) -> dict[str, str]:
        """The server's environment: as many threads as a simulation, since sums depend on that in the last digits."""
        return self.server.environment | self.variables

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all other programs, with one thread each."""
        return self.server_environment | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | self.variables

    def start(self, name: str, *words: str, environment: dict[str, str] | None = None) -> Program:
        """Start a ``fairfold`` command, which is stopped with all others."""
        log = self.folder / "logs" / f"{name}.log"
        self.programs.append(Program(name, [*COMMAND, *words], log, environment or self.environment))
        return self.programs[-1]

    def start_server(self, *options: str) -> Program:
        """Start the server and wait until it listens."""
        words = ["server", "start", str(self.server.folder), *options]
        program = self.start("server", *words, environment=self.server_environment)
        wait_for_port(self.port, program)
        return program

    def enrol(self, number: int) -> NodeFolder:
        """Enrol a node, unless it is enrolled."""
        home = self.node(number)
        if (home / NodeFolder.FILE).exists():
            return NodeFolder.open(home)
        options: dict[str, Any] = {"test": str(home / "test.csv"), "app": self.app}
        privacy = self.settings.privacy
        if isinstance(privacy, SecurePrivacy):
            options |= {"roster": str(self.roster), "min_cohort": privacy.min_cohort, "privacy": privacy.level}
        if isinstance(privacy, DifferentialPrivacy):
            options |= {"epsilon": privacy.epsilon, "delta": privacy.delta}
        data, capacity = str(home / "train.csv"), str(self.capacities[number])
        node = NodeFolder(home, f"{HOST}:{self.port}", data, capacity, **options)
        enrol(node, self.server.invite(600.0, self.num_users[number]))
        return node

    def enrol_all(self) -> None:
        """Enrol all nodes, and write the roster of their keys."""
        nodes = [self.enrol(number) for number in range(len(self.capacities))]
        write_atomically(self.roster, b"".join(node.key.with_suffix(".pub").read_bytes() for node in nodes))

    def start_node(self, number: int) -> Program:
        """Start a node."""
        return self.start(f"node-{number}", "node", "start", str(self.node(number)))

    def start_run(self, *options: str) -> Program:
        """Start the training."""
        waits = ["--wait-for", str(self.min_nodes), "--wait-timeout", "300"]
        return self.start("run", "server", "train", str(self.server.folder), *waits, *options)

    def run(self, echo: Echo, on_round: Callable[[int, int], None] = lambda _done, _updates: None) -> None:
        """Start everything, train, and stop everything."""
        with stop_on_exit(self.programs):
            server = self.start_server()
            echo(f"The server listens on {HOST}:{self.port}, TLS, only enrolled devices.")
            self.enrol_all()
            for number in range(len(self.capacities)):
                self.start_node(number)
            echo(f"{len(self.capacities)} devices start: {', '.join(map(str, self.capacities))}.")
            job = self.start_run()
            follower = RunFollower(self.server, echo, on_round)
            while job.status() is None:
                follower.show_new()
                server.require_alive()
                time.sleep(0.3)
            follower.show_new()
        if not (self.run_folder / RESULT).exists():
            given = f"the run did not end well; the end of its log:\n{job.tail()}"
            raise InvalidState(given, "a result", job.log_hint)

    def quality(self) -> float | None:
        """The last evaluation over all users; None if there was none."""
        with (self.run_folder / METRICS).open(newline="") as file:
            values = [float(row["server"]) for row in csv.DictReader(file) if row["server"]]
        return values[-1] if values else None

    def notes(self) -> list[str]:
        """The notes of the run's result."""
        return [str(note) for note in read_json(self.run_folder / RESULT, "Run it again.").get("notes", [])]

    def participants(self) -> list[dict[str, Any]]:
        """The nodes that took part, by the run's events."""
        return participants(read_events(self.run_folder))[0]


def make_local_fleet(settings: Settings, nodes: str, folder: Path, *, half: bool = False) -> tuple[LocalFleet, Dataset]:
    """A local fleet with its data from settings and the nodes' capacities, written ``1x,4x*3,16x``."""
    capacities = [capacity for text in nodes.split(",") if text.strip() for capacity in _parse_capacities(text)]
    if not capacities:
        raise InvalidSettings(f"--nodes {nodes!r}", "what each node can hold", 'Write e.g. --nodes "1x,4x,16x".')
    scheme = "-".join(dict.fromkeys(str(capacity) for capacity in capacities))
    settings = settings.with_changes({"fleet.capacities": scheme, "fleet.clients_per_round": None})
    refuse_simulation_only(settings)
    if settings.model.reads_images:
        needed = "a recommender: nodes bring files of interactions"
        remedy = "For images give make_client_app a function that returns LocalImages."
        raise InvalidSettings(f"model.kind={settings.model.kind!r}", needed, remedy)
    return LocalFleet(settings, capacities, folder, half=half), load_unnumbered(settings)[0]


def _parse_capacities(text: str) -> list[Capacity]:
    """Parse ``4x``, or ``4x*3`` for three nodes."""
    size, _, times = text.partition("*")
    if times.strip() and not (times.strip().isdecimal() and 1 <= int(times) <= 10_000):
        raise InvalidSettings(f"--nodes {text!r}", "a capacity, or a capacity times a number", 'Write e.g. "1x,4x*3".')
    return [Capacity.parse(size)] * (int(times) if times.strip() else 1)


def _write_interactions(path: Path, part: Interactions, users: list[int]) -> None:
    rated = part.ratings is not None
    with path.open("w", newline="") as file:
        os.chmod(path, 0o600)
        writer = csv.writer(file)
        writer.writerow(["user", "item", "rating"] if rated else ["user", "item"])
        for user in users:
            columns = [part.of(user).tolist(), *([part.ratings_of(user).tolist()] if rated else [])]
            writer.writerows((user, *row) for row in zip(*columns, strict=True))
