"""Devices for a day of churn: many light ones in one process, or a real one with its two processes.

    python -m tests.flower.herd node FOLDER      # `fairfold node start FOLDER`, with a clock that can be set
    python -m tests.flower.herd many             # takes lines on its input: {"node": FOLDER, "do": "start"}

Both run the product's own loop (``fairfold.flower.fleet.node_loop``) against a real server over TLS. A light device is
a thread of it whose worker (``fairfold.flower.fleet.worker``) is in the same process, so that dozens fit on one
machine. What is not real: heartbeats come every 10 s (Flower's least) in the place of 30, the longest pause is 10 s, a
device's clock is off by the seconds in its file ``clock``, and the disk of a light device is full where it has a file
``full``.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from fairfold import atomic_io as files
from fairfold.flower.fleet import connection, node_loop
from fairfold.flower.fleet.node import NodeFolder

HEARTBEAT_SECONDS, MAX_RETRY_SECONDS, BUSY_POLL_SECONDS = 10.0, 10.0, 1.0
CLOCK, FULL = "clock", "full"
mine = threading.local()  # the folder of the device whose thread this is


class SetClock(datetime):
    """A clock that is off by what the device's folder says."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "SetClock":
        """By this device's clock."""
        path = mine.folder / CLOCK
        off = float(path.read_text() or 0) if path.exists() else 0.0
        return super().now(tz) + timedelta(seconds=off)


class FullDisk(files.Disk):
    """No room where a device's disk is full."""

    def write(self, descriptor: int, piece: memoryview) -> int:
        """As the system does where there is no room."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any((folder / FULL).exists() for folder in path.parents):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, piece)


def compress() -> None:
    """Less waiting than a day has."""
    connection.HEARTBEAT_SECONDS = HEARTBEAT_SECONDS
    node_loop.MAX_RETRY_SECONDS = MAX_RETRY_SECONDS
    node_loop.MAX_TRANSIENT_RETRY_SECONDS = MAX_RETRY_SECONDS
    node_loop.BUSY_POLL_SECONDS = BUSY_POLL_SECONDS
    connection.datetime = SetClock  # type: ignore[attr-defined]


class Died(BaseException):
    """As if the power had gone: nobody says goodbye."""


class LightWorker:
    """A worker in this process."""

    def __init__(self, folder: Path) -> None:
        from fairfold.flower.fleet.worker import Worker

        self._worker = Worker(NodeFolder.open(folder))
        self._worker._run_app = self._dying(self._worker._run_app)  # type: ignore[method-assign]
        self._events: list[dict[str, Any]] = []
        self.message: bytes | None = None
        self.deadline, self.last_used = float("inf"), 0.0

    @staticmethod
    def _dying(reply: Any) -> Any:
        """It may die when it has trained and written that down, and not yet sent it."""

        def replied(message: Any) -> Any:
            found = reply(message)
            mine.device.live()
            return found

        return replied

    def submit(self, message: bytes) -> None:
        """Do it at once."""
        try:
            self._worker.reply(message, self)  # type: ignore[arg-type]
        except Exception as error:  # as the worker's own loop has it
            self._events.append({"done": True, "problem": f"no reply: {type(error).__name__}: {error}"[:300]})
        self.message, self.last_used = message, time.monotonic()

    def write(self, **event: Any) -> None:
        """Note an event of the worker."""
        self._events.append(event)

    def poll(self, _seconds: float) -> list[dict[str, Any]]:
        """All events so far."""
        events, self._events, self.message = self._events, [], None
        return events

    def end(self) -> None:
        """Nothing to end."""


class LightNodeLoop(node_loop.NodeLoop):
    """A device that can be made to die."""

    doomed = False

    def live(self) -> None:
        """Unless it is to die now."""
        if self.doomed:
            raise Died

    def _end_idle_worker(self) -> None:
        self.live()
        super()._end_idle_worker()

    def _leave(self, connected: connection.NodeConnection) -> None:
        if not self.doomed:
            super()._leave(connected)
        else:
            connected.close()


def log(words: str) -> None:
    """Into what becomes the log of all."""
    sys.stderr.write(words + "\n")


def many() -> None:
    """Light devices of a plan."""
    node_loop.WorkerProcess = LightWorker  # type: ignore[assignment,misc]
    files.disk = FullDisk()
    living: dict[str, tuple[threading.Thread, LightNodeLoop]] = {}

    def live(device: LightNodeLoop) -> None:
        mine.folder, mine.device = device.node.folder, device
        with contextlib.suppress(Died):
            device.run()

    for line in sys.stdin:
        command = json.loads(line)
        name = command["node"]
        if command["do"] == "start" and not (name in living and living[name][0].is_alive()):
            device = LightNodeLoop(NodeFolder.open(Path(name)), lambda words: log(f"{mine.folder.name}: {words}"))
            thread = threading.Thread(target=live, args=(device,), daemon=True)
            living[name] = thread, device
            thread.start()
        elif command["do"] == "die" and name in living:
            living[name][1].doomed = True
    os._exit(0)


def main() -> None:
    """One real device, or many light ones."""
    compress()
    if sys.argv[1] == "many":
        many()
    else:
        mine.folder = Path(sys.argv[2]).absolute()
        sys.argv = sys.argv[1:]
        node_loop.main()


if __name__ == "__main__":
    main()
