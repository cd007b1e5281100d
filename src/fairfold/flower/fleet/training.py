"""Training of a server's model: the Flower app of the server, and the launcher of its runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fairfold.errors import InvalidState
from fairfold.flower.fleet import Echo
from fairfold.flower.fleet.connection import json_object
from fairfold.flower.fleet.control import control_command
from fairfold.flower.fleet.server import FLOWER_CONNECTION, STABLE_SECONDS, ServerFolder
from fairfold.flower.preparation import initial_plan
from fairfold.runs.folder import LOG, RESULT, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.serverapp import Grid

MAX_FAILURES = 3  # runs in a row that break off without a round
RESTART_TIMEOUT = 600.0  # seconds in which a server that died has to be running again
SHOWN_LOG_LINES = (" joins: ", " left out: ", "it does not count, and is tried again")
PACKAGE = "fairfold_app"
UNCHECKED = (
    "Under masks no update can be checked: a hostile device is not held to the users of its invitation "
    "(docs/fleet-security.md)."
)

CLIENT_APP = '''"""For devices that run Flower's own SuperNode; `fairfold node start` has an app of its own."""

from fairfold.flower import make_client_app

app = make_client_app()
'''

SERVER_APP = '''"""The ServerApp of a fairfold server."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairfold.flower.fleet import training

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the remaining rounds of the run."""
    training.train(grid, context.run_config)
'''

# Flower requires itself here, and never installs itself. Any other dependency it might request from an index, where an
# attacker could have taken the name.
PYPROJECT = f"""[project]
name = "fairfold-app"
version = "1.0.0"
description = "The federation of a fairfold server"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "fairfold"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
"""


def write_app(app: Path, server: Path) -> None:
    """Write the Flower app of the server in a folder; a run's own options come with the run."""
    (app / PACKAGE).mkdir(parents=True)
    for name, text in (("__init__", ""), ("client_app", CLIENT_APP), ("server_app", SERVER_APP)):
        (app / PACKAGE / f"{name}.py").write_text(text)
    (app / "LICENSE").write_text("Made by fairfold; do with it what you like.\n")
    config = {"server": str(server), "rounds": 0, "resume": False}
    (app / "pyproject.toml").write_text(PYPROJECT + tomli_w.dumps(config))


def train(grid: Grid, options: Mapping[str, Any]) -> None:
    """Train the model of the server in ``options["server"]``; called by its ServerApp."""
    from fairfold.flower.strategy import FairStrategy

    server = ServerFolder.open(Path(str(options["server"])))
    settings, resume = server.settings(int(options["rounds"])), bool(options["resume"])
    more: dict[str, Any] = {"folder": server.run, "resume": resume, "roster": server.roster()} | server.rounds
    FairStrategy(settings, server.items, **more).start(grid)


class RunFollower:
    """Shows the progress of a server's run: completed rounds, and the log's lines on nodes and failed rounds."""

    def __init__(self, server: ServerFolder, echo: Echo, on_round: Callable[[int, int], None]) -> None:
        self.server, self.echo, self.on_round = server, echo, on_round
        self._log = server.run / LOG
        self._place = self._log.stat().st_size if self._log.exists() else 0
        self._num_shown = len(server.completed_rounds())

    def show_new(self) -> None:
        """Show what is new since the last call."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._place += len(line)
                text = line.decode(errors="replace").rstrip()
                if any(part in text for part in SHOWN_LOG_LINES):
                    self.echo(str(json_object(line).get("message") or text.split(" ", 3)[-1]))
        rounds = self.server.completed_rounds()
        for number, num_updates in rounds[self._num_shown :]:
            self.on_round(number, num_updates)
        self._num_shown = max(self._num_shown, len(rounds))


@dataclass
class TrainingLauncher:
    """Starts and follows runs of a server, which is running."""

    server: ServerFolder
    echo: Echo
    on_round: Callable[[int, int], None]

    def train(
        self, rounds: int, *, resume: bool = False, wait_for: int | None = None, wait_timeout: float = 120.0
    ) -> None:
        """Train to the end; a run that breaks off with the server is resumed."""
        initial_plan(self.server.settings(rounds), self.server.items, None)
        folder = RunFolder(self.server.run)
        folder.require_free(resume=resume and folder.holds_run())
        self._wait_for_nodes(wait_for, wait_timeout)
        if not resume:
            for sentence in self.server.choose_privacy(self.server.count_online()[0]):
                self.echo(sentence)
        if self.server.settings(rounds).privacy.uses_secure_aggregation:
            self.echo(UNCHECKED)
        failures = 0
        while True:
            before = len(self.server.completed_rounds())
            reason = self._run_once(rounds, resume=folder.holds_run())
            if reason is None and (self.server.run / RESULT).exists():
                return
            done = len(self.server.completed_rounds())
            failures = failures + 1 if done == before else 0
            raised = "exception" in (reason or "")  # the run's own: it would be raised again
            if raised or failures >= MAX_FAILURES:
                remedy = f"See {self.server.run / LOG} and the server's output."
                raise InvalidState(f"the run did not end well: {reason or 'no result'}", "a result", remedy)
            self.echo(f"The run broke off ({reason or 'no result'}): resuming after round {done}.")
            self._wait_for_server(RESTART_TIMEOUT)
            self._wait_for_nodes(1, wait_timeout)

    def _run_once(self, rounds: int, *, resume: bool) -> str | None:
        """Start a run and follow it to its end; returns the reason where it broke off."""
        config = f"rounds={rounds} resume={'true' if resume else 'false'}"
        output = self._flower("run", str(self.server.app), FLOWER_CONNECTION, "-c", config, "--format", "json")
        started = json_object(output.encode())
        if not started.get("success") or "run-id" not in started:  # the server may just have died
            return f"Flower did not start the run: {started.get('error-message', started)}"
        run = str(started["run-id"])
        try:
            return self._follow(run)
        except KeyboardInterrupt:
            self._flower("stop", run, FLOWER_CONNECTION)
            self.echo("The run was stopped; `fairfold server train --resume` resumes it.")
            raise

    def _wait_for_server(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.server.request("runs")
                return
            except InvalidState:
                if time.monotonic() > deadline:
                    raise
                time.sleep(2.0)

    def _wait_for_nodes(self, wanted: int | None, timeout: float) -> None:
        """Wait until enough nodes are connected, all enrolled ones if no number is given."""
        deadline = time.monotonic() + timeout
        if wanted is not None:  # nodes may be about to enrol, and the server about to start
            self._wait_for_server(timeout)
        online, enrolled = self.server.count_online() if wanted is None else self._count_online()
        if not enrolled and wanted is None:
            remedy = f"Run `fairfold server invite {self.server.folder}`, and `fairfold node enrol` on the device."
            raise InvalidState("a server without devices", "at least one that has enrolled", remedy)
        needed = enrolled if wanted is None else wanted
        if online < needed:
            self.echo(f"{online} of {enrolled} devices are connected; waiting up to {timeout:.0f} s for {needed}.")
        while online < needed and time.monotonic() < deadline:
            time.sleep(1.0)
            online, enrolled = self._count_online()
        if not online:
            raise InvalidState("no device is connected", "at least one", "Start them: `fairfold node start`.")
        self.echo(f"{online} of {enrolled} devices are connected.")

    def _count_online(self) -> tuple[int, int]:
        with contextlib.suppress(InvalidState):
            return self.server.count_online()
        return 0, 0  # while the server does not respond

    def _flower(self, *words: str) -> str:
        command, environment = control_command("flwr", *words), os.environ | self.server.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout or done.stderr

    def _follow(self, run: str) -> str | None:
        """Report a run's progress until it has ended; returns the reason where it broke off."""
        last_response = time.monotonic()
        follower = RunFollower(self.server, self.echo, self.on_round)
        while True:
            ended: dict[str, Any] | None = None
            try:
                runs = {one["run"]: one for one in self.server.request("runs")["runs"]}
                last_response = time.monotonic()
                ended = runs[run] if run in runs and runs[run]["state"] == "finished" else None
            except InvalidState as error:
                if time.monotonic() - last_response > STABLE_SECONDS:
                    return str(error)
            follower.show_new()
            self.server.cached_privacy_notes()  # here, so that `server status` need not load what they take
            if ended is not None:
                return None if ended["end"] == "completed" else f"{ended['end']}: {ended['details']}"
            time.sleep(1.0)
