"""The server of a fleet: its folder and its programs.

The folder holds ``server.toml`` (name, port, catalogue, deadlines), ``settings.toml`` (what is trained), ``keys/``
(certificates), ``invites/``, ``app/`` (the Flower app), ``state.db`` (Flower's), and ``run/``, what training writes
(:mod:`.launch`). Where ``settings.toml`` has no table ``[privacy]``, ``privacy.toml`` is what was chosen for this run.
"""

from __future__ import annotations

import contextlib
import csv
import ipaddress
import json
import re
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fairfold.errors import InvalidData, InvalidSettings, InvalidState
from fairfold.files import locked, make_folder, make_private, remove, write_atomically
from fairfold.flower.keys import fingerprint, make_certificates, renew
from fairfold.flower.link import PORT, Line, Refused, detail_of
from fairfold.flower.processes import OFFLINE, Program, listening, stopping, wait_for_port
from fairfold.flower.reception import OWN
from fairfold.flower.tokens import Invitations, Token
from fairfold.flower.training import write_app

if TYPE_CHECKING:
    from collections.abc import Callable

    from fairfold.settings import Settings

    Say = Callable[[str], None]

FORMAT = 1
FILE, SETTINGS, PRIVACY = "server.toml", "settings.toml", "privacy.toml"
CONNECTION = "fleet"  # the server's name in Flower's own configuration
HOME = "127.0.0.1"
STEADY = 60.0  # seconds after which a program that ends has been running well
LONGEST_PAUSE = 60.0
VACATED = 5.0  # seconds in which a server that was ended has left its port
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True)
class ServerFolder:
    """A server, as ``fairfold server init`` made it."""

    folder: Path
    host: str  # the name by which devices know it
    port: int
    listen: str  # the address that it listens on
    items: int  # of the catalogue
    rounds: dict[str, Any] = field(default_factory=dict)  # what FairStrategy takes: deadlines and the like

    @property
    def keys(self) -> Path:
        """Certificates and secrets."""
        return self.folder / "keys"

    @property
    def authority(self) -> Path:
        """The certificate that devices pin."""
        return self.keys / "ca.crt"

    @property
    def app(self) -> Path:
        """What a run runs."""
        return self.folder / "app"

    @property
    def run(self) -> Path:
        """What training writes: the folder of ``fairfold train``."""
        return self.folder / "run"

    @property
    def invitations(self) -> Invitations:
        """Tokens that it has given out."""
        return Invitations(self.folder / "invites")

    @classmethod
    def create(
        cls, folder: Path, settings: Settings, host: str, *, port: int = PORT, items: int = 0,
        catalogue: Path | None = None, rounds: dict[str, Any] | None = None, privacy: bool = True,
    ) -> ServerFolder:  # fmt: skip
        """Make a server in a new or empty folder; without ``privacy`` who takes part decides it for each run."""
        from fairfold.flower.opening import first_plan, refuse_unserved
        from fairfold.runs.federated import CATALOGUE
        from fairfold.settings.files import to_toml

        folder = folder.absolute()
        if folder.exists() and any(folder.iterdir()):
            raise InvalidSettings(f"{folder}, which is not empty", "a new folder", "Name another, or remove it.")
        _require_name(host)
        names = None if catalogue is None else read_catalogue(catalogue)
        listen = HOME if _is_loopback(host) else "0.0.0.0"
        server = cls(folder, host, port, listen, items if names is None else len(names), rounds or {})
        refuse_unserved(settings)
        first_plan(settings, server.items, None)  # refused now, not when devices have come
        make_private(folder)
        make_certificates(server.keys, [host])
        write_app(server.app, folder)
        if names is not None:
            write_atomically(folder / CATALOGUE, "".join(f"{name}\n" for name in names).encode())
        write_atomically(folder / SETTINGS, to_toml(settings, {"data"} if privacy else {"data", "privacy"}).encode())
        connection = {"address": f"{HOME}:{port}", "root-certificates": str(server.authority)}
        make_folder(folder / "home")
        write_atomically(
            folder / "home" / "config.toml", tomli_w.dumps({"superlink": {CONNECTION: connection}}).encode()
        )
        content = {key: value for key, value in asdict(server).items() if key != "folder"}
        write_atomically(folder / FILE, tomli_w.dumps({"format": FORMAT, **content}).encode())
        return server

    @classmethod
    def open(cls, folder: Path) -> ServerFolder:
        """The server in a folder."""
        path, folder = folder / FILE, folder.absolute()
        known = {one.name for one in fields(cls)} - {"folder"}
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content.pop("format", None) != FORMAT or not content.keys() <= known:
                raise ValueError(f"another format than {FORMAT}, or an unknown key")
            return cls(folder, **content)
        except FileNotFoundError:
            remedy = "Run `fairfold server init FOLDER --host ...` first."
            raise InvalidState(f"{folder}, which holds no server", f"a folder with {FILE}", remedy) from None
        except (OSError, ValueError, TypeError) as error:
            raise InvalidState(f"{path}: {error}", "what `fairfold server init` wrote", "Correct the file.") from None

    def settings(self, rounds: int = 0) -> Settings:
        """What is trained; for so many rounds, if any are given."""
        from fairfold.settings.files import load_settings, read_toml

        changes: dict[str, Any] = {"run.rounds": rounds} if rounds else {}
        if not self.says_privacy() and (self.folder / PRIVACY).exists():
            changes["privacy"] = read_toml(self.folder / PRIVACY)
        return load_settings(self.folder / SETTINGS, changes)

    def says_privacy(self) -> bool:
        """Whether its settings say what the server may see."""
        from fairfold.settings.files import read_toml

        return "privacy" in read_toml(self.folder / SETTINGS)

    def privacy_words(self) -> list[str]:
        """What the server of its run sees, and what that costs a user; or who is to decide that."""
        from fairfold.protocol.noising import privacy_facts, privacy_words
        from fairfold.settings.privacy import PrivatePrivacy

        if not self.says_privacy() and not (self.folder / PRIVACY).exists():
            return ["decided when a run begins, by how many devices are there"]
        settings = self.settings()
        words = privacy_words(privacy_facts(settings))
        if not isinstance(settings.privacy, PrivatePrivacy):
            return words
        ended = (self.run / "result.json").exists()
        spent = "Spent" if ended else "Being spent" if self.run.exists() else "Nothing of it is spent yet"
        return [*words, f"{spent}; every device keeps an account of its own (fairfold node status)."]

    def choose_privacy(self, devices: int) -> list[str]:
        """Decide what the server of a new run sees, where settings do not: what was chosen, and why."""
        from fairfold.flower.opening import with_privacy
        from fairfold.settings.files import tables_to_toml

        if self.says_privacy():
            return []
        remove(self.folder / PRIVACY)
        chosen, words = with_privacy(self.settings(), devices, asked=False)
        write_atomically(self.folder / PRIVACY, tables_to_toml(chosen.plain()["privacy"]).encode())
        return words

    def invite(self, valid: float) -> Token:
        """A token for one device."""
        return self.invitations.create(fingerprint(self.authority.read_bytes()), valid)

    # -- its programs --------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """What its programs are started with: they call nobody, and install nothing."""
        return OFFLINE | {"FLWR_HOME": str(self.folder / "home")}

    def superlink_command(self) -> list[str]:
        """Flower's SuperLink behind the gate."""
        return [
            sys.executable, "-m", "fairfold.flower.superlink", "--fleet", str(self.folder),
            "--host", self.listen, "--port", str(self.port), "--ssl-ca-certfile", str(self.authority),
            "--ssl-certfile", str(self.keys / "server.pem"), "--ssl-keyfile", str(self.keys / "server.key"),
            "--enable-supernode-auth", "--database", str(self.folder / "state.db"),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def start(self, say: Say, options: list[str], page: int | None = None) -> None:
        """Run the SuperLink, again whenever it ends, until this process is interrupted; and a page, on a port."""
        try:
            with locked(self.folder, wait=False), stopping([]) as beside:
                listening(self.listen, self.port, "End it, or make a server with another --port.", VACATED).close()
                if page is not None:
                    listening(HOME, page, "End it, or name another with --watch.").close()
                    shown = [sys.executable, "-m", "fairfold", "watch", str(self.folder), "--port", str(page)]
                    beside.append(Program("the page", shown, None, OFFLINE))
                self._start(say, options)
        except BlockingIOError:
            given = f"{self.folder}, whose server is running"
            raise InvalidState(given, "one process for a server", "See `fairfold server status`.") from None

    def _start(self, say: Say, options: list[str]) -> None:
        failures, first = 0, True
        while True:
            if words := renew(self.keys, [self.host]):
                say(words)
            began = time.monotonic()
            with stopping([]) as programs:
                program = Program("the SuperLink", [*self.superlink_command(), *options], None, self.environment)
                programs.append(program)
                with contextlib.nullcontext() if first else contextlib.suppress(InvalidState):  # later it tries again
                    wait_for_port(self.port, program)
                    say(f"The server listens on {self.listen}:{self.port} as {self.host}, TLS, only enrolled devices.")
                first = False
                while program.wait(3600.0) is None:
                    pass
            failures = 0 if time.monotonic() - began > STEADY else failures + 1
            pause = min(2.0**failures, LONGEST_PAUSE)
            say(f"The SuperLink ended with status {program.status()}; it is started again in {pause:.0f} s.")
            time.sleep(pause)

    def ask(self, question: str) -> dict[str, Any]:
        """What the running server says of its ``nodes`` or its ``runs``."""
        line = Line(f"{HOME}:{self.port}", self.authority)
        try:
            return detail_of(line.ask("GET", OWN + question))
        except Refused as refused:
            raise InvalidState(
                f"the server in {self.folder} does not answer: {refused}", "a running one",
                f"Run `fairfold server start {self.folder}`.",
            ) from None  # fmt: skip
        finally:
            line.close()

    def devices(self) -> dict[str, int]:
        """How many devices are connected, away, or have never come, by Flower's word for it."""
        return dict(Counter(node["state"] for node in self.ask("nodes")["nodes"]))

    def online(self) -> tuple[int, int]:
        """How many devices are connected, of how many that are enrolled."""
        found = self.devices()
        return found.get("online", 0), sum(found.values())

    def rounds_done(self) -> list[tuple[int, int]]:
        """The rounds of the run, each with the number of answers that counted."""
        try:
            with (self.run / "metrics.csv").open(newline="") as file:
                return [(int(row["round"]), int(row["clients"])) for row in csv.DictReader(file) if row["clients"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # not there yet, or just being written

    def status(self) -> dict[str, Any]:
        """How it is, from its folder and, where it is running, from itself."""
        done = self.rounds_done()
        found: dict[str, Any] = {
            "server": f"{self.host}:{self.port}", "items": self.items, "running": True,
            "run": {"rounds": done[-1][0] if done else 0, "result": (self.run / "result.json").exists()},
        }  # fmt: skip
        with contextlib.suppress(OSError, ValueError, KeyError):
            result = json.loads((self.run / "result.json").read_text())
            found["run"] |= {key: result[key] for key in ("metric", "quality") if key in result}
        found["privacy"] = self.privacy_words()
        try:
            return found | self.ask("nodes") | self.ask("runs")
        except InvalidState as error:
            return found | {"running": False, "words": error.given}


def read_catalogue(path: Path) -> list[str]:
    """The names of items in their order: a column ``item`` of a CSV file, or a text file with a name a line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            separator = max(",;\t", key=first.count)
            columns = [column.strip() for column in first.rstrip("\r\n").split(separator)]
            if "item" in columns:
                file.seek(0)
                names = [(row.get("item") or "").strip() for row in csv.DictReader(file, delimiter=separator)]
            else:
                names = [line.strip() for line in [first, *file]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidData(f"{path}: {error}", "a file with the names of the items", "Check the path.") from None
    if not names or not all(names) or len(set(names)) < len(names):
        given = f"{path}: {len(names)} names, {len(names) - len(set(filter(None, names)))} of them empty or repeated"
        raise InvalidData(given, "a name for every item, each once", "Correct the file.")
    return names


def _require_name(host: str) -> None:
    """Refuse what no certificate can be for, such as an address with its port."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not NAME.fullmatch(host):
        remedy = "Write e.g. --host server.example.org; a port goes to --port."
        raise InvalidSettings(f"--host {host!r}", "the name or the address of a machine alone", remedy)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
