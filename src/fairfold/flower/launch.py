"""A run of a server: waits for devices, starts it, tells what happens, and goes on with it where it broke off."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fairfold.errors import InvalidState
from fairfold.flower.link import detail_of
from fairfold.flower.opening import first_plan
from fairfold.flower.processes import tool
from fairfold.flower.server import CONNECTION, STEADY, ServerFolder
from fairfold.runs.folder import RunFolder
from fairfold.runs.read import LOG, RESULT

IN_VAIN = 3  # runs in a row that break off without a round, after which it is for a person to look
RESTART = 600.0  # seconds in which a server that died has to be back
WORTH_TELLING = (" joins: ", " left out: ", "it does not count, and is tried again")  # of a run's log
Say = Callable[[str], None]


@dataclass
class Launch:
    """Trains the model of a server, which is running."""

    server: ServerFolder
    say: Say
    on_round: Callable[[int, int], None]

    def train(self, rounds: int, *, resume: bool = False, wait_for: int | None = None, patience: float = 120.0) -> None:
        """Train, and watch until the end; a run that breaks off with the server is gone on with."""
        first_plan(self.server.settings(rounds), self.server.items, None)
        folder = RunFolder(self.server.run)
        folder.require_free(again=resume and folder.holds_a_run())
        self._wait(wait_for, patience)
        if not resume:
            for sentence in self.server.choose_privacy(self.server.online()[0]):
                self.say(sentence)
        failures = 0
        while True:
            before = len(self.server.rounds_done())
            reason = self._tried(rounds, resume=folder.holds_a_run())
            if reason is None and (self.server.run / RESULT).exists():
                return
            done = len(self.server.rounds_done())
            failures = failures + 1 if done == before else 0
            raised = "exception" in (reason or "")  # the run's own: it would raise it again
            if raised or failures >= IN_VAIN:
                log = f"See {self.server.run / LOG} and what the server says."
                raise InvalidState(f"the run did not end well: {reason or 'no result'}", "a result", log)
            self.say(f"The run broke off ({reason or 'no result'}): going on after round {done}.")
            self._wait_for_server(RESTART)
            self._wait(1, patience)

    def _tried(self, rounds: int, *, resume: bool) -> str | None:
        """Start a run and see it to its end; returns why, where that was not its end."""
        try:
            run = self._start_run(rounds, resume=resume)
        except InvalidState as error:  # the server may just have died
            return error.given
        try:
            return self._watch(run)
        except KeyboardInterrupt:
            self._flower("stop", run, CONNECTION)
            self.say("The run was stopped; `fairfold server train --resume` goes on with it.")
            raise

    def _wait_for_server(self, patience: float) -> None:
        """Wait until the server is there, or there again."""
        deadline = time.monotonic() + patience
        while True:
            try:
                self.server.ask("runs")
                return
            except InvalidState:
                if time.monotonic() > deadline:
                    raise
                time.sleep(2.0)

    def _wait(self, wanted: int | None, patience: float) -> None:
        """Wait until enough devices are connected, all that have enrolled if no number is given."""
        deadline = time.monotonic() + patience
        if wanted is not None:  # somebody expects them: they may be about to enrol, and the server about to start
            self._wait_for_server(patience)
        online, enrolled = self.server.online() if wanted is None else self._online()
        if not enrolled and wanted is None:
            remedy = f"Run `fairfold server invite {self.server.folder}`, and `fairfold node enrol` on the device."
            raise InvalidState("a server without devices", "at least one that has enrolled", remedy)
        needed = enrolled if wanted is None else wanted
        if online < needed:
            self.say(f"{online} of {enrolled} devices are connected; waiting up to {patience:.0f} s for {needed}.")
        while online < needed and time.monotonic() < deadline:
            time.sleep(1.0)
            online, enrolled = self._online()
        if not online:
            raise InvalidState("no device is connected", "at least one", "Start them: `fairfold node start`.")
        self.say(f"{online} of {enrolled} devices are connected.")

    def _online(self) -> tuple[int, int]:
        """How many are connected, of how many; nobody, while the server does not answer."""
        with contextlib.suppress(InvalidState):
            return self.server.online()
        return 0, 0

    def _start_run(self, rounds: int, *, resume: bool) -> str:
        config = f"rounds={rounds} resume={'true' if resume else 'false'}"
        found = detail_of(
            self._flower("run", str(self.server.app), CONNECTION, "-c", config, "--format", "json").encode()
        )
        if not found.get("success") or "run-id" not in found:
            raise InvalidState(
                f"Flower did not start the run: {found.get('error-message', found)}", "a run", "See above."
            )
        return str(found["run-id"])

    def _flower(self, *words: str) -> str:
        """What Flower's own command says."""
        done = subprocess.run(
            [tool("flwr"), *words],
            env=os.environ | self.server.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout or done.stderr

    def _watch(self, run: str) -> str | None:
        """Tell what happens until a run has ended; returns why, where that was not its end."""
        shown, silent = len(self.server.rounds_done()), time.monotonic()
        events = self._events()
        while True:
            ended: dict[str, Any] | None = None
            try:
                found = {one["run"]: one for one in self.server.ask("runs")["runs"]}
                silent = time.monotonic()
                ended = found[run] if run in found and found[run]["state"] == "finished" else None
            except InvalidState as error:
                if time.monotonic() - silent > STEADY:
                    return str(error)
            for event in events:
                if event is None:
                    break
                self.say(event)
            done = self.server.rounds_done()
            for number, answers in done[shown:]:
                self.on_round(number, answers)
            shown = max(shown, len(done))
            if ended is not None:
                return None if ended["end"] == "completed" else f"{ended['end']}: {ended['details']}"
            time.sleep(1.0)

    def _events(self) -> Iterator[str | None]:
        """Who joined and who was left out, as the run logs it; None when there is no more for now."""
        path = self.server.run / LOG
        place = path.stat().st_size if path.exists() else 0
        while True:
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(place)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place += len(line)
                    text = line.decode(errors="replace").rstrip()
                    if any(words in text for words in WORTH_TELLING):
                        yield str(detail_of(line).get("message") or text.split(" ", 3)[-1])
            yield None
