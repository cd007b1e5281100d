"""The browser device: its built file is what its sources give, is small, and runs the test vectors under node."""

import gzip
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "browser", ROOT / "src" / "fairfold" / "device" / "browser.js"
PARTS = Path(__file__).with_name("browser_parts.js")  # the same sources, built in the same way, for node
LARGEST_BYTES = 27_700  # gzipped
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on this machine: apt-get install nodejs")
GROUPS = ("objects", "transport", "uploads", "models", "signed", "secure", "log", "session", "secure_session", "fuzz")


def source_files() -> Iterator[Path]:
    yield from (SOURCES / "package-lock.json", SOURCES / "build.mjs")
    yield from sorted((SOURCES / "src").iterdir())


@pytest.mark.parametrize("built", [BUILT, PARTS], ids=lambda path: path.name)
def test_a_built_file_is_of_these_sources(built: Path) -> None:
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    stale = f"{built.name} is stale: run `npm ci && npm run build` in browser/"
    assert digest.hexdigest() in built.read_text(encoding="utf-8").partition("\n")[0], stale


@needs_node
@pytest.mark.skipif(not (SOURCES / "node_modules").exists(), reason="no toolchain: run `npm ci` in browser/")
def test_the_sources_give_the_built_files() -> None:
    done = subprocess.run(["node", "build.mjs", "--check"], cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_small() -> None:
    assert len(gzip.compress(BUILT.read_bytes(), 9)) <= LARGEST_BYTES


@cache
def checked() -> Any:
    command = ["node", str(Path(__file__).parent / "browser_vectors.mjs"), str(PARTS), str(ROOT / "tests" / "vectors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("group", GROUPS)
def test_the_vectors(group: str) -> None:
    found = checked()[group]
    assert not found["wrong"]
    assert found["checked"] >= 15


FAILURES = (
    "undisturbed", "a page ends at each request", "a full disk", "a wrong clock", "a server that is away for a while",
    "a repeated message", "a message beyond the capacity", "rows that pass by", "a server of another version",
)  # fmt: skip


@cache
def failures() -> Any:
    script = str(Path(__file__).parent / "browser_failures.mjs")
    command = ["node", script, str(PARTS), str(ROOT / "tests" / "vectors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("group", FAILURES)
@pytest.mark.slow  # eight seconds, for all groups
def test_failures_lose_nothing_and_send_nothing_twice(group: str) -> None:
    found = failures()[group]
    assert not found["wrong"]
    assert found["checked"] >= 3


@needs_node
def test_it_trains_at_8000_rows_in_8_megabytes() -> None:
    command = ["node", "--expose-gc", str(Path(__file__).parent / "browser_memory.mjs"), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["evaluated"] == 20
    assert found["loaded"] < 3_000_000
    assert found["peak"] < 8_000_000  # of heap and buffers
