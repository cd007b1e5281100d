"""A client in C alone, static, on this processor, on aarch64 and as WebAssembly: the same numbers, in two megabytes."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.test_native import FLAGS, SOURCES

EXAMPLE = Path(__file__).with_name("device_example.c")
RUN_WASM = """
const {WASI} = require('wasi');
const wasi = new WASI({version: 'preview1', args: ['example']});
WebAssembly.instantiate(require('fs').readFileSync(process.argv[1]), wasi.getImportObject())
  .then(({instance}) => process.exit(wasi.start(instance)));
"""
MOST_PEAK_KB, MOST_TEXT = 2_000, 120_000


def build(folder: Path, compiler: list[str], *options: str) -> Path:
    """The example, linked with the library's sources."""
    path = folder / "example"
    words = [*compiler, *FLAGS, *options, str(EXAMPLE), *map(str, SOURCES), "-o", str(path), "-lm"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def run(command: list[str]) -> dict[str, list[float]]:
    """What the example printed, by the first word of each line."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, *numbers = line.split()
        found.setdefault(name, []).extend(map(float, numbers))
    return found


def zig(*options: str) -> list[str]:
    """Zig's C compiler, which comes with every system's library."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("no ziglang (pip install ziglang)")
    return [sys.executable, "-m", "ziglang", "cc", *options]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The example's numbers on this machine."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    return run([str(build(tmp_path_factory.mktemp("native"), [compiler], "-Wall", "-Wextra", "-Werror"))])


def require_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """The same draws, and the same numbers but for the last digits of another system's exp."""
    assert found["status"] == [0]
    assert found["samples"] == expected["samples"]
    for name in ("user", "score"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)


def test_a_client_needs_two_megabytes(native: dict[str, list[float]]) -> None:
    assert native["status"] == [0]
    assert len(set(native["score"])) == len(native["score"])
    assert native["bytes"][0] < 1 << 20


@pytest.mark.slow
def test_a_static_program_is_small(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", f"{platform.machine()}-linux-musl"), "-static", "-Wl,--gc-sections", "-s")
    found = run([str(path)])
    require_same(found, native)
    assert found["peak"][0] <= MOST_PEAK_KB


@pytest.mark.slow
def test_it_is_the_same_on_aarch64(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", "aarch64-linux-musl"), "-static", "-Wl,--gc-sections")
    runner = [] if platform.machine() == "aarch64" else [shutil.which("qemu-aarch64") or ""]
    if runner == [""]:
        pytest.skip("built, not run: no qemu-aarch64 (Debian: qemu-user)")
    require_same(run([*runner, str(path)]), native)


@pytest.mark.slow
def test_it_is_the_same_as_webassembly(tmp_path: Path, native: dict[str, list[float]]) -> None:
    path = build(tmp_path, zig("-target", "wasm32-wasi"), "-Wl,--gc-sections", "-s")
    node = shutil.which("node") or pytest.skip("built, not run: no node")
    assert path.stat().st_size <= 2 * MOST_TEXT
    require_same(run([node, "--no-warnings", "-e", RUN_WASM, str(path)]), native)
