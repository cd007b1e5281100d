"""A fleet on this machine to be joined by browser tabs: a server, small Python devices, and a link with invitations."""

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fairfold.atomic_io import make_folder, make_private_folder
from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.federation.federation import load_unnumbered
from fairfold.flower.fleet import Echo
from fairfold.flower.fleet.enrolment import SAMPLE
from fairfold.flower.fleet.local_fleet import HOST, LocalFleet
from fairfold.flower.fleet.node import NodeFolder
from fairfold.flower.fleet.processes import stop_on_exit
from fairfold.flower.fleet.relay import Relay
from fairfold.flower.fleet.server import ServerFolder
from fairfold.flower.fleet.training import RunFollower
from fairfold.subspace import Capacity, assign_groups

INVITED_SECONDS = 86_400.0
ROUND_TIMEOUT = 60.0  # a tab that was closed holds up a round no longer


@dataclass
class DemoFleet(LocalFleet):
    """A local fleet with users left over for browser tabs, of some capacities, and with names of items."""

    tabs: tuple[str, ...] = ("1x", "4x", "16x")

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> tuple["DemoFleet", Dataset]:
        """A fleet with two Python devices, and its data."""
        settings = settings.with_changes({"fleet.capacities": "1x-4x-16x", "fleet.clients_per_round": None})
        return cls(settings, [Capacity.parse("1x"), Capacity.parse("4x")], folder), load_unnumbered(settings)[0]

    def prepare(self, data: Dataset) -> None:
        """Make the server, every node's own file, and example data for the tabs: the users that no node has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        titles = data.titles or [str(item) for item in range(data.num_items)]
        names = self.folder / "items.txt"
        names.write_text("".join(f"{title}\n" for title in titles), encoding="utf-8")
        rounds = {"round_timeout": ROUND_TIMEOUT, "wait_timeout": 300.0, "min_nodes": 1}
        self.server = ServerFolder.create(
            self.folder / "server",
            self.settings,
            HOST,
            port=self.port,
            catalogue=names,
            rounds=rounds,
            operator="A demonstration on this computer",
        )
        make_folder(self.folder / "logs")
        groups = assign_groups(data.num_users, len(self.capacities) + len(self.tabs))
        for number in range(len(self.capacities)):
            make_private_folder(self.node(number))
            users = (groups == number).nonzero().flatten().tolist()
            self.num_users.append(len(users))
            self._write(self.node(number) / "train.csv", data, titles, users)
            self._write(self.node(number) / "test.csv", data, titles, users, held_out=True)
        rest = (groups >= len(self.capacities)).nonzero().flatten().tolist()
        self._write(self.server.folder / SAMPLE, data, titles, rest)

    @staticmethod
    def _write(path: Path, data: Dataset, titles: list[str], users: list[int], *, held_out: bool = False) -> None:
        part = data.test if held_out else data.train
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item"])
            for user in users:
                writer.writerows((f"reader {user}", titles[item]) for item in part.of(user).tolist())

    def enrol(self, number: int) -> NodeFolder:
        """Enrol a node without a roster: tabs join later, and are not on one that is written now."""
        node = replace(super().enrol(number), roster="")
        node.save()
        return node

    def link(self, port: int) -> str:
        """The page's address, with an invitation for each tab; browsers do not send what is behind the #."""
        users = -(-sum(self.num_users) // len(self.num_users))
        tokens = [f"{self.server.invite(INVITED_SECONDS, users)}:{capacity}" for capacity in self.tabs]
        return f"http://localhost:{port}/#{','.join(tokens)}"

    def show(self, port: int, echo: Echo, on_link: Callable[[str], None], begins: Callable[[int], bool]) -> None:
        """Start everything, give the link, train when ``begins`` says so of the number of tabs; until interrupted."""
        with stop_on_exit(self.programs):
            server = self.start_server()
            self.enrol_all()
            for number in range(len(self.capacities)):
                self.start_node(number)
            with Relay(port, self.port, self.server.authority) as relay:
                on_link(self.link(relay.port))
                while not begins(max(self.server.count_online()[0] - len(self.capacities), 0)):
                    server.require_alive()
                    time.sleep(1.0)
                self._train(echo)
                while server.status() is None:
                    time.sleep(1.0)
                server.require_alive()

    def _train(self, echo: Echo) -> None:
        job = self.start("run", "server", "train", str(self.server.folder), "--wait-for", "1")
        wanted = self.settings.run.rounds
        follower = RunFollower(
            self.server, echo, lambda done, updates: echo(f"round {done}/{wanted}: {updates} devices replied")
        )
        while job.status() is None:
            follower.show_new()
            time.sleep(0.5)
        follower.show_new()
        if job.status():
            job.require_alive()
        echo("Trained: every tab has its model, and recommends with it, also when this server has ended.")
