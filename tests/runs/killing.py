"""Kills runs, resumes them and compares the end with that of an unbroken run; run as a program by ``test_kill``.

One process imports everything once and forks for every run that is to die, so that a kill costs milliseconds.
"""

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fairfold import atomic_io as files
from fairfold.errors import InvalidSettings
from fairfold.federation.simulation import simulate
from fairfold.runs.train import run
from tests.support.runs import assert_same_end, small

SETTINGS = small(faults={"drop": 0.2})


class Killer(files.Disk):
    """Dies by SIGKILL just before the n-th call that reaches the disk, or in the middle of the n-th write."""

    def __init__(self, at: int, halfway: bool = False) -> None:
        self.left, self.halfway = at, halfway

    def _count(self, writing: bool = False) -> bool:
        self.left -= writing or not self.halfway
        return self.left == 0

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        if self._count():
            self._die()
        return super().create(path)

    def write(self, descriptor: int, piece: memoryview) -> int:
        if self._count(writing=True):
            if self.halfway:
                super().write(descriptor, piece[: len(piece) // 2])
            self._die()
        return super().write(descriptor, piece)

    def fsync(self, descriptor: int) -> None:
        if self._count():
            self._die()
        super().fsync(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        if self._count():
            self._die()
        super().replace(old, new)

    def remove(self, path: Path) -> None:
        if self._count():
            self._die()
        super().remove(path)


def dies(work: Callable[[], object], after: float | None = None) -> bool:
    """Whether work in a process of its own is killed: by itself, or by the system's clock after some seconds.

    The clock's signal is left to the system, which ends the process as ``kill -9`` does: no code of ours runs.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            if after is not None:
                signal.setitimer(signal.ITIMER_REAL, after)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM)
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def rounds_done(out: Path) -> int:
    metrics = out / "metrics.csv"
    return max(metrics.read_bytes().count(b"\n") - 1, 0) if metrics.exists() else 0


def resume_and_compare(out: Path) -> None:
    """Go on in this process, which must find at most one finished round missing from the checkpoint.

    Where not even the settings were written there is no run, and resuming it is refused.
    """
    done, begun = rounds_done(out), (out / "settings.toml").exists()
    messages: list[str] = []
    if not begun:
        try:
            run(SETTINGS, out, resume=True)
        except InvalidSettings:
            assert not done
        else:
            raise AssertionError("what is no run was resumed")
    finished = run(SETTINGS, out, resume=begun, checkpoint_every=1, echo=messages.append)
    assert not any("damaged" in message for message in messages), messages
    first = [int(message.split()[-1][:-1]) for message in messages if message.startswith("Resuming")]
    assert done - (first[0] if first else 0) <= 1, (messages, done)
    assert_same_end(finished.result, UNBROKEN)
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == [f"round-{number:08d}.{ending}" for number in (3, 4) for ending in ("json", "safetensors")], left
    assert not list(out.glob(".*"))


def kill_at_every_call(folder: Path, halfway: bool) -> int:
    """Kill at call 1, 2, …, until a run survives."""
    for at in range(1, 10_000):
        out = folder / f"{'half' if halfway else 'whole'}-{at}"

        def work(at: int = at, out: Path = out) -> None:
            files.disk = Killer(at, halfway)
            run(SETTINGS, out, checkpoint_every=1)

        if not dies(work):
            return at - 1
        if at % 5 == 0:  # killed once more, while going on

            def again(at: int = at, out: Path = out) -> None:
                files.disk = Killer(at // 5)
                run(SETTINGS, out, checkpoint_every=1, resume=(out / "settings.toml").exists(), echo=lambda _: None)

            dies(again)
        resume_and_compare(out)
    raise AssertionError("a run that never ends")


def kill_at_random(folder: Path, times: int) -> int:
    """Kill at moments of chance; a run that ended before its moment came narrows the choice of the next one."""
    started = time.monotonic()
    assert not dies(lambda: run(SETTINGS, folder / "timed", checkpoint_every=1))
    longest = time.monotonic() - started
    source, kills = random.Random(5), 0
    for number in range(10 * times):
        if kills == times:
            break
        out = folder / f"random-{number}"
        moment = source.uniform(1e-4, longest)
        if dies(lambda out=out: run(SETTINGS, out, checkpoint_every=1), moment):  # type: ignore[misc]
            kills += 1
        else:
            longest = moment
        resume_and_compare(out)
    return kills


if __name__ == "__main__":
    place, times = Path(sys.argv[1]), int(sys.argv[2])
    logging.getLogger("fairfold").propagate = False
    UNBROKEN = simulate(SETTINGS)
    report = {
        "before": kill_at_every_call(place, halfway=False),
        "within": kill_at_every_call(place, halfway=True),
        "random": kill_at_random(place, times),
    }
    sys.stdout.write(json.dumps(report) + "\n")
