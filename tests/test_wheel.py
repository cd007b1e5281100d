"""What `make wheel` makes is installed elsewhere and used there, away from the sources."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from fairfold import __version__

ROOT = Path(__file__).parents[1]
KERNELS = """
import json, fairfold
from fairfold.kernels.native import status
print(json.dumps([fairfold.__file__, status().available, status().threaded]))
"""


def output(*words: str | Path, folder: Path) -> str:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow  # minutes: it compiles, and asks PyPI for the builder
@pytest.mark.skipif(sys.platform != "linux", reason="wheels of other systems come from cibuildwheel")
def test_a_wheel_serves_away_from_its_sources(tmp_path: Path) -> None:
    output("make", "wheel", folder=ROOT)
    (wheel,) = (ROOT / "dist").glob(f"fairfold-{__version__}-py3-none-manylinux_2_28_*.whl")
    assert (ROOT / "dist" / f"fairfold-{__version__}.tar.gz").stat().st_size < 1_000_000
    inside = set(zipfile.ZipFile(wheel).namelist())
    mine = [path for path in (ROOT / "src" / "fairfold").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(ROOT / "src").as_posix() for path in mine} <= inside

    output(sys.executable, "-m", "venv", "there", folder=tmp_path)
    python = tmp_path / "there" / "bin" / "python"
    (packages,) = (tmp_path / "there").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # all but fairfold, which is in no .pth of that
    output(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    where, available, threaded = json.loads(output(python, "-c", KERNELS, folder=tmp_path))
    assert where.startswith(str(packages))
    assert available
    assert threaded
    shown = output(
        python, "-m", "fairfold", "demo", "--users", "60", "--items", "160", "--rounds", "2", folder=tmp_path
    )
    assert "everybody full" in shown
    assert (tmp_path / "why.svg").is_file()
