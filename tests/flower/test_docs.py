"""The pages on fleets are run: all their commands, in order, in an empty folder, with real processes over TLS.

What stands in blocks of ``sh`` is typed into one shell, what stands in blocks of ``python`` is run where it stands.
Every line of a block of ``text`` must be printed, but for numbers. The server's port is a free one, and its name that
of this machine; nothing is installed.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairfold.flower.fleet.processes import OFFLINE, descendants, free_ports, search_path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\b[0-9a-f]{12,20}\b|\d[\d.,]*")
PAGES = ["first-fleet.md", "deployment.md"]


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def script(page: str, port: int) -> str:
    """What is typed, as one script."""
    parts = []
    for kind, body in blocks(page):
        if kind == "python":
            parts.append(f"{sys.executable} - <<'PYTHON'\n{body}PYTHON\n")
        elif kind == "sh":
            parts.append("".join(line + "\n" for line in body.splitlines() if not line.startswith("pip install")))
    text = "".join(parts).replace("server.example.org", "localhost").replace("localhost:8000", f"localhost:{port}")
    return re.sub(r"(server init .*?--host localhost)", rf"\1 --port {port}", text)


def plain(line: str) -> str:
    return NUMBER.sub("#", " ".join(line.split()))


def test_a_first_fleet_takes_eight_commands() -> None:
    typed = "".join(body for kind, body in blocks("first-fleet.md") if kind == "sh").replace("\\\n", "")
    assert 0 < len(typed.splitlines()) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_in_order(page: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    log = tmp_path / "output.log"
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = os.environ | OFFLINE | {"PATH": search_path(), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": "140", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", script(page, port)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = shell.wait(1200)
        finally:
            left = family(shell.pid)
            waiting = [peak for pid in left if (peak := idle_peak(pid))]
            for pid in left:
                stop(pid, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while any(alive(pid) for pid in left) and time.monotonic() < deadline:
                time.sleep(0.1)
            stubborn = [pid for pid in left if alive(pid)]
            for pid in stubborn:
                stop(pid, signal.SIGKILL)
    found = log.read_text(errors="replace")
    assert status == 0, found[-5000:]
    printed = {plain(line) for line in found.splitlines()}
    for kind, body in blocks(page):
        if kind == "text":
            missing = [line for line in body.splitlines() if line.strip() and plain(line) not in printed]
            assert not missing, f"{missing}\n{found[-5000:]}"
    assert not stubborn, "asked to end, everything ends"
    assert waiting
    assert max(waiting) < 50e6, "what a device weighs while it waits"


def family(session: int) -> list[int]:
    """What a shell has started and left, by its session, and what that started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,sid="], capture_output=True, text=True, check=True).stdout
    members = [int(pid) for pid, sid in (line.split() for line in listed.splitlines()) if int(sid) == session]
    return [*members, *descendants(members)]


def idle_peak(pid: int) -> int:
    """The largest memory that the lasting process of a device has had; 0 for any other process."""
    try:
        if "fairfold.flower.fleet.node_loop" not in Path(f"/proc/{pid}/cmdline").read_text():
            return 0
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    except OSError:
        return 0


def stop(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
