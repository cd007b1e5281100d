"""Programs that a server or a trial starts: none is left behind, whatever happens."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fairfold.errors import InvalidState

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
}
"""Flower's programs call nobody and install nothing."""

PATIENCE = 10.0  # seconds a program has to end by itself


class Program:
    """A running program, its log, and all that it starts; without a log, it says what it says where we do.

    It leads a session of its own, so that Ctrl-C reaches only whoever is in charge of all of them.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with contextlib.nullcontext() if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if log is None else subprocess.STDOUT,
                env=os.environ | {"PATH": search_path()} | dict(environment),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; None if it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def tail(self, lines: int = 12) -> str:
        """The end of its log."""
        if self.log is None:
            return "above"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def see(self) -> str:
        """Where more is said."""
        return f"See {self.log or 'above'}."

    def require_alive(self) -> None:
        """An error with the end of its log if it has ended."""
        if self.status() is not None:
            ended = f"{self.name} ended with status {self.status()}; its last words:\n{self.tail()}"
            raise InvalidState(ended, "a program that runs on", self.see)

    def ask_to_end(self) -> None:
        """Say that it should end by itself."""
        if self.status() is None:
            self._process.terminate()

    def kill(self, children: Mapping[int, str] | None = None, patience: float = 0.0) -> None:
        """End it and all it started, after some time to do so by itself; children may be known from before."""
        self.wait(patience)
        family = dict(children or {}) | descendants([self.pid])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        began = {pid: start for pid, (_, start) in _listed().items()}
        for pid in [pid for pid, start in family.items() if began.get(pid) == start]:  # still the same processes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _listed() -> dict[int, tuple[int, str]]:
    """Every process: who started it, and when."""
    command = ["ps", "-A", "-o", "pid=,ppid=,lstart="]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": "C"}).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid): (int(parent), start) for pid, parent, start in rows}


def descendants(pids: Sequence[int]) -> dict[int, str]:
    """Everything that some programs have started, each with the time it began.

    Flower's programs put their children into sessions of their own, so that a signal to a group does not reach them.
    """
    listed, found, parents = _listed(), dict[int, str](), set(pids)
    while parents:
        new = {pid: start for pid, (parent, start) in listed.items() if parent in parents and pid not in found}
        found |= new
        parents = set(new)
    return found


@contextlib.contextmanager
def stopping(programs: list[Program]) -> Iterator[list[Program]]:
    """Whatever happens inside, all programs that were added are stopped, those started last first."""
    try:
        yield programs
    finally:
        with _uninterrupted():
            running = list(reversed(programs))
            families = [descendants([program.pid]) for program in running]
            for program in running:  # asked all at once, so that their patience runs side by side
                program.ask_to_end()
            deadline = time.monotonic() + PATIENCE
            for program, children in zip(running, families, strict=True):
                program.kill(children, max(deadline - time.monotonic(), 0.0))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not stop the stopping; only the main thread is ever interrupted."""
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if mine else None
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listening(host: str, port: int, remedy: str, patience: float = 0.0) -> socket.socket:
    """A socket that has an address of this machine; where another program keeps it for so many seconds, refused."""
    deadline = time.monotonic() + patience
    while True:
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            one.close()
            taken = error.errno == errno.EADDRINUSE
            if not taken or time.monotonic() >= deadline:
                why = "which another program uses" if taken else f"which cannot be listened on ({error.strerror})"
                raise InvalidState(f"port {port} of {host}, {why}", "a free port of this machine", remedy) from None
            time.sleep(0.2)
        else:
            return one


def wait_for_port(port: int, program: Program, seconds: float = 60.0) -> None:
    """Wait until a program listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        program.require_alive()
        with socket.socket() as one:
            one.settimeout(1.0)
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise InvalidState(f"{program.name} does not listen on port {port}", "a running program", program.see)


def search_path() -> str:
    """Where programs are found: Flower's start each other by name, and must find those of this Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def tool(name: str) -> str:
    """The path of one of Flower's commands: that of this Python before any other."""
    return shutil.which(name, path=search_path()) or name
