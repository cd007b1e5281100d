"""The long-lived process of a node: ``python -m fairfold.flower.fleet.node_loop FOLDER``.

It maintains the connection to the server (:mod:`.connection`) and replies to messages of the default algorithm itself
(:mod:`fairfold.device`). For others it starts a worker (:mod:`.worker`), which ends when it had none for a while.
Neither torch nor Flower is imported here: such a node needs little memory.
"""

import contextlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fairfold.atomic_io import locked, remove, write_atomically
from fairfold.checksums import PARSE_ERRORS
from fairfold.errors import InvalidState, printable
from fairfold.flower.fleet import Echo
from fairfold.flower.fleet.connection import NodeConnection, RefusedByServer, json_object, read_key, stream_roster
from fairfold.flower.fleet.node import STATUS, NodeFolder

DIED = "the device's program died while it worked on this"
BUSY_POLL_SECONDS, IDLE_POLL_SECONDS = 0.5, 3.0  # between two polls, after some work and otherwise
WORKER_IDLE_SECONDS = 60.0  # after its last message a worker is ended
MAX_RETRY_SECONDS, MAX_TRANSIENT_RETRY_SECONDS = 300.0, 20.0
REPLY_GRACE_SECONDS = 60.0  # beyond a message's deadline, after which a worker that has not replied is ended
TRANSIENT = ("early", "unreachable", "busy", "broken", "lost")  # refusals that pass by themselves
CONNECTED_STILL = ("unreachable", "busy", "broken")  # refusals after which the node need not be activated again
RETRY_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before a request of a reply that the network lost is sent again
OPEN_MESSAGE = "open"  # file of the message being worked on; found at the start, the process was killed meanwhile


class WorkerProcess:
    """A worker process, which works on one message at a time."""

    def __init__(self, folder: Path) -> None:
        command, pipe = [sys.executable, "-m", "fairfold.flower.fleet.worker", str(folder)], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True, bufsize=0)
        self._unread = b""
        self.message: bytes | None = None  # the one being worked on
        self.deadline = float("inf")  # until when the server waits for the reply
        self.last_used = time.monotonic()

    def submit(self, message: bytes) -> None:
        """Write a message to the worker's standard input."""
        self.message, self.deadline = message, float("inf")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(len(message).to_bytes(4, "big") + message)

    def poll(self, seconds: float) -> list[dict[str, Any]]:
        """The events that the worker writes within some time; its end is the event ``died``."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        if not select.select([stream], [], [], seconds)[0]:
            return []
        part = os.read(stream, 1 << 16)
        if not part:
            return [{"died": self._process.wait()}]
        *lines, self._unread = (self._unread + part).split(b"\n")
        events = [json_object(line) for line in lines]
        for event in events:
            self.deadline = float(event.get("deadline", self.deadline))
            if event.get("done"):
                self.message, self.last_used = None, time.monotonic()
        return events

    def end(self) -> None:
        """End the process: it ends by itself when its streams are closed, and is killed after five seconds."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def peak_memory() -> int:
    """The most bytes of memory that this process has held."""
    with contextlib.suppress(OSError, ValueError, StopIteration):  # the system's own count includes the parent's
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class NodeLoop:
    """Connects a node, sends heartbeats, polls for messages, and reconnects after failures."""

    node: NodeFolder
    echo: Echo
    worker: WorkerProcess | None = None
    status: dict[str, Any] = field(default_factory=lambda: {"replies": 0, "failures": 0, "pid": os.getpid()})
    last_work: float = -WORKER_IDLE_SECONDS  # when there was a message last
    node_id: int | None = None  # while the server holds the connection
    retries: int = 0  # failed attempts since the server last accepted a request

    def __post_init__(self) -> None:
        self.open_message = self.node.folder / OPEN_MESSAGE
        self.is_small = not (self.node.app or self.node.model)  # custom apps and models are the worker's

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            with locked(self.node.folder, wait=False):
                connection = NodeConnection(self.node.server, self.node.authority, read_key(self.node.key))
                try:
                    self._serve(connection)
                finally:
                    self._leave(connection)
        except BlockingIOError:
            given = f"{self.node.folder}, whose device is running"
            raise InvalidState(given, "one process for a device", "See `fairfold node status`.") from None

    def _serve(self, connection: NodeConnection) -> None:
        while True:
            try:
                if self.node_id is None:
                    self.node_id = connection.activate()
                    self._report("connected", f"connected to {self.node.server} as node {self.node_id}")
                self._poll(connection, self.node_id)
            except RefusedByServer as refused:
                if refused.kind not in CONNECTED_STILL:
                    self.node_id = None
                passes = refused.kind in TRANSIENT
                longest = MAX_TRANSIENT_RETRY_SECONDS if passes else MAX_RETRY_SECONDS
                self._report("waiting" if passes else "refused", str(refused), reason=refused.kind)
                time.sleep(min(2.0**self.retries, longest) * random.uniform(0.8, 1.2))
                self.retries = min(self.retries + 1, 10)

    def _poll(self, connection: NodeConnection, node_id: int) -> None:
        """Send heartbeats and poll for messages until a request is refused."""
        next_heartbeat = 0.0
        while True:
            if time.monotonic() >= next_heartbeat:
                if not connection.send_heartbeat(node_id):
                    raise RefusedByServer("lost", "the server does not hold this connection any more")
                next_heartbeat = time.monotonic() + connection.heartbeat_interval * random.uniform(0.6, 0.8)
                self.retries = 0
                if self.status.get("state") in ("waiting", "refused"):
                    self._report("connected", "connected again")
            self._end_idle_worker()
            if self.worker is not None and self.worker.message is not None:
                self._handle_events(connection, self.worker, 1.0)
            elif self.open_message.exists() and self._refuse_interrupted(connection):
                self._report("connected", "ended at work: the server is notified, and need not wait", failures=1)
            elif (message := connection.pull(node_id)) is not None:
                with contextlib.suppress(Exception):  # a full disk is no reason not to work
                    write_atomically(self.open_message, message)
                if not (self.is_small and self._reply(connection, message)):
                    self._submit(message)
            else:
                idle = max(IDLE_POLL_SECONDS, connection.poll_interval * random.uniform(0.8, 1.2))
                worked_recently = time.monotonic() - self.last_work < WORKER_IDLE_SECONDS
                time.sleep(BUSY_POLL_SECONDS if worked_recently else idle)

    def _reply(self, connection: NodeConnection, message: bytes) -> bool:
        """Reply to a message in this process; False where it needs the worker."""
        from fairfold.device.exchange import reply_to
        from fairfold.device.tasks import SmallDevice
        from fairfold.flower.local_data import LocalFile

        node, next_heartbeat = self.node, time.monotonic() + connection.heartbeat_interval / 2

        def tick() -> None:
            nonlocal next_heartbeat
            if time.monotonic() > next_heartbeat and self.node_id is not None:
                connection.send_heartbeat(self.node_id)
                next_heartbeat = time.monotonic() + connection.heartbeat_interval / 2

        catalogue = node.catalogue if node.catalogue.exists() else None
        file = LocalFile(node.data, test=node.test or None, holdout=node.holdout, catalogue=catalogue)
        started = time.monotonic()

        fetch_log = partial(stream_roster, node.server, node.authority)
        device = SmallDevice(file, node.capacity, node.state, node.node_config(), tick, fetch_log)
        problem = reply_to(self._caller(connection), message, device)
        if problem is None:
            return False
        self._forget_message()
        self.last_work = time.monotonic()
        last = {"seconds": self.last_work - started, "peak": peak_memory(), "at": time.time()}
        self._report("connected", problem or "replied", last=last, **{"failures" if problem else "replies": 1})
        return True

    def _submit(self, message: bytes) -> None:
        self.worker = self.worker or WorkerProcess(self.node.folder)
        self.worker.submit(message)
        self.last_work = time.monotonic()

    def _refuse_interrupted(self, connection: NodeConnection) -> bool:
        """Reply with an error to the message that an earlier process was working on when it was killed."""
        with contextlib.suppress(OSError):
            message = self.open_message.read_bytes()
            remove(self.open_message)  # before: a message that kills a device must not do so for ever
            return self._refuse(connection, message)
        return False

    def _refuse(self, connection: NodeConnection, message: bytes) -> bool:
        """Reply with an error to a message whose work was lost with its process; False if it is none."""
        from fairfold.device.exchange import PulledMessage

        self.last_work = time.monotonic()
        try:
            refused = PulledMessage(self._caller(connection), message)
        except PARSE_ERRORS:
            return False
        refused.send(DIED, 0.0)
        return True

    @staticmethod
    def _caller(connection: NodeConnection) -> Callable[[str, bytes], bytes]:
        """Signed requests of a reply, sent again where the network lost them."""

        def call(name: str, body: bytes) -> bytes:
            for pause in RETRY_PAUSES:
                try:
                    return connection.call(name, body)
                except RefusedByServer as refused:
                    if refused.kind not in CONNECTED_STILL:
                        raise
                time.sleep(pause)
            return connection.call(name, body)

        return call

    def _end_idle_worker(self) -> None:
        """End a worker that has had no message for a while, or that hangs."""
        worker = self.worker
        if worker is not None and worker.message is None and time.monotonic() - worker.last_used > WORKER_IDLE_SECONDS:
            self._end_worker(worker)
        elif worker is not None and worker.message is not None and time.time() > worker.deadline + REPLY_GRACE_SECONDS:
            self._report("connected", "no reply to a message in its time: the worker is ended", failures=1)
            self._end_worker(worker)

    def _handle_events(self, connection: NodeConnection, worker: WorkerProcess, seconds: float) -> None:
        for event in worker.poll(seconds):
            if "deadline" in event:
                round_number = f" of round {event['round']}" if event.get("round") else ""
                self._report("working", f"works on {event.get('kind')}{round_number}")
            elif "died" in event:
                self._end_worker(worker)
                self._report("connected", f"the worker died (status {event['died']})", failures=1)
                if worker.message is not None:
                    self._refuse(connection, worker.message)
            elif event.get("done"):
                self._forget_message()
                self.last_work = time.monotonic()
                last = {key: event.get(key) for key in ("seconds", "peak")} | {"at": time.time()}
                problem = str(event.get("problem") or "")
                self._report("connected", problem or "replied", last=last, **{"failures" if problem else "replies": 1})

    def _end_worker(self, worker: WorkerProcess) -> None:
        self.worker = None
        self._forget_message()
        worker.end()

    def _forget_message(self) -> None:
        with contextlib.suppress(Exception):
            remove(self.open_message)

    def _leave(self, connection: NodeConnection) -> None:
        if self.worker is not None:
            self.worker.end()
        if self.node_id is not None:  # so that it may connect again at once
            with contextlib.suppress(RefusedByServer):
                connection.deactivate(self.node_id)
        connection.close()
        self._report("stopped", "stopped")

    def _report(self, state: str, message: str, *, replies: int = 0, failures: int = 0, **more: Any) -> None:
        """Write the status file, and show the message where it is new."""
        if (state, message) != (self.status.get("state"), self.status.get("message")):
            self.echo(message)
            self.status |= {"state": state, "message": message, "since": time.time()}
        self.status["replies"] += replies
        self.status["failures"] += failures
        if failures:
            self.status["failure"] = {"message": message[:500], "at": time.time()}
        self.status |= more | ({} if self.node_id is None else {"node": str(self.node_id)})
        self.status["cpu"] = round(time.process_time(), 3)  # seconds since this process was started
        if state == "connected":
            self.status.setdefault("start_cpu", self.status["cpu"])
        with contextlib.suppress(Exception):  # a full disk is no reason to stop
            write_atomically(self.node.folder / STATUS, json.dumps(self.status).encode())


def _say(text: str) -> None:
    """Print a line; what a server or a file says may hold what a terminal would obey."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    """Run the node of a folder until the process is asked to end."""

    def interrupt(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second signal must not keep it from disconnecting
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            NodeLoop(NodeFolder.open(Path(sys.argv[1])), _say).run()
    except InvalidState as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
