"""Programs that a server or a local fleet starts; none is left running, whatever happens."""

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
"""Environment in which Flower's programs contact no other host and install nothing."""

TERMINATE_TIMEOUT = 10.0  # seconds a program has to end by itself


class Program:
    """A running program with all that it starts; its output goes to a log file, or where this process's goes."""

    def __init__(self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        variables = os.environ | {"PATH": search_path()} | dict(environment)
        stdin, stderr = subprocess.DEVNULL, None if log is None else subprocess.STDOUT
        with contextlib.nullcontext() if log is None else log.open("ab") as output:
            self._process = (
                subprocess.Popen(  # in a session of its own: Ctrl-C reaches only the process that started it
                    list(command), stdin=stdin, stdout=output, stderr=stderr, env=variables, start_new_session=True
                )
            )
        self.pid = self._process.pid

    def status(self) -> int | None:
        """The exit status; None while the program runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; returns the exit status, or None if the program still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def tail(self, lines: int = 12) -> str:
        """The last lines of the log."""
        content = "above" if self.log is None else self.log.read_text(errors="replace")
        return "\n".join(content.splitlines()[-lines:])

    @property
    def log_hint(self) -> str:
        """A sentence that names the log."""
        return f"See {self.log or 'above'}."

    def require_alive(self) -> None:
        """Raise an error with the end of the log if the program has ended."""
        if self.status() is not None:
            ended = f"{self.name} ended with status {self.status()}; the end of its log:\n{self.tail()}"
            raise InvalidState(ended, "a program that runs on", self.log_hint)

    def terminate(self) -> None:
        """Ask the program to end."""
        if self.status() is None:
            self._process.terminate()

    def kill(self, children: Mapping[int, str] | None = None, timeout: float = 0.0) -> None:
        """Kill the program and all it started (also ``children``, known earlier), after ``timeout`` seconds to end."""
        self.wait(timeout)
        family = dict(children or {}) | descendants([self.pid])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        start_times = {pid: start for pid, (_, start) in _process_table().items()}
        for pid in [pid for pid, start in family.items() if start_times.get(pid) == start]:  # not a reused id
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _process_table() -> dict[int, tuple[int, str]]:
    """Parent and start time of every process."""
    command = ["ps", "-A", "-o", "pid=,ppid=,lstart="]
    output = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": "C"}).stdout
    rows = [line.split(None, 2) for line in output.splitlines()]
    return {int(pid): (int(parent), start) for pid, parent, start in rows}


def descendants(pids: Sequence[int]) -> dict[int, str]:
    """All processes that some programs have started, with their start times.

    Flower's programs put their children into sessions of their own, so that a signal to a group does not reach them.
    """
    table = _process_table()
    found = dict[int, str]()
    new = dict.fromkeys(pids, "")
    while new:
        new = {pid: start for pid, (parent, start) in table.items() if parent in new and pid not in found}
        found |= new
    return found


@contextlib.contextmanager
def stop_on_exit(programs: list[Program]) -> Iterator[list[Program]]:
    """Stop all programs of a list at the end of the block, those started last first."""
    try:
        yield programs
    finally:
        with _uninterrupted():
            running = list(reversed(programs))
            families = [descendants([program.pid]) for program in running]
            for program in running:  # all at once, so that their timeouts run side by side
                program.terminate()
            deadline = time.monotonic() + TERMINATE_TIMEOUT
            for program, children in zip(running, families, strict=True):
                program.kill(children, max(deadline - time.monotonic(), 0.0))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in a block; only the main thread is ever interrupted."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that are free now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def bind_port(host: str, port: int, remedy: str, wait_timeout: float = 0.0) -> socket.socket:
    """Bind a socket to an address of this machine; refused where another program uses it for ``wait_timeout``."""
    deadline = time.monotonic() + wait_timeout
    while True:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            in_use = error.errno == errno.EADDRINUSE
            if not in_use or time.monotonic() >= deadline:
                why = "which another program uses" if in_use else f"which cannot be listened on ({error.strerror})"
                raise InvalidState(f"port {port} of {host}, {why}", "a free port of this machine", remedy) from None
            time.sleep(0.2)
        else:
            return bound


def wait_for_port(port: int, program: Program, seconds: float = 60.0) -> None:
    """Wait until a program listens on a port."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        program.require_alive()
        with socket.socket() as one:
            one.settimeout(1.0)
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise InvalidState(f"{program.name} does not listen on port {port}", "a running program", program.log_hint)


def search_path() -> str:
    """The search path of programs: Flower's start each other by name, and must find those of this Python first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def find_command(name: str) -> str:
    """The path of one of Flower's commands, that of this Python before any other."""
    return shutil.which(name, path=search_path()) or name
