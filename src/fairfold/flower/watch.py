"""The one long-lived process of a device: ``python -m fairfold.flower.watch FOLDER``.

It keeps the line to the server (:mod:`.link`) and starts a worker (:mod:`.worker`) when there is a message. Neither
torch nor Flower is imported here, and the worker goes when nothing was asked for a while: an idle device is light.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidState
from fairfold.files import locked, remove, write_atomically
from fairfold.flower.link import Link, Refused, detail_of, read_key
from fairfold.flower.node import STATUS, NodeFolder

WORK, REFUSE = 0, 1  # what a worker is to do with a message
EAGER, IDLE = 0.5, 3.0  # seconds between two questions for work, after some work and otherwise
LINGER = 60.0  # seconds after its last message that a worker is kept
LONGEST_PAUSE = 300.0
GRACE = 60.0  # seconds beyond a message's own time after which a worker that has not answered is ended
PATIENT = ("early", "unreachable", "busy", "broken", "lost")  # what passes by itself, so that it is tried more often
OPEN = "open"  # file of the message that is worked on: whoever finds one when it starts was ended meanwhile
Say = Callable[[str], None]


class Hand:
    """A worker process, which is given one message at a time."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "fairfold.flower.worker", str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._said = b""
        self.message: bytes | None = None  # what it works on
        self.until = float("inf")  # when nobody waits for the answer any more
        self.kind = WORK
        self.used = time.monotonic()

    def give(self, message: bytes, kind: int = WORK) -> None:
        """Hand a message over."""
        self.message, self.kind, self.until = message, kind, float("inf")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(bytes([kind]) + len(message).to_bytes(4, "big") + message)

    def hear(self, seconds: float) -> list[dict[str, Any]]:
        """What it says within some time; its end is a ``died``."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        if not select.select([stream], [], [], seconds)[0]:
            return []
        part = os.read(stream, 1 << 16)
        if not part:
            return [{"died": self._process.wait()}]
        *lines, self._said = (self._said + part).split(b"\n")
        found = [detail_of(line) for line in lines]
        for facts in found:
            self.until = float(facts.get("until", self.until))
            if facts.get("done"):
                self.message, self.used = None, time.monotonic()
        return found

    def end(self) -> None:
        """End it."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()  # it ends by itself when nobody is there to give it work
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@dataclass
class Watch:
    """One device: comes in, stays, works, and comes back after whatever goes wrong."""

    node: NodeFolder
    say: Say
    hand: Hand | None = None
    told: dict[str, Any] = field(default_factory=lambda: {"answers": 0, "failures": 0, "pid": os.getpid()})
    worked: float = -LINGER  # when there was work last
    number: int | None = None  # of this node, while the server holds its connection
    tries: int = 0  # in vain, since the server last answered as it should

    def run(self) -> None:
        """Until it is interrupted."""
        try:
            with locked(self.node.folder, wait=False):
                link = Link(self.node.server, self.node.authority, read_key(self.node.key))
                try:
                    self._serve(link)
                finally:
                    self._leave(link)
        except BlockingIOError:
            given = f"{self.node.folder}, whose device is running"
            raise InvalidState(given, "one process for a device", "See `fairfold node status`.") from None

    def _serve(self, link: Link) -> None:
        while True:
            try:
                if self.number is None:
                    self.number = link.activate()
                    self._note("connected", f"connected to {self.node.server} as node {self.number}")
                self._stay(link, self.number)
            except Refused as refused:
                if refused.kind not in ("unreachable", "busy", "broken"):
                    self.number = None  # it has to come in again
                most = LONGEST_PAUSE if refused.kind not in PATIENT else 20.0
                pause = min(2.0**self.tries, most) * random.uniform(0.8, 1.2)
                self.tries = min(self.tries + 1, 10)
                self._note("waiting" if refused.kind in PATIENT else "refused", str(refused), reason=refused.kind)
                time.sleep(pause)

    def _stay(self, link: Link, number: int) -> None:
        """Ask for work, and say that this device is there, until something goes wrong."""
        beat = 0.0
        while True:
            if time.monotonic() >= beat:
                if not link.beat(number):
                    raise Refused("lost", "the server does not hold this connection any more")
                beat, self.tries = time.monotonic() + link.heartbeat * random.uniform(0.6, 0.8), 0
                if self.told.get("state") in ("waiting", "refused"):
                    self._note("connected", "connected again")
            self._look_after()
            if self.hand is not None and self.hand.message is not None:
                self._hear(self.hand, 1.0)
            elif self.open.exists() and self._take_up():  # of a process of this device that is no more
                self._note("connected", "ended at work: the server is told, and need not wait", failures=1)
            elif (message := link.pull(number)) is not None:
                with contextlib.suppress(Exception):  # a full disk is no reason not to work
                    write_atomically(self.open, message)
                self._give(message, WORK)
            else:
                waits = max(IDLE, link.pause * random.uniform(0.8, 1.2))
                time.sleep(EAGER if time.monotonic() - self.worked < LINGER else waits)

    @property
    def open(self) -> Path:
        """Where the message is that is worked on."""
        return self.node.folder / OPEN

    def _give(self, message: bytes, kind: int) -> None:
        self.hand = self.hand or Hand(self.node.folder)
        self.hand.give(message, kind)
        self.worked = time.monotonic()

    def _take_up(self) -> bool:
        """Answer what was worked on when this device was ended, with an error, so that the server need not wait."""
        with contextlib.suppress(Exception):
            message = self.open.read_bytes()
            remove(self.open)  # once: a message that ends a device must not do so for ever
            self._give(message, REFUSE)
            return True
        return False

    def _look_after(self) -> None:
        """End a worker that has nothing to do, or that hangs."""
        hand = self.hand
        if hand is None:
            return
        if hand.message is None and time.monotonic() - hand.used > LINGER:
            self.hand = None
            hand.end()
        elif hand.message is not None and time.time() > hand.until + GRACE:
            self._note("connected", "a message was not answered in its time: the worker is ended", failures=1)
            self.hand = None
            self._close()
            hand.end()

    def _hear(self, hand: Hand, seconds: float) -> None:
        for facts in hand.hear(seconds):
            if "until" in facts:
                round_number = f" of round {facts['round']}" if facts.get("round") else ""
                self._note("working", f"works on {facts.get('kind')}{round_number}")
            elif "died" in facts:
                self._bury(hand, facts["died"])
            elif facts.get("done"):
                self._close()
                self.worked = time.monotonic()
                last = {key: facts.get(key) for key in ("seconds", "peak")} | {"at": time.time()}
                problem = str(facts.get("problem") or "")
                self._note("connected", problem or "answered", last=last, **{"failures" if problem else "answers": 1})

    def _bury(self, hand: Hand, status: int) -> None:
        """A worker has died; if it was at work, the server is told, so that it need not wait."""
        message, again = hand.message, hand.kind == WORK
        hand.end()
        self.hand = None
        self._close()
        self._note("connected", f"the worker died (status {status})", failures=1)
        if message is not None and again:
            self._give(message, REFUSE)

    def _close(self) -> None:
        """A message is done with."""
        with contextlib.suppress(Exception):
            remove(self.open)

    def _leave(self, link: Link) -> None:
        """Say goodbye, so that the next one need not wait until this one counts as gone."""
        if self.hand is not None:
            self.hand.end()
        if self.number is not None:
            with contextlib.suppress(Refused):
                link.deactivate(self.number)
        link.close()
        self._note("stopped", "stopped")

    def _note(self, state: str, words: str, *, answers: int = 0, failures: int = 0, **more: Any) -> None:
        """Write down how it is, and say it where it is new."""
        if (state, words) != (self.told.get("state"), self.told.get("words")):
            self.say(words)
            self.told |= {"state": state, "words": words, "since": time.time()}
        self.told["answers"] += answers
        self.told["failures"] += failures
        if failures:
            self.told["failure"] = {"words": words[:500], "at": time.time()}
        self.told |= more | ({} if self.number is None else {"node": str(self.number)})
        with contextlib.suppress(Exception):  # a full disk is no reason to go
            write_atomically(self.node.folder / STATUS, json.dumps(self.told).encode())


def main() -> None:
    """Be the device of a folder until the process is asked to end."""

    def end(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending: to be told so again would keep it from saying goodbye
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            Watch(NodeFolder.open(Path(sys.argv[1])), lambda words: print(words, file=sys.stderr, flush=True)).run()  # noqa: T201
    except InvalidState as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
