"""A complete fleet on this machine, for trying out: a server and devices with their own files, as real ones have them.

Everything lies in one folder: ``server/`` is that of ``fairfold server``, ``nodes/N/`` that of a device (``fairfold
node``, with the file that is its own), ``logs/`` what every program said.
"""

import csv
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.files import make_folder, make_private, write_atomically
from fairfold.flower.node import FILE, NodeFolder, enrol
from fairfold.flower.opening import refuse_unserved
from fairfold.flower.processes import Program, free_ports, stopping, wait_for_port
from fairfold.flower.server import ServerFolder
from fairfold.runs.nodes import read_events, who_took_part
from fairfold.runs.read import DATA, LOG, METRICS, RESULT, read_values
from fairfold.settings import Settings
from fairfold.settings.files import tables_to_toml
from fairfold.settings.privacy import PrivatePrivacy, SecurePrivacy
from fairfold.simulate.world import load_catalogued
from fairfold.subspace import Capacity, assign_groups

HOST = "127.0.0.1"
COMMAND = [sys.executable, "-c", "from fairfold.cli import app; app()"]
Say = Callable[[str], None]


@dataclass
class Trial:
    """A fleet on this machine: settings with the capacities of its nodes, one a node, in a folder of its own."""

    settings: Settings
    capacities: list[Capacity]
    folder: Path
    half: bool = False  # vectors travel in half precision
    round_timeout: float = 600.0  # seconds the devices have to answer
    wait_for: int = 0  # devices that every round waits for; all if none are named
    app: str = ""  # what devices run in the place of fairfold's own app
    variables: dict[str, str] = field(default_factory=dict)  # of the programs' environment
    programs: list[Program] = field(default_factory=list)  # those that are running

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        (self.port,) = free_ports(1)

    # -- before anything runs ------------------------------------------------------------------------------------------

    def prepare(self, data: Dataset) -> None:
        """Make the server, and every node's own file."""
        options = {"half": self.half, "round_timeout": self.round_timeout, "patience": 300.0, "min_nodes": self.wanted}
        self.server = ServerFolder.create(
            self.folder / "server", self.settings, HOST, port=self.port, items=data.num_items, rounds=options
        )
        make_folder(self.folder / "logs")
        write_atomically(self.folder / DATA, tables_to_toml(self.settings.plain()["data"]).encode())
        groups = assign_groups(data.num_users, len(self.capacities))
        for number in range(len(self.capacities)):
            users = (groups == number).nonzero().flatten().tolist()
            make_private(self.node(number))
            _write_interactions(self.node(number) / "train.csv", data.train, users)
            _write_interactions(self.node(number) / "test.csv", data.test, users)

    def node(self, number: int) -> Path:
        """What stands for a device's disk."""
        return self.folder / "nodes" / str(number)

    @property
    def roster(self) -> Path:
        """The public keys of all nodes: what somebody who is not the server would give to every device."""
        return self.folder / "roster"

    @property
    def wanted(self) -> int:
        """Devices that have to be there."""
        return self.wait_for or len(self.capacities)

    @property
    def run_folder(self) -> Path:
        """What the server writes."""
        return self.server.run

    # -- programs ------------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What every program is started with, but for the server."""
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # many small programs on one machine
        return self.for_server | threads | self.variables

    @property
    def for_server(self) -> dict[str, str]:
        """What the server is started with: the threads of a simulation, by whose number a model's last digits go."""
        return self.server.environment | self.variables

    def start(self, name: str, *words: str, environment: dict[str, str] | None = None) -> Program:
        """Start a command of fairfold's; it is stopped with all others."""
        log = self.folder / "logs" / f"{name}.log"
        program = Program(name, [*COMMAND, *words], log, environment or self.environment)
        self.programs.append(program)
        return program

    def start_server(self, *options: str) -> Program:
        """Start the server and wait until it listens."""
        command = ["server", "start", str(self.server.folder), *options]
        program = self.start("server", *command, environment=self.for_server)
        wait_for_port(self.port, program)
        return program

    def enrol(self, number: int) -> NodeFolder:
        """Make a node known to the server, unless it is."""
        home = self.node(number)
        if (home / FILE).exists():
            return NodeFolder.open(home)
        secure: dict[str, Any] = {}
        if isinstance(self.settings.privacy, SecurePrivacy):
            chosen = self.settings.privacy
            secure = {"roster": str(self.roster), "smallest_cohort": chosen.smallest_cohort, "privacy": chosen.level}
            if isinstance(chosen, PrivatePrivacy):
                secure |= {"epsilon": chosen.epsilon, "delta": chosen.delta}
        device = NodeFolder(
            home, f"{HOST}:{self.port}", str(home / "train.csv"), str(self.capacities[number]),
            str(home / "test.csv"), app=self.app, **secure,
        )  # fmt: skip
        enrol(device, self.server.invite(600.0))
        return device

    def enrol_all(self) -> None:
        """Make all nodes known, and write down who they are."""
        devices = [self.enrol(number) for number in range(len(self.capacities))]
        write_atomically(self.roster, b"".join(device.key.with_suffix(".pub").read_bytes() for device in devices))

    def start_node(self, number: int) -> Program:
        """Start a node."""
        return self.start(f"node-{number}", "node", "start", str(self.node(number)))

    def start_run(self, *options: str) -> Program:
        """Start the training."""
        waits = ["--wait-for", str(self.wanted), "--patience", "300"]
        return self.start("run", "server", "train", str(self.server.folder), *waits, *options)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self, say: Say, on_round: Callable[[int, int], None] = lambda _done, _answers: None) -> None:
        """Start everything, train, stop everything."""
        with stopping(self.programs):
            server = self.start_server()
            say(f"The server listens on {HOST}:{self.port}, TLS, only enrolled devices.")
            self.enrol_all()
            nodes = [self.start_node(number) for number in range(len(self.capacities))]
            say(f"{len(nodes)} devices start: {', '.join(str(capacity) for capacity in self.capacities)}.")
            job = self.start_run()
            rounds, events, over = 0, 0, False
            while not over:
                over = job.status() is not None
                for event in self.events()[events:]:
                    events += 1
                    say(event)
                for done, answers in self.server.rounds_done()[rounds:]:
                    rounds += 1
                    on_round(done, answers)
                if not over:
                    server.require_alive()
                    time.sleep(0.3)
        if not (self.run_folder / RESULT).exists():
            raise InvalidState(f"the run did not end well; its last words:\n{job.tail()}", "a result", job.see)

    def events(self) -> list[str]:
        """Who joined and who was left out, as the server logged it."""
        try:
            lines = (self.run_folder / LOG).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line.split(" ", 3)[-1] for line in lines if " joins: " in line or " left out: " in line]

    def quality(self) -> float | None:
        """How well the model served all users when they were last asked; None if they were not."""
        with (self.run_folder / METRICS).open(newline="") as file:
            found = [float(row["server"]) for row in csv.DictReader(file) if row["server"]]
        return found[-1] if found else None

    def told(self) -> list[str]:
        """What the run has to say at its end."""
        found = read_values(self.run_folder / RESULT, "Run it again.")
        return [str(sentence) for sentence in found.get("told", [])]

    def took_part(self) -> list[dict[str, Any]]:
        """Who took part, as the server wrote it down."""
        return who_took_part(read_events(self.run_folder))[0]


def trial_of(settings: Settings, nodes: str, folder: Path, *, half: bool = False) -> tuple[Trial, Dataset]:
    """A federation from settings and the nodes' capacities, written ``1x,4x,16x,64x``, with its data."""
    capacities = [capacity for word in nodes.split(",") if word.strip() for capacity in _several(word)]
    if not capacities:
        raise InvalidSettings(f"--nodes {nodes!r}", "what each node can hold", 'Write e.g. --nodes "1x,4x,16x".')
    scheme = "-".join(dict.fromkeys(str(capacity) for capacity in capacities))
    settings = settings.with_changes({"fleet.capacities": scheme, "fleet.clients_per_round": None})
    refuse_unserved(settings)
    if settings.model.reads_images:
        raise InvalidSettings(
            f"model.kind={settings.model.kind!r}", "a recommender: nodes bring files of interactions",
            "For images give make_client_app a function that returns LocalImages.",
        )  # fmt: skip
    return Trial(settings, capacities, folder, half=half), load_catalogued(settings)[0]


def _several(word: str) -> list[Capacity]:
    """``4x*3`` stands for three nodes."""
    size, _, times = word.partition("*")
    if times.strip() and not (times.strip().isdecimal() and 1 <= int(times) <= 10_000):
        raise InvalidSettings(f"--nodes {word!r}", "a capacity, or a capacity times a number", 'Write e.g. "1x,4x*3".')
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
