"""Folders appear whole or not at all, also when the process is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fairfold.atomic_io import write_atomically
from fairfold.data.files import PARTIAL, atomic_folder, cache_folder, remove_abandoned

PREPARE = """
import sys, time
import polars
real = polars.DataFrame.write_parquet
def slow(frame, path, **options):
    real(frame, path, **options)
    if "train" in str(path) or "rows" in str(path):
        print("writing", flush=True)
        time.sleep(600)
polars.DataFrame.write_parquet = slow
from fairfold.cli import app
app(["data", "prepare", sys.argv[1], "--cache", sys.argv[2]])
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_prepare_leaves_nothing_half_made(stop: signal.Signals, tmp_path: Path) -> None:
    source, cache = tmp_path / "own.csv", tmp_path / "cache"
    source.write_text("user,item\n" + "".join(f"{row % 5},{row}\n" for row in range(50)))
    process = subprocess.Popen([sys.executable, "-c", PREPARE, str(source), str(cache)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(stop)
        process.wait(timeout=120)
    assert process.returncode != 0
    assert not [name for name in names(cache) if not name.startswith(".")]
    if stop != signal.SIGKILL:
        assert not names(cache)
    # What only a kill can leave is hidden, and gone with the next preparation.
    from fairfold.data import prepare

    prepared = prepare(source, cache=cache)
    assert names(cache) == [prepared.folder.name]


def test_who_makes_the_same_folder_at_the_same_moment_takes_the_name_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes do that start on the same data."""
    monkeypatch.setattr("fairfold.data.files.sync_folder", lambda _folder: None)
    failed: list[OSError] = []

    def make() -> None:
        for _ in range(40):
            try:
                with atomic_folder(tmp_path / "set") as folder:
                    (folder / "x").write_text("whole")
            except OSError as error:
                failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (tmp_path / "set" / "x").read_text() == "whole"
    assert names(tmp_path) == ["set"]


def test_a_folder_in_use_is_not_swept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        program = "import sys, pathlib, fairfold.data.files as f; f.remove_abandoned(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
        assert (folder / "x").exists()
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["x"]


def test_old_folders_without_a_lock_are_swept(tmp_path: Path) -> None:
    for name, age in (("old", 7200), ("young", 0)):
        folder = tmp_path / f".{name}{PARTIAL}"
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    remove_abandoned(tmp_path)
    assert names(tmp_path) == [f".young{PARTIAL}"]


def test_a_folder_replaces_another(tmp_path: Path) -> None:
    for content in ("1", "2"):
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "x").write_text(content)
    assert (tmp_path / "a" / "x").read_text() == "2"
    assert names(tmp_path) == ["a"]


def test_a_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", b"old")
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("old")

    def fail() -> None:
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "x").write_text("new")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert names(tmp_path) == ["a", "f"]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("FAIRFOLD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fairfold"


FULL_DISK = """
import resource, sys
from fairfold.cli import app
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
app(["data", "prepare", sys.argv[1], "--cache", sys.argv[2]])
"""


@pytest.mark.parametrize("limit", [200, 2_000])
def test_files_that_may_not_grow_are_an_error_without_a_traceback(limit: int, tmp_path: Path) -> None:
    source, cache = tmp_path / "own.csv", tmp_path / "cache"
    source.write_text("user,item\n" + "".join(f"{row % 5},{row * 7919 % 10007}\n" for row in range(500)))
    program = [sys.executable, "-c", FULL_DISK, str(source), str(cache), str(limit)]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "is full" in result.stderr
    assert "Traceback" not in result.stderr
    assert not names(cache)
