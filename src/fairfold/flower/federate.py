"""A complete federation on this machine, for trying out: TLS, node keys, a SuperLink, SuperNodes with their own files.

Everything lies in one folder: ``keys/`` what is secret and what is not, ``nodes/N/`` what a device would have on its
disk, ``app/`` the Flower app, ``logs/`` what every program said, ``run/`` what the server writes.
"""

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings, InvalidState
from fairfold.files import make_private, write_atomically
from fairfold.flower.keys import make_certificates, make_node_key
from fairfold.flower.opening import first_plan, refuse_unserved
from fairfold.flower.processes import OFFLINE, Program, free_ports, stopping, tool, wait_for_port
from fairfold.flower.trial_app import CLIENT, PYPROJECT, SERVER
from fairfold.runs.nodes import read_events, who_took_part
from fairfold.runs.read import LOG, METRICS, RESULT
from fairfold.settings import Settings
from fairfold.simulate.world import load_catalogued
from fairfold.subspace import Capacity, assign_groups

HOST = "127.0.0.1"
CONNECTION = "trial"
Say = Callable[[str], None]


@dataclass
class Trial:
    """A federation on this machine: settings with the capacities of its nodes, one a node, in a folder of its own."""

    settings: Settings
    capacities: list[Capacity]
    folder: Path
    half: bool = False  # vectors travel in half precision
    round_timeout: float = 600.0  # seconds the devices have to answer
    programs: list[Program] = field(default_factory=list)  # those that are running

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.ports = free_ports(1 + len(self.capacities))

    # -- before anything runs ------------------------------------------------------------------------------------------

    def prepare(self, data: Dataset) -> None:
        """Write keys, the app, and every node's own file."""
        first_plan(self.settings, data.num_items, None)  # refused now, not after everything has started
        for part in ("logs", "app/fairfold_trial", "home"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        make_private(self.folder / "keys")
        make_certificates(self.folder / "keys", [HOST, "localhost"])
        groups = assign_groups(data.num_users, len(self.capacities))
        for number in range(len(self.capacities)):
            make_node_key(self.key(number))
            users = (groups == number).nonzero().flatten().tolist()
            make_private(self.node(number))
            _write_interactions(self.node(number) / "train.csv", data.train, users)
            _write_interactions(self.node(number) / "test.csv", data.test, users)
        self._write_app(data.num_items)
        connection = {"address": f"{HOST}:{self.ports[0]}", "root-certificates": str(self.folder / "keys" / "ca.crt")}
        content = tomli_w.dumps({"superlink": {CONNECTION: connection}})
        write_atomically(self.folder / "home" / "config.toml", content.encode())

    def key(self, number: int) -> Path:
        """A node's private key; its public one is beside it."""
        return self.folder / "keys" / f"node-{number}"

    def node(self, number: int) -> Path:
        """What stands for a device's disk."""
        return self.folder / "nodes" / str(number)

    @property
    def run_folder(self) -> Path:
        """What the server writes."""
        return self.folder / "run"

    def _write_app(self, num_items: int) -> None:
        config = {
            "settings": json.dumps({table: of for table, of in self.settings.plain().items() if table != "data"}),
            "num_items": num_items,
            "min_nodes": len(self.capacities),
            "patience": 300.0,
            "folder": str(self.run_folder),
            "half": self.half,
            "resume": False,  # whoever goes on with a run that was broken off changes it here
            "round_timeout": self.round_timeout,
        }
        app = self.folder / "app"
        (app / "fairfold_trial" / "__init__.py").write_text("")
        (app / "fairfold_trial" / "client_app.py").write_text(CLIENT)
        (app / "fairfold_trial" / "server_app.py").write_text(SERVER)
        (app / "LICENSE").write_text("Made by `fairfold federate`; do with it what you like.\n")
        (app / "pyproject.toml").write_text(PYPROJECT + tomli_w.dumps(config))

    # -- programs ------------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What every program is started with."""
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # many small programs on one machine
        return OFFLINE | threads | {"FLWR_HOME": str(self.folder / "home")}

    def superlink_command(self) -> list[str]:
        """The server."""
        keys = self.folder / "keys"
        return [
            sys.executable, "-m", "fairfold.flower.superlink", "--host", HOST, "--port", str(self.ports[0]),
            "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem"),
            "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def supernode_command(self, number: int) -> list[str]:
        """One device."""
        home, capacity = self.node(number), str(self.capacities[number])
        paths = {"data": home / "train.csv", "test": home / "test.csv", "state": home / "state"}
        facts = {"capacity": capacity} | {key: str(path) for key, path in paths.items()}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in facts.items())
        return [
            tool("flower-supernode"), "--superlink", f"{HOST}:{self.ports[0]}",
            "--root-certificates", str(self.folder / "keys" / "ca.crt"),
            "--auth-supernode-private-key", str(self.key(number)),
            "--host", HOST, "--port", str(self.ports[1 + number]), "--node-config", config,
        ]  # fmt: skip

    def run_command(self) -> list[str]:
        """What starts the training."""
        return [tool("flwr"), "run", str(self.folder / "app"), CONNECTION, "--stream"]

    def start(self, name: str, command: Sequence[str]) -> Program:
        """Start a program; it is stopped with all others."""
        program = Program(name, command, self.folder / "logs" / f"{name}.log", self.environment)
        self.programs.append(program)
        return program

    def start_superlink(self) -> Program:
        """Start the server and wait until it listens."""
        program = self.start("superlink", self.superlink_command())
        wait_for_port(self.ports[0], program)
        return program

    def register(self, number: int) -> None:
        """Make a node's key known."""
        command = [tool("flwr"), "supernode", "register", f"{self.key(number)}.pub", CONNECTION]
        program = self.start(f"register-{number}", command)
        if program.wait(120) != 0:
            raise InvalidState(
                f"node {number} could not be registered: {program.tail()}", "a server that takes its key",
                f"See {self.folder / 'logs' / 'superlink.log'}.",
            )  # fmt: skip
        self.programs.remove(program)

    def start_node(self, number: int) -> Program:
        """Start a node."""
        return self.start(f"node-{number}", self.supernode_command(number))

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self, say: Say, on_round: Callable[[int, int], None] = lambda _done, _answers: None) -> None:
        """Start everything, train, stop everything."""
        with stopping(self.programs):
            server = self.start_superlink()
            say(f"SuperLink listens on {HOST}:{self.ports[0]}, TLS, only registered keys.")
            for number in range(len(self.capacities)):
                self.register(number)
            nodes = [self.start_node(number) for number in range(len(self.capacities))]
            say(f"{len(nodes)} SuperNodes start: {', '.join(str(capacity) for capacity in self.capacities)}.")
            job = self.start("run", self.run_command())
            rounds, events, over = 0, 0, False
            while not over:
                over = job.status() is not None
                for event in self.events()[events:]:
                    events += 1
                    say(event)
                for done, answers in self.rounds()[rounds:]:
                    rounds += 1
                    on_round(done, answers)
                if not over:
                    server.require_alive()
                    time.sleep(0.3)
        if not (self.run_folder / RESULT).exists():
            raise InvalidState(
                f"the run did not end well; its last words:\n{job.tail()}", "a result", f"See {job.log}."
            )

    def rounds(self) -> list[tuple[int, int]]:
        """The rounds done, each with the number of answers that counted."""
        try:
            with (self.run_folder / METRICS).open(newline="") as file:
                return [(int(row["round"]), int(row["clients"])) for row in csv.DictReader(file) if row["clients"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # not there yet, or just being written

    def events(self) -> list[str]:
        """Who joined and who was left out, as the server logged it."""
        try:
            lines = (self.run_folder / LOG).read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line.split(" ", 3)[-1] for line in lines if " joins: " in line or " left out: " in line]

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
