"""Preparing a long file takes the memory of its blocks and of its different ids, not of its rows."""

import subprocess
import sys
from pathlib import Path

import numpy
import polars
import pytest

PROGRAM = """
import resource, sys
from pathlib import Path
from fairfold.data import prepare
small, large = (Path(name) for name in sys.argv[1:3])
peaks = []
for path in (small, large):
    prepare(path, cache=sys.argv[3], top_users=20, block_size=1 << 20)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


def write(path: Path, rows: int) -> Path:
    random = numpy.random.default_rng(0)
    frame = polars.DataFrame({"user": random.integers(0, 5000, rows), "item": random.integers(0, 20_000, rows)})
    frame.write_csv(path)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_ten_times_the_rows_take_little_more_memory(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small.csv", 400_000), write(tmp_path / "large.csv", 4_000_000)
    program = [sys.executable, "-c", PROGRAM, str(small), str(large), str(tmp_path / "cache")]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    before, after = (int(peak) / 1024 for peak in result.stdout.split())
    # The rows themselves would be 64 MB as pairs of numbers, several times that with the text of the file.
    assert after - before < 50, f"{before:.0f} MiB, then {after:.0f} MiB"
