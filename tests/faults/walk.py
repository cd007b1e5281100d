"""Every point at which a program can be killed, be refused or lose power, one after another.

    python tests/faults/walk.py                    # everything; builds shim.c and starts itself anew with it preloaded
    python tests/faults/walk.py server --every 7   # one kind of folder, one point in seven
    python tests/faults/walk.py device:5 paper:9   # two kinds, so many of each
    python tests/faults/walk.py --part 3/8         # an eighth of everything; the eight together are the whole

Kills, torn writes and refusals happen to the real program, forked from this process, in which everything is imported
and warm. What a power loss leaves is worked out from one trace of the program (``disk.py``) and laid out for the same
check: is all there that was promised, and does the run resume to the right end?
"""

import argparse
import ctypes
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path


def preloaded() -> None:
    """Start this program anew with the shim in it, where it is not yet."""
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("no C compiler to build the shim with")
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "shim.so"
        source = Path(__file__).with_name("shim.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
        # One thread: a process with threads of its own cannot be forked.
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


if __name__ == "__main__":
    preloaded()  # before anything heavy is imported

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a program as well

from fairfold.errors import FairfoldError
from tests.faults import disk
from tests.faults.kinds import (
    BROKEN,
    BROKEN_FROM_HERE,
    FULL_FROM_HERE,
    KILL,
    KINDS,
    NO_ROOM,
    NOTHING,
    TEAR,
    Kind,
    Shim,
    files_in_memory,
)

REFUSALS = {
    "no room once": NO_ROOM, "no room from here on": FULL_FROM_HERE,
    "broken once": BROKEN, "broken from here on": BROKEN_FROM_HERE,
}  # fmt: skip
ENDED, REFUSED, FAILED = 0, 3, 4


@dataclass
class Walk:
    """Counts what was tried with one kind of folder, and keeps what failed."""

    name: str
    kind: Kind
    shim: Shim
    tried: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def _check(self, way: str, point: object, folder: Path, promised: list[str]) -> None:
        self.tried[way] += 1
        try:
            self.kind.check(folder, promised)
        except Exception as error:
            self._failed(way, point, "".join(traceback.format_exception(error)[-2:]))

    def _failed(self, way: str, point: object, why: str) -> None:
        self.failures.append(f"{self.name}, {way} at {point}: {why.strip()}")
        sys.stderr.write(self.failures[-1] + "\n")

    def _child(self, folder: Path, arm: Callable[[], None]) -> tuple[int, list[str], str]:
        """Run the program in a child; its status (negative for a signal), what it promised, its traceback."""
        output, traceback_file = folder.with_name("output"), folder.with_name("traceback")
        child = os.fork()
        if not child:
            status = FAILED
            try:
                promises = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                arm()
                self.kind.work(folder, lambda text: _promised(promises, text))
                status = ENDED
            except FairfoldError as error:
                status = REFUSED if len(str(error)) > 20 else FAILED
            except BaseException as error:
                self.shim.disarm()
                traceback_file.write_text("".join(traceback.format_exception(error)[-3:]))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        promised = output.read_text().splitlines() if output.exists() else []
        return (
            os.waitstatus_to_exitcode(status),
            promised,
            traceback_file.read_text() if traceback_file.exists() else "",
        )

    def traced(self) -> list[disk.Call]:
        """The calls of one whole run, and the promises between them."""
        with files_in_memory() as place:
            folder, path = place / "folder", place / "trace"
            folder.mkdir()
            trace = os.open(path, os.O_WRONLY | os.O_CREAT)
            self.shim.arm(folder, NOTHING, 0, trace)
            try:
                self.kind.work(folder, lambda text: self.shim.mark(text.encode()))
            finally:
                self.shim.disarm()
            os.close(trace)
            return disk.read_trace(path, folder)

    def real(self, way: str, mode: int, points: list[int], *, watched: bool = False) -> None:
        """The real program, killed or refused at some calls."""
        for at in points:
            with files_in_memory() as place:
                folder = place / "folder"
                folder.mkdir()
                below = folder / self.kind.watched if watched else folder
                status, promised, message = self._child(folder, partial(self._arm, below, mode, at))
                if mode in (KILL, TEAR):
                    ended = status == -signal.SIGKILL
                else:
                    ended = status in (ENDED, REFUSED)
                if not ended:
                    self._failed(way, at, f"ended with {status}: {message}")
                self._check(way, at, folder, promised)

    def _arm(self, below: Path, mode: int, at: int) -> None:
        below.mkdir(exist_ok=True)
        self.shim.arm(below, mode, at)

    def at_random(self, times: int, chance: random.Random) -> None:
        """Killed by the system's clock at moments of chance."""
        longest, kills = 10.0, 0
        with files_in_memory() as place:
            (place / "folder").mkdir()
            began = time.monotonic()
            self._child(place / "folder", lambda: None)
            longest = time.monotonic() - began
        while kills < times:
            with files_in_memory() as place:
                folder, moment = place / "folder", chance.uniform(1e-4, longest)
                folder.mkdir()
                status, promised, message = self._child(folder, partial(_set_clock, moment))
                if status == -signal.SIGALRM:
                    kills += 1
                    self._check("killed at random", f"{moment:.4f} s", folder, promised)
                elif status == ENDED:
                    longest = max(moment, longest / 2)  # it was over before its moment came
                else:
                    self._failed("killed at random", moment, f"ended with {status}: {message}")

    def modelled(self, calls: list[disk.Call], every: int, losses: int, first: int, chance: random.Random) -> None:
        """What is there after a kill, and after power losses, before each call of a trace; equal states once."""
        model, promised, seen, number = disk.Disk(), list[str](), set[tuple[bytes, int]](), 0
        for place, call in enumerate([*calls, None]):
            if call is None or call.kind != disk.MARK:
                number += 1
                if number % every == first or call is None:
                    states = [("killed (from the trace)", model.killed())]
                    if call is not None and call.kind == disk.WRITE and len(call.data) > 1:
                        half = disk.Disk()
                        for done in disk.torn(calls, place):
                            half.follow(done)
                        states.append(("torn (from the trace)", half.killed()))
                    for how in disk.LOSSES:
                        for _ in range(losses if how == "some lost" else 1):
                            states.append((f"power lost, {how}", model.lost_power(how, chance)))
                    for way, tree in states:
                        known = (disk.fingerprint(tree), len(promised))
                        self.tried[f"{way}: points"] += 1
                        if known not in seen:
                            seen.add(known)
                            with files_in_memory() as folder:
                                disk.lay_out(tree, folder)
                                self._check(way, f"call {number} ({call})", folder, list(promised))
            if call is not None:
                model.follow(call)
                if call.kind == disk.MARK:
                    promised.append(call.first)


def _set_clock(moment: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, moment)


def _promised(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())


def walk(name: str, every: int, losses: int, kills: int, seed: int, part: tuple[int, int] | None = None) -> Walk:
    """All of it for one kind; ``every`` leaves out points, ``losses`` are random power losses per point.

    ``part`` (k, n) is the k-th of n parts, which together are the whole: no way is left out at any of its points.
    """
    kind, shim = KINDS[name](), Shim()
    kind.prepare()
    found = Walk(name, kind, shim)
    chance = random.Random(f"{name} {seed}" if part is None else f"{name} {seed} {part}")
    calls = found.traced()
    counted = [call for call in calls if call.kind != disk.MARK]
    first = seed % every
    if part is not None:
        first, every = part[0] % part[1], part[1]
        kills = len(range(first, kills, every))
    points = [at for at in range(1, len(counted) + 1) if at % every == first]
    found.real("killed", KILL, points)
    writes = [at for at in range(1, len(counted) + 1) if counted[at - 1].kind == disk.WRITE]
    found.real("torn", TEAR, writes[first if part else first % len(writes) :: every])
    mine = sum(call.first.split("/")[0] == kind.watched for call in counted) if kind.watched else len(counted)
    some = [at for at in range(1, mine + 1) if at % every == first]
    for turn, (way, mode) in enumerate(REFUSALS.items()):
        found.real(way, mode, some if every == 1 or part else some[turn % 4 :: 4], watched=True)
    found.modelled(calls, every, losses, first, chance)
    found.at_random(kills, chance)
    found.tried["calls of the program"] = len(counted)
    return found


def _part(text: str) -> tuple[int, int]:
    """``3/8`` as (3, 8)."""
    which, of = (int(number) for number in text.split("/"))
    if not 1 <= which <= of:
        raise ValueError(text)
    return which, of


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}; all")
    parser.add_argument("--every", type=int, default=1, help="take one point in so many")
    parser.add_argument("--losses", type=int, default=3, help="random power losses per point")
    parser.add_argument("--kills", type=int, default=200, help="kills at random moments, per kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", metavar="K/N", type=_part, help="the K-th of N parts, which together are the whole")
    given = parser.parse_args()
    logging.getLogger("fairfold").propagate = False
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    total: Counter[str] = Counter()
    failed = 0
    for name in given.kinds:
        began = time.monotonic()
        name, _, every = name.partition(":")
        found = walk(name, int(every or given.every), given.losses, given.kills, given.seed, given.part)
        failed += len(found.failures)
        total += found.tried
        seconds = time.monotonic() - began
        report = {"kind": name, "failed": len(found.failures), "seconds": round(seconds, 1), "tried": found.tried}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"kind": "all", "failed": failed, "seed": given.seed, "tried": total}) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
