"""What fuzzing has found, or might have: every file of the corpus is read right, or refused with a message."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairfold.device.store import load_device_id
from fairfold.errors import FairfoldError, InvalidState
from tests.faults import fuzz_data, fuzz_folders, fuzz_updates

CORPUS = Path(__file__).parent / "corpus"
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc to bound the memory")


@pytest.mark.parametrize("folder", sorted((CORPUS / "data").iterdir()), ids=lambda path: path.name)
def test_data(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "set")
    found = sorted((tmp_path / "set").iterdir())
    path = found[0] if len(found) == 1 else tmp_path / "set"
    try:
        fuzz_data._check_interactions(path, tmp_path / "cache", whole=True)
    except FairfoldError as error:
        assert len(str(error)) < 5000  # noqa: PT017


@linux
def test_settings_from_the_corpus_and_some_more() -> None:
    """In a process of its own, which forks."""
    files = map(str, sorted((CORPUS / "settings").iterdir()))
    command = [sys.executable, "tests/faults/fuzz_settings.py", "--count", "12", "--seed", "1", "--files", *files]
    done = subprocess.run(command, cwd=CORPUS.parents[2], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "12 settings" in done.stdout


@pytest.mark.parametrize("path", sorted((CORPUS / "names").iterdir()), ids=lambda path: path.name)
def test_names_of_devices(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "name")
    with pytest.raises(InvalidState, match="Remove the file"):
        load_device_id(tmp_path)


def test_damaged_files_of_folders_are_read_right_or_refused() -> None:
    failures, output = fuzz_folders.fuzz(1, 40)
    assert failures == 0, output


@linux
def test_damaged_data_files_are_read_right_or_refused() -> None:
    """A few seconds of what ``fuzz_data.py`` does for as long as it is asked."""
    failures, output = fuzz_data.fuzz(1, 150)
    assert failures == 0, output
    assert "150 files" in output


@pytest.mark.parametrize("algorithm", fuzz_updates.ALGORITHMS)
def test_no_hostile_update_ends_a_run(algorithm: str) -> None:
    """A few of what ``fuzz_updates.py`` sends; the runs end with finite models."""
    assert fuzz_updates.plain(algorithm, 16, 1)["updates"] >= 16
    dropped = fuzz_updates.secure(algorithm, 16, 1)
    assert dropped.total() == 16
