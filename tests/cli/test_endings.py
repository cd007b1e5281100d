"""However a command ends, it ends in one line and with a status that says how."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fairfold.cli import app
from fairfold.cli.console import ErrorReportingGroup, Terminated

FAIRFOLD = [sys.executable, "-c", "import sys; from fairfold.cli import app; sys.exit(app())"]
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and streams of POSIX")


def run(*words: str, shell: str = "") -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own; ``shell`` is put after it, e.g. to close a stream."""
    if shell:
        quoted = " ".join(f"'{word}'" for word in [*FAIRFOLD, *words])
        return subprocess.run(["bash", "-c", f"{quoted} {shell}"], capture_output=True, text=True, check=False)
    return subprocess.run([*FAIRFOLD, *words], capture_output=True, text=True, check=False)


def one_line(text: str, words: str) -> None:
    assert "Traceback" not in text
    assert "Exception ignored" not in text
    assert words in text
    assert len(text.strip().splitlines()) == 1, text


@posix
@pytest.mark.parametrize("command", [["data", "list"], ["--help"]])
def test_output_on_a_full_device_is_an_error(command: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    result = run(*command, shell="> /dev/full")
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "No space left" in result.stderr


@posix
def test_a_closed_pipe_ends_the_command_quietly() -> None:
    result = run("data", "list", shell="| head -c 1 > /dev/null; exit ${PIPESTATUS[0]}")
    assert result.returncode in (0, 141), result.stderr  # 0: all of it fitted into the pipe
    assert result.stderr == ""
    reading, writing = os.pipe()
    os.close(reading)
    closed = subprocess.run([*FAIRFOLD, "data", "list"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert closed.returncode == 141
    assert closed.stderr == ""


@posix
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_stop_the_work(closed: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("user,item\n1,2\n1,3\n2,3\n")
    result = run("data", "prepare", str(tmp_path / "own.csv"), "--cache", str(tmp_path / "cache"), shell=closed)
    assert result.returncode == 0
    assert result.stderr.strip() == ""  # rich below 14.3 ends lines that it does not write
    assert list((tmp_path / "cache").glob("*/manifest.json"))


SLOW_START = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            print("here", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
from fairfold.cli import app
sys.exit(app(sys.argv[2:]))
"""


@posix
@pytest.mark.parametrize("module", ["typer", "polars"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_start_is_one_line(module: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("user,item\n1,2\n")
    words = ["data", "prepare", str(tmp_path / "own.csv"), "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, module, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, metadata = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    one_line(metadata, "interrupted")


def commands(problem: BaseException) -> typer.Typer:
    """A program with the guard of ours, and a command that fails."""
    made = typer.Typer(cls=ErrorReportingGroup)

    @made.command()
    def fail() -> None:
        raise problem

    @made.command()
    def other() -> None:
        """A second one: a single command would be the program itself."""

    return made


@pytest.mark.parametrize(
    ("problem", "status", "words"),
    [
        (MemoryError(), 2, "error: out of memory; needed: more"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9"), 2, "memory"),
        (OSError(12, "Cannot allocate memory"), 2, "out of memory"),
        (PermissionError(13, "Permission denied", "/some/file"), 2, "error: /some/file: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(), 143, "interrupted"),
    ],
)
def test_errors_of_the_machine_are_reported_in_one_line(problem: BaseException, status: int, words: str) -> None:
    result = CliRunner().invoke(commands(problem), ["fail"])
    assert result.exit_code == status
    one_line(result.stderr, words)


def test_a_defect_keeps_its_traceback() -> None:
    result = CliRunner().invoke(commands(RuntimeError("a defect")), ["fail"])
    assert isinstance(result.exception, RuntimeError)


@posix
def test_memory_that_runs_out_in_a_real_command(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch, polars; from fairfold.cli import app; import fairfold.runs.train;"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2);"
        "sys.exit(app(sys.argv[1:]))"
    )
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    world = ["--set", "data.users=4000000", "--set", "data.items=400", "--set", "data.interactions_per_user=20"]
    words = ["train", *world, "--rounds", "1", "--out", str(tmp_path / "run")]
    result = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr[-2000:]
    one_line(result.stderr, "out of memory")
    assert not (tmp_path / "run").exists()


def test_the_program_itself_is_guarded() -> None:
    assert app.info.cls is ErrorReportingGroup
