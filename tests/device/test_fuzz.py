"""Spoiled messages are refused by the small device, in Python, TypeScript and C, or harmless.

``tests/device/fuzz.py`` and ``device_fuzz.c`` run any number.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.device.fuzz import fuzz, fuzz_browser, fuzz_objects
from tests.device.test_browser import needs_node
from tests.device.test_native import SOURCES

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def test_spoiled_messages_are_refused_or_harmless() -> None:
    outcomes = fuzz(150, 3, gradient=False)
    assert outcomes.total() == 150
    assert sum(times for what, times in outcomes.items() if "Invalid" in what) > 30


@pytest.mark.slow
def test_spoiled_messages_of_all_algorithms_are_refused_or_harmless() -> None:
    """Gradient FAIR's, too, which Python checks and C trains, where the library was built."""
    outcomes = fuzz(1_500, 4)
    assert outcomes.total() == 1_500
    assert sum(times for what, times in outcomes.items() if "Invalid" in what) > 300


@needs_node
def test_spoiled_messages_are_refused_by_a_browser_or_harmless() -> None:
    outcomes = fuzz_browser(300, 3)
    assert outcomes.total() == 300
    kinds = {what.rpartition(": ")[2] for what in outcomes}
    assert kinds <= {"replied", "InvalidMessage", "InvalidState", "InvalidCapacity", "InvalidData", "RequestRefused"}
    assert sum(times for what, times in outcomes.items() if "Invalid" in what) > 60


def test_spoiled_objects_are_refused_or_read() -> None:
    assert fuzz_objects(300, 3)["refused"] > 100


def test_spoiled_tasks_for_the_c_library_stay_in_their_buffers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    program = tmp_path / "fuzz"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-ffp-contract=off", *SANITIZERS]
    words = [compiler, *flags, str(Path(__file__).with_name("device_fuzz.c")), *map(str, SOURCES)]
    built = subprocess.run([*words, "-o", str(program), "-lm"], capture_output=True, text=True, check=False)
    if "sanitize" in built.stderr or "asan" in built.stderr:
        pytest.skip("a compiler without sanitizers")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "5000", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ok, layout, row, argument, memory, *_ = map(int, done.stdout.split())
    assert min(ok, layout, row, argument, memory) > 200  # each kind was reached
