"""A day of churn, compressed: real server, real protocol, devices that come and go in every way, the server killed.

    python -m tests.flower.churn DAY --minutes 50 --real 3 --steady 2 --light 12 --kills 20 --calm 0.4

A day of events is drawn from a seed and squeezed into the minutes given: devices enrol, die (some between training and
sending), stop in good order, come back, change size, have full disks and wrong clocks; the server is killed: all of its
programs, its SuperLink, or the run's own, and the command that trains with them. Who supervises (systemd, by the
units in ``deploy/``) is stood in for by :class:`Supervisor`, which starts again what has ended; nobody does more.
Steady devices neither die nor stop, and in the calm end of the day the server is not killed: so there are processes
that live long, whose memory is to stay as it is. When the day is over training is stopped in good order, and gone on
with for its last rounds.

Compressed are the times between events, deadlines (a round has 15 s), heartbeats and pauses (:mod:`.herd`). Rounds,
TLS, checkpoints and restarts take the time that they take, so there are fewer rounds between two events than in a day.

At the end :func:`evaluate` compares what was left behind with what is promised.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch

from fairfold.device.store import load_device_id
from fairfold.errors import CannotWrite, InvalidState
from fairfold.flower.client_store import ClientStore
from fairfold.flower.fleet.local_fleet import LocalFleet, make_local_fleet
from fairfold.flower.fleet.node import NodeFolder
from fairfold.flower.fleet.processes import Program, descendants, stop_on_exit
from fairfold.flower.persistence import NetworkState
from fairfold.runs import checkpoint
from fairfold.runs.events import ROUND, read_events
from tests.flower.herd import CLOCK, FULL
from tests.flower.test_kills import summed_words
from tests.support.settings import make_settings

DAY = 24 * 60.0  # minutes
SIZES = ["1x", "2x", "4x"]
CLOCKS = [7200.0, -7200.0, 60.0, -50 * 365 * 86400.0]
ROUND_SECONDS = 15.0
ENDLESS, LAST_UPDATE = 100_000, 2  # rounds: more than a day has, and those that end the run
LOAD_SECONDS = 60.0  # seconds after which a program has loaded what it needs
FLAT_SHARE, FLAT_MB = 0.02, 2.0  # what memory may grow by and be called flat, of itself and beside that


@dataclass
class Device:
    """One device, as the day sees it."""

    number: int
    folder: Path
    real: bool
    enrolled: bool = False
    program: Program | None = None

    @property
    def alive(self) -> bool:
        """Whether a real one runs."""
        return self.program is not None and self.program.status() is None


@dataclass
class Supervisor:
    """Starts again what has ended, as a unit with ``Restart=`` does; ``restarts`` counts why."""

    start: Callable[[], Program]
    program: Program | None = None
    done: Callable[[], bool] = lambda: False
    restarts: int = 0
    asked_for: int = 0  # of these, after it was killed
    words: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Start it, if it should run and does not."""
        if self.program is None:
            self.program = self.start()
        elif self.program.status() is not None and not self.done():
            self.restarts += 1
            if self.program.status() != -signal.SIGKILL:
                self.words.append(self.program.tail(3)[-400:])
            self.program = self.start()

    def kill(self) -> None:
        """As a loss of power would."""
        if self.program is not None:
            self.asked_for += 1
            self.program.kill()


@dataclass
class Day:
    """One run of it."""

    local_fleet: LocalFleet
    minutes: float
    real: int
    steady: int  # of the real ones, those that neither die nor stop
    kills: int
    calm: float  # of the day, at its end, in which the server is not killed
    dice: random.Random
    rounds: int = ENDLESS
    devices: list[Device] = field(default_factory=list)
    herd: subprocess.Popen[str] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    memory: list[tuple[float, str, int, int]] = field(default_factory=list)  # when, what, its pid, kB
    disk: list[tuple[float, int, int]] = field(default_factory=list)  # when, bytes of state.db, of nodes.jsonl
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # rounds before a kill, and after

    # -- what happens --------------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[float, str, int]]:
        """What happens, when (in minutes of the day), and to whom."""
        dice, found = self.dice, list[tuple[float, str, int]]()
        for device in range(len(self.local_fleet.capacities)):
            early = device < self.real or device % 2
            born = 0.0 if early else dice.uniform(0, 0.7 * DAY)
            found.append((born, "join", device))
            for what, often, shortest, longest in (
                ("die", 4, 10, 90), ("stop", 2, 10, 90), ("size", 1, 5, 20), ("disk", 1, 60, 120), ("clock", 1, 30, 90),
            ):  # fmt: skip
                for _ in range(0 if device < self.steady and what in ("die", "stop", "size") else often):
                    when = dice.uniform(born + 30, DAY - 100)
                    found += [(when, what, device), (when + dice.uniform(shortest, longest), f"end of {what}", device)]
        for kill in range(self.kills):  # one per so many minutes, at a random moment, none in the calm end
            span = (1 - self.calm) * DAY / self.kills
            found.append((kill * span + dice.uniform(0.2, 1.0) * span, "kill", kill))
        return sorted(found)

    def carry_out(self, what: str, number: int, server: Supervisor, training: Supervisor) -> None:
        """One event."""
        if what == "kill":
            self.kill_server(number, server, training)
            return
        device = self.devices[number]
        if what == "join":
            self.local_fleet.enrol(device.number)  # what breaks off is taken up again
            device.enrolled = True
        if not device.enrolled:
            return
        self.counts[what] = self.counts.get(what, 0) + 1
        if what in ("die", "stop", "size"):
            self.end(device, good=what == "stop")
        if what == "size":
            node = NodeFolder.open(device.folder)
            with contextlib.suppress(CannotWrite):  # its disk may be full
                replace(node, capacity=self.dice.choice([size for size in SIZES if size != node.capacity])).save()
        elif what == "disk":
            self.fill(device)
        elif what == "clock":
            (device.folder / CLOCK).write_text(str(self.dice.choice(CLOCKS)))
        elif what == "end of disk":
            for name in (FULL, "filler"):
                (device.folder / name).unlink(missing_ok=True)
        elif what == "end of clock":
            (device.folder / CLOCK).unlink(missing_ok=True)
        elif what in ("join", "end of die", "end of stop", "end of size"):
            self.begin(device)

    def begin(self, device: Device) -> None:
        """Start a device, unless it runs."""
        if not device.real:
            self.tell(device, "start")
        elif not device.alive:
            command = [sys.executable, "-m", "tests.flower.herd", "node", str(device.folder)]
            log = self.local_fleet.folder / "logs" / f"node-{device.number}.log"
            device.program = Program(f"node-{device.number}", command, log, self.local_fleet.environment)
            self.local_fleet.programs.append(device.program)

    def end(self, device: Device, *, good: bool) -> None:
        """End a device: it says goodbye, or dies; light ones only die."""
        if not device.real:
            self.tell(device, "die")
        elif device.program is not None and good:
            device.program.terminate()
        elif device.program is not None:
            device.program.kill()

    def tell(self, device: Device, what: str) -> None:
        """Send an order to the process of the light ones."""
        assert self.herd is not None
        assert self.herd.stdin is not None
        self.herd.stdin.write(json.dumps({"node": str(device.folder), "do": what}) + "\n")
        self.herd.stdin.flush()

    def fill(self, device: Device) -> None:
        """No room on its disk: a file system of its own that is filled up, or what stands for that."""
        if not os.path.ismount(device.folder):
            (device.folder / FULL).touch()
            return
        with contextlib.suppress(OSError), (device.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def kill_server(self, number: int, server: Supervisor, training: Supervisor) -> None:
        """All of the server, its SuperLink or its run alone; and, now and then, the command that trains."""
        before = self.newest()
        kind = ("all", "SuperLink", "run")[number % 3]
        programs = self.programs(server)
        if kind == "all" or kind not in programs:
            kind = "all"
            server.kill()
            if number % 2 == 0:
                training.kill()
                self.counts["kill of training"] = self.counts.get("kill of training", 0) + 1
        else:
            os.kill(programs[kind], signal.SIGKILL)
        self.counts[f"kill of {kind}"] = self.counts.get(f"kill of {kind}", 0) + 1
        self.checkpoints.append((before, self.newest()))

    # -- what is seen --------------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """The round of the newest checkpoint; 0 before the first."""
        found = checkpoint.find_newest(self.local_fleet.run_folder / "checkpoints")[0]
        return 0 if found is None else found.progress.state.round_number

    def programs(self, server: Supervisor) -> dict[str, int]:
        """The server's processes by what they are."""
        found = dict[str, int]()
        if server.program is None or server.program.status() is not None:
            return found
        found["server start"] = server.program.pid
        for pid in descendants([server.program.pid]):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "fairfold.flower.fleet.superlink" in words:
                    found.setdefault("SuperLink", pid)
                elif "serverapp" in words:
                    found["run"] = pid
                elif "superexec" in words:
                    found["SuperExec"] = pid
        return found

    def sample(self, began: float, server: Supervisor) -> None:
        """Note how much memory the server and the devices that last take, and the server's disk."""
        now, found = time.monotonic() - began, self.programs(server)
        for device in self.devices[: self.steady]:
            if device.program is not None and device.alive:
                found[f"device {device.number}"] = device.program.pid
                for pid in descendants([device.program.pid]):
                    found[f"worker of device {device.number}"] = pid
        if self.herd is not None:
            found["light devices"] = self.herd.pid
        for what, pid in found.items():
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{pid}/status").read_text()
                self.memory.append((now, what, pid, int(status.split("VmRSS:")[1].split()[0])))
        database, events = self.local_fleet.server.folder / "state.db", self.local_fleet.run_folder / "nodes.jsonl"
        self.disk.append((now, database.stat().st_size, events.stat().st_size if events.exists() else 0))

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self, echo: Callable[[str], None]) -> None:
        """From the first device to the end of the run."""
        local_fleet = self.local_fleet
        server = Supervisor(lambda: local_fleet.start("server", "server", "start", str(local_fleet.server.folder)))
        training = Supervisor(
            lambda: local_fleet.start(
                "run", "server", "train", str(local_fleet.server.folder), "--rounds", str(self.rounds), "--resume",
                "--wait-for", "2", "--wait-timeout", "600",
            ),
            done=lambda: self.rounds < ENDLESS and (local_fleet.run_folder / "result.json").exists(),
        )  # fmt: skip
        command = [sys.executable, "-m", "tests.flower.herd", "many"]
        log = (local_fleet.folder / "logs" / "herd.log").open("ab")
        environment = os.environ | local_fleet.environment
        self.herd = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment, start_new_session=True
        )
        with log, stop_on_exit(local_fleet.programs):
            try:
                local_fleet.start_server()
                server.program = local_fleet.programs[-1]
                self._pass(server, training, echo)
            finally:
                self.herd.kill()
                self.herd.wait()
                if self.herd.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        self.herd.stdin.close()
        self.counts |= {
            "restarts of the server": server.restarts, "restarts of training": training.restarts,
            "of these after a kill": server.asked_for + training.asked_for,
        }  # fmt: skip
        self.gave_up = training.words

    def _pass(self, server: Supervisor, training: Supervisor, echo: Callable[[str], None]) -> None:
        waiting, began, looked, minute = self.events(), time.monotonic(), 0.0, 0
        limit = 60 * self.minutes + 1200.0
        while not training.done():
            now = time.monotonic() - began
            assert now < limit, f"{self.newest()} of {self.rounds} rounds after {now:.0f} s"
            while waiting and waiting[0][0] * self.minutes / DAY * 60 <= now:
                _, what, number = waiting[0]
                when = waiting.pop(0)[0]
                try:
                    self.carry_out(what, number, server, training)
                except InvalidState:  # the server is away just now: who enrols tries again
                    assert what == "join"
                    waiting.append((when + DAY / self.minutes / 12, what, number))
                    waiting.sort()
            if now > 60 * self.minutes and not waiting and self.rounds == ENDLESS:
                self.finish(training)
            server.look()
            if any(device.enrolled for device in self.devices):
                training.look()
            if now - looked > 2.0:
                looked = now
                self.sample(began, server)
                if now // 60 > minute:
                    minute = int(now // 60)
                    hours, minutes = divmod(int(minute * DAY / self.minutes), 60)
                    moment = f"{minute} min ({hours}:{minutes:02} of the day)"
                    echo(f"{moment}: round {self.newest()}, {json.dumps(self.counts)}")
            time.sleep(0.1)

    def finish(self, training: Supervisor) -> None:
        """Stop training in good order; it is then started for its last rounds."""
        assert training.program is not None
        training.program.terminate()
        assert training.program.wait(120.0) is not None, "training stops when it is asked to"
        self.rounds = self.newest() + LAST_UPDATE
        self.counts["training stopped in good order"] = 1
        training.program = None


def prepared(
    folder: Path, *, minutes: float, real: int, light: int, kills: int, steady: int = 0, calm: float = 0.1, seed: int
) -> Day:
    """A day that can begin."""
    many = real + light
    world = {"users": 3 * many, "items": 200, "interactions_per_user": 20}
    settings = make_settings(
        algorithm="co_occurrence", rounds=ENDLESS, evaluate_every=10**6, data=world, factors=4, tune=False
    )
    capacities = ",".join(SIZES[number % len(SIZES)] for number in range(many))
    local_fleet, data = make_local_fleet(settings, capacities, folder)
    local_fleet.settings = local_fleet.settings.with_changes({
        "fleet.clients_per_round": max(2, many // 2), "fleet.network.join_timeout": ROUND_SECONDS,
    })  # fmt: skip
    local_fleet.round_timeout, local_fleet.wait_for = ROUND_SECONDS, 1
    local_fleet.variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
    for number in range(real):  # a small file system each, where that is allowed
        place = local_fleet.node(number)
        place.mkdir(parents=True, mode=0o700)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "churn", place], capture_output=True, check=False
        )
    local_fleet.prepare(data)
    day = Day(local_fleet, minutes, real, steady, kills, calm, random.Random(seed))
    day.devices = [Device(number, local_fleet.node(number), number < real) for number in range(many)]
    return day


def cleared(day: Day) -> None:
    """Give back what was mounted."""
    for device in day.devices:
        if os.path.ismount(device.folder):
            kept = {
                path.relative_to(device.folder): path.read_bytes()
                for path in device.folder.rglob("*")
                if path.is_file()
            }
            subprocess.run(["umount", str(device.folder)], check=False)
            for name, content in kept.items():
                (device.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (device.folder / name).write_bytes(content)


# -- what was promised -------------------------------------------------------------------------------------------------


def evaluate(day: Day) -> dict[str, Any]:
    """What is left of a day against what is promised; an assertion where it does not hold."""
    run = day.local_fleet.run_folder
    done = day.local_fleet.server.completed_rounds()
    assert [number for number, _ in done] == list(range(1, day.rounds + 1)), "every round, each once"
    assert all(updates > 0 for _, updates in done), "no empty round counts"
    counted = [event for event in read_events(run) if event["event"] == ROUND and event["counted"]]
    assert [event["round"] for event in counted] == [number for number, _ in done]
    assert all(event["used"] for event in counted)
    empty = sum(event["event"] == ROUND and not event["counted"] for event in read_events(run))
    # The log is of all sittings: a round is done again only where it was the open one.
    completed = [int(found) for found in re.findall(r"round (\d+): \d+ updates used", (run / "run.log").read_text())]
    assert set(completed) == {number for number, _ in done}
    for before, after in pairwise(completed):
        assert after in (before, before + 1), f"round {after} after round {before}"
    for before, after in day.checkpoints:
        assert after >= before, "a kill costs no round that was written down"
    exact(day)
    left = [reason for event in counted for reason in event["left_out"].values()]
    return {
        "rounds": len(done), "updates": sum(updates for _, updates in done), "tried in vain": empty,
        "done again after a kill": len(completed) - len(done),
        "left out": {reason: left.count(reason) for reason in sorted(set(left))},
        "events": day.counts, "training gave up": day.gave_up, "memory": memory_report(day),
        "state.db, kB": [size // 1000 for _, size, _ in day.disk[:: max(1, len(day.disk) // 6)]],
        "nodes.jsonl, bytes per round": day.disk[-1][2] // len(done),
    }  # fmt: skip


def memory_report(day: Day) -> dict[str, Any]:
    """Of each program: how many there were, what they took early and late in the day, how the longest-lived one grew.

    Flat is who takes no more late in the day than early (each life once it has loaded), and whose longest life does
    not grow in its second half.
    """
    report = dict[str, Any]()
    for what in sorted({what for _, what, _, _ in day.memory}):
        lives = dict[int, list[tuple[float, float]]]()
        for when, of, pid, size in day.memory:
            if of == what:
                lives.setdefault(pid, []).append((when, size / 1000))
        loaded = [life for of in lives.values() if (life := [at for at in of if at[0] - of[0][0] >= LOAD_SECONDS])]
        report[what] = {"processes": len(lives), "peak MB": round(max(size for of in lives.values() for _, size in of))}
        if not loaded:
            continue
        each = [median(size for _, size in life) for life in loaded]
        early, late = median(each[: -(-len(each) // 2)]), median(each[len(each) // 2 :])
        longest = max(loaded, key=lambda life: life[-1][0] - life[0][0])
        half = longest[len(longest) // 2 :]
        slope = linear_regression(*zip(*half, strict=True)).slope if len(half) > 2 else 0.0
        grown, seconds = slope * (half[-1][0] - half[0][0]), longest[-1][0] - longest[0][0]
        bound = FLAT_SHARE * early + FLAT_MB
        report[what] |= {
            "lives that loaded": len(loaded), "early, MB": round(early, 1), "late, MB": round(late, 1),
            "longest life, s": round(seconds), "its middle, MB": round(half[0][1], 1),
            "its end, MB": round(half[-1][1], 1), "grown in its second half, MB": round(grown, 2),
            "flat": late - early <= bound and grown <= bound, "bound, MB": round(bound, 1),
        }  # fmt: skip
    return report


def exact(day: Day) -> None:
    """The server's sums are those of the words that it and its devices agree on, whatever happened to both."""
    state = checkpoint.load_newest(day.local_fleet.run_folder / "checkpoints").progress.state
    network_state = NetworkState(state)
    words = []
    for device in day.devices:
        home = device.folder / "state"
        if (
            (device.folder / NodeFolder.FILE).exists()
            and (home / "name").exists()
            and (name := load_device_id(home)) in network_state.acknowledged
        ):
            words.append(
                (
                    network_state.sizes[name],
                    ClientStore(home).load().reconcile(network_state.run, network_state.acknowledged[name]),
                )
            )
    assert len(words) == len(network_state.acknowledged), "the sums hold words of devices that are there"
    expected = summed_words(day.local_fleet.settings, network_state, words)
    for moment, sums in expected.items():
        for key, tensor in sums.items():
            torch.testing.assert_close(state.algorithm_state[moment][key].double(), tensor, rtol=1e-6, atol=1e-6)


def main() -> None:
    """A day, and what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0, help="in which the day passes")
    parser.add_argument("--real", type=int, default=3, help="devices with processes of their own")
    parser.add_argument("--steady", type=int, default=1, help="of these, devices that neither die nor stop")
    parser.add_argument("--light", type=int, default=24, help="devices that are threads")
    parser.add_argument("--kills", type=int, default=20, help="of the server")
    parser.add_argument("--calm", type=float, default=0.1, help="share of the day, at its end, without a kill")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    day = prepared(**vars(given))
    began = time.monotonic()
    try:
        day.run(lambda words: print(words, flush=True))  # noqa: T201
    finally:
        cleared(day)
    (given.folder / "memory.json").write_text(json.dumps(day.memory))
    report = evaluate(day) | {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "a day": f"24 hours of events in {given.minutes:g} minutes, {DAY / given.minutes:.0f} to 1",
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
