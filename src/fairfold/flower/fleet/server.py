"""The server of a fleet: its folder and its programs.

Beside ``server.toml`` the folder holds ``settings.toml`` (what is trained), ``state.db`` (Flower's) and the paths of
:class:`ServerFolder`. Where ``settings.toml`` has no table ``[privacy]``, ``privacy.toml`` has the choice of this run.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import ipaddress
import json
import re
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import tomli_w

from fairfold.atomic_io import locked, make_folder, make_private_folder, remove, write_atomically
from fairfold.errors import CannotWrite, InvalidData, InvalidSettings, InvalidState
from fairfold.flower.fleet import Echo, FleetFolder, PathInside
from fairfold.flower.fleet.connection import API_PREFIX, DEFAULT_PORT, RefusedByServer, ServerConnection, json_object
from fairfold.flower.fleet.control import HEADER, SECRET_BYTES, VARIABLE, read_secret
from fairfold.flower.fleet.credentials import Invitations, Token, fingerprint, make_certificates, renew_certificate
from fairfold.flower.fleet.processes import OFFLINE, Program, bind_port, stop_on_exit, wait_for_port
from fairfold.flower.roster import Roster, make_signer

if TYPE_CHECKING:
    from fairfold.config import Settings

SETTINGS, PRIVACY = "settings.toml", "privacy.toml"
FLOWER_CONNECTION = "fleet"  # the server's name in Flower's own configuration
LOOPBACK = "127.0.0.1"
STABLE_SECONDS = 60.0  # a program that ends later than that has been running well
MAX_RESTART_SECONDS = 60.0  # the longest pause before the SuperLink is started again
PORT_TIMEOUT = 5.0  # seconds in which a server that has ended frees its port
COSTS = {"round", "seconds", "clients", "bytes_down", "bytes_up", "check"}  # columns of metrics.csv beside qualities
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class ServerFolder(FleetFolder):
    """A server as ``fairfold server init`` made it."""

    FILE: ClassVar[str] = "server.toml"
    WRITTEN_BY: ClassVar[str] = "fairfold server init FOLDER --host ..."

    host: str  # the name by which devices reach it
    port: int
    listen: str  # the address that it listens on
    items: int  # size of the catalogue
    rounds: dict[str, Any] = field(default_factory=dict)  # options of FairStrategy, such as deadlines
    operator: str = ""  # who runs the fleet, as people read it before they join

    keys = PathInside("keys")  # certificates and private keys
    authority = PathInside("keys/ca.crt")  # the certificate that devices pin
    app = PathInside("app")  # the Flower app that a run executes
    control = PathInside("control")  # the secret of the operator's requests (:mod:`.control`)
    run = PathInside("run")  # the run folder that training writes (:mod:`.training`)
    log = PathInside("server.log")  # what Flower's programs print; that of the former start is server.log.1

    @property
    def invitations(self) -> Invitations:
        """The tokens that the server has issued."""
        return Invitations(self.folder / "invites")

    @classmethod
    def create(
        cls,
        folder: Path,
        settings: Settings,
        host: str,
        *,
        port: int = DEFAULT_PORT,
        items: int = 0,
        catalogue: Path | None = None,
        rounds: dict[str, Any] | None = None,
        privacy: bool = True,
        operator: str = "",
    ) -> ServerFolder:
        """Make a server in a new or empty folder; without ``privacy`` each run chooses it by the number of nodes."""
        from fairfold.config.files import to_toml
        from fairfold.flower.fleet.training import write_app
        from fairfold.flower.preparation import initial_plan, refuse_simulation_only
        from fairfold.runs.loaded import CATALOG_FILE

        folder = folder.absolute()
        if folder.exists() and any(folder.iterdir()):
            raise InvalidSettings(f"{folder}, which is not empty", "a new folder", "Name another, or remove it.")
        listen = LOOPBACK if _is_loopback(host) else "0.0.0.0"
        names = None if catalogue is None else read_catalogue(catalogue)
        server = cls(folder, host, port, listen, items if names is None else len(names), rounds or {}, operator)
        refuse_simulation_only(settings)
        initial_plan(settings, server.items, None)  # refused now, not when devices are connected
        make_private_folder(folder)
        make_certificates(server.keys, [host])
        write_atomically(server.control, f"{secrets.token_hex(SECRET_BYTES)}\n".encode(), private=True)
        make_signer(server.keys / "signer")
        write_app(server.app, folder)
        if names is not None:
            write_atomically(folder / CATALOG_FILE, "".join(f"{name}\n" for name in names).encode())
        write_atomically(folder / SETTINGS, to_toml(settings, {"data"} if privacy else {"data", "privacy"}).encode())
        make_folder(folder / "home")
        connection = {"address": f"{LOOPBACK}:{port}", "root-certificates": str(server.authority)}
        config = {"superlink": {FLOWER_CONNECTION: connection}}
        write_atomically(folder / "home" / "config.toml", tomli_w.dumps(config).encode())
        server.save()
        server.cached_privacy_notes()  # now, where the settings are loaded: it takes seconds in a new process
        return server

    def settings(self, rounds: int = 0) -> Settings:
        """The settings of a run, with another number of rounds if one is given."""
        from fairfold.config.files import load_settings, read_toml

        changes: dict[str, Any] = {"run.rounds": rounds} if rounds else {}
        if not self.has_privacy_settings() and (self.folder / PRIVACY).exists():
            changes["privacy"] = read_toml(self.folder / PRIVACY)
        return load_settings(self.folder / SETTINGS, changes)

    def has_privacy_settings(self) -> bool:
        """Whether ``settings.toml`` has a table ``[privacy]``."""
        from fairfold.config.files import read_toml

        return "privacy" in read_toml(self.folder / SETTINGS)

    def cached_privacy_notes(self) -> list[str]:
        """The notes as they were made by :meth:`privacy_notes`, which takes seconds, from the same settings."""
        sources = [self.folder / SETTINGS, self.folder / PRIVACY]
        content = [path.read_bytes() if path.exists() else b"" for path in sources]
        content += [bytes([self.run.exists(), (self.run / "result.json").exists()])]
        key = hashlib.sha256(b"\0".join(content)).hexdigest()
        path = self.folder / "privacy-notes.json"
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            stored = json.loads(path.read_bytes())
            if stored["key"] == key:
                return list(stored["notes"])
        notes = self.privacy_notes()
        with contextlib.suppress(CannotWrite):  # it would only be slow again
            write_atomically(path, json.dumps({"key": key, "notes": notes}).encode())
        return notes

    def privacy_notes(self) -> list[str]:
        """Sentences on what the server of a run sees and what that costs a user, or when that is decided."""
        from fairfold.config.fleet import DifferentialPrivacy
        from fairfold.federation.plan import privacy_notes, privacy_report

        if not self.has_privacy_settings() and not (self.folder / PRIVACY).exists():
            return ["decided when a run begins, by the number of connected devices"]
        settings = self.settings()
        notes = privacy_notes(privacy_report(settings))
        if not isinstance(settings.privacy, DifferentialPrivacy):
            return notes
        ended = (self.run / "result.json").exists()
        spent = "Spent" if ended else "Being spent" if self.run.exists() else "Nothing of it is spent yet"
        return [*notes, f"{spent}; every device has a ledger of its own (fairfold node status)."]

    def choose_privacy(self, num_nodes: int) -> list[str]:
        """Choose the privacy level of a new run where the settings do not; returns sentences on the choice."""
        from fairfold.config.files import tables_to_toml
        from fairfold.flower.preparation import default_privacy

        if self.has_privacy_settings():
            return []
        remove(self.folder / PRIVACY)
        chosen, notes = default_privacy(self.settings(), num_nodes, asked=False)
        write_atomically(self.folder / PRIVACY, tables_to_toml(chosen.plain()["privacy"]).encode())
        return notes

    def invite(self, valid: float, users: int = 1) -> Token:
        """Create a token for one device of at most so many users, valid for some seconds."""
        return self.invitations.create(fingerprint(self.authority.read_bytes()), valid, users)

    def roster(self) -> Roster:
        """The signed log of the devices that have enrolled."""
        return Roster(self.folder / "roster.jsonl", make_signer(self.keys / "signer"))

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the server's programs: they contact no other host, and install nothing."""
        return OFFLINE | {"FLWR_HOME": str(self.folder / "home"), VARIABLE: str(self.control)}

    def superlink_command(self) -> list[str]:
        """The command line of Flower's SuperLink behind the gateway."""
        options = ["--fleet", self.folder, "--host", self.listen, "--port", self.port]
        options += ["--ssl-ca-certfile", self.authority, "--ssl-certfile", self.keys / "server.pem"]
        options += ["--ssl-keyfile", self.keys / "server.key", "--database", self.folder / "state.db"]
        options += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        return [sys.executable, "-m", "fairfold.flower.fleet.superlink", *map(str, options)]

    def start(self, echo: Echo, options: list[str], page: int | None = None) -> None:
        """Run the SuperLink, and again whenever it ends, until interrupted; with a status page on port ``page``."""
        try:
            with locked(self.folder, wait=False), stop_on_exit([]) as programs:
                remedy = "End it, or make a server with another --port."
                bind_port(self.listen, self.port, remedy, PORT_TIMEOUT).close()
                if page is not None:
                    bind_port(LOOPBACK, page, "End it, or name another with --watch.").close()
                    command = [sys.executable, "-m", "fairfold", "watch", str(self.folder), "--port", str(page)]
                    programs.append(Program("the page", command, None, OFFLINE))
                self._run_superlink(echo, options)
        except BlockingIOError:
            given = f"{self.folder}, whose server is running"
            raise InvalidState(given, "one process for a server", "See `fairfold server status`.") from None

    def _run_superlink(self, echo: Echo, options: list[str]) -> None:
        failures, first = 0, True
        if self.log.exists():
            self.log.replace(self.folder / f"{self.log.name}.1")
        while True:
            if note := renew_certificate(self.keys, [self.host]):
                echo(note)
            started = time.monotonic()
            with stop_on_exit([]) as programs:
                command = [*self.superlink_command(), *options]
                programs.append(program := Program("the SuperLink", command, self.log, self.environment))
                with contextlib.nullcontext() if first else contextlib.suppress(InvalidState):  # later it tries again
                    wait_for_port(self.port, program)
                    echo(f"The server listens on {self.listen}:{self.port} as {self.host}, TLS, only enrolled devices.")
                    echo(f"What Flower prints is in {self.log}.")
                first = False
                while program.wait(3600.0) is None:
                    pass
            failures = 0 if time.monotonic() - started > STABLE_SECONDS else failures + 1
            pause = min(2.0**failures, MAX_RESTART_SECONDS)
            echo(f"The SuperLink ended with status {program.status()}; it is started again in {pause:.0f} s.")
            time.sleep(pause)

    def request(self, resource: str) -> dict[str, Any]:
        """The ``nodes``, their ``states`` or the ``runs`` of the running server."""
        try:
            with contextlib.closing(ServerConnection(f"{LOOPBACK}:{self.port}", self.authority)) as connection:
                headers = {HEADER: read_secret(self.control)}
                return json_object(connection.request("GET", API_PREFIX + resource, headers=headers))
        except RefusedByServer as refused:
            given = f"the server in {self.folder} does not respond: {refused}"
            raise InvalidState(given, "a running one", f"Run `fairfold server start {self.folder}`.") from None

    def nodes_by_state(self) -> dict[str, int]:
        """The number of nodes in each of Flower's states: online, offline, registered."""
        return dict(self.request("states")["states"])

    def count_online(self) -> tuple[int, int]:
        """The number of connected nodes, and of all enrolled ones."""
        states = self.nodes_by_state()
        return states.get("online", 0), sum(states.values())

    def completed_rounds(self) -> list[tuple[int, int]]:
        """The rounds of the run, each with the number of updates that were aggregated."""
        try:
            with (self.run / "metrics.csv").open(newline="") as file:
                return [(int(row["round"]), int(row["clients"])) for row in csv.DictReader(file) if row["clients"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # not there yet, or being written

    def qualities(self) -> dict[int, dict[str, float]]:
        """The evaluated rounds of the run: quality of the server's model and of each size's, by name."""
        found: dict[int, dict[str, float]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), (self.run / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                values = {name: float(text) for name, text in row.items() if name not in COSTS and text}
                found |= {int(row["round"]): values} if "server" in values else {}
        return found

    def status(self, *, rows: bool = False) -> dict[str, Any]:
        """The server's status from its folder and, where it is running, from itself; with ``rows`` each node's."""
        done = self.completed_rounds()
        run: dict[str, Any] = {"rounds": done[-1][0] if done else 0, "result": (self.run / "result.json").exists()}
        evaluated = self.qualities()
        run["quality_by_size"] = evaluated[max(evaluated)] if evaluated else {}
        with contextlib.suppress(OSError, ValueError, KeyError):
            result = json.loads((self.run / "result.json").read_text())
            run |= {"metric": result["metric"], "quality": result["server"]["quality"]}
        status = {"server": f"{self.host}:{self.port}", "items": self.items, "running": True, "run": run}
        status["privacy"] = self.cached_privacy_notes()
        try:
            return status | self.request("nodes" if rows else "states") | self.request("runs")
        except InvalidState as error:
            return status | {"running": False, "message": error.given}


def read_catalogue(path: Path) -> list[str]:
    """Read the names of items: the column ``item`` of a CSV file, or a text file with a name per line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            separator = max(",;\t", key=first.count)
            file.seek(0)
            if "item" in [column.strip() for column in first.rstrip("\r\n").split(separator)]:
                names = [(row.get("item") or "").strip() for row in csv.DictReader(file, delimiter=separator)]
            else:
                names = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidData(f"{path}: {error}", "a file with the names of the items", "Check the path.") from None
    if not names or not all(names) or len(set(names)) < len(names):
        given = f"{path}: {len(names)} names, {len(names) - len(set(filter(None, names)))} of them empty or repeated"
        raise InvalidData(given, "a name for every item, each once", "Correct the file.")
    return names


def _is_loopback(host: str) -> bool:
    """Whether a host is this machine alone; refuses what no certificate can be issued for, such as one with a port."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    if not HOST_NAME.fullmatch(host):
        remedy = "Write e.g. --host server.example.org; a port goes to --port."
        raise InvalidSettings(f"--host {host!r}", "the name or the address of a machine alone", remedy)
    return host == "localhost"
