"""How much memory and time does preparing a ratings CSV of 200 million rows take?

Writes such a file to a temporary folder (about 4 GB), prepares it with the 100 heaviest users, prints peak memory and
rows a second, appends a line to benchmarks/results/stream_ratings.csv when --hardware names the machine, and removes
the file.

    python benchmarks/stream_ratings.py --rows 200000000 --hardware "2-core Zen 4 (AMD EPYC), 24 GiB"
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import polars

RESULTS = Path(__file__).parent / "results" / "stream_ratings.csv"
CHUNK = 5_000_000


def write_ratings(path: Path, rows: int, users: int, items: int) -> None:
    """Write user_id,item_id,rating with log-normal user activity and power-law item popularity."""
    random = numpy.random.default_rng(0)
    activity = numpy.cumsum(numpy.exp(1.5 * random.standard_normal(users)))
    with path.open("wb") as file:
        file.write(b"user_id,item_id,rating\n")
        for start in range(0, rows, CHUNK):
            size = min(CHUNK, rows - start)
            frame = polars.DataFrame(
                {
                    "user": numpy.searchsorted(activity, random.random(size) * activity[-1]),
                    "item": (items ** random.random(size)).astype(numpy.int64),
                    "rating": random.integers(1, 6, size),
                }
            )
            frame.write_csv(file, include_header=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000_000)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--top-users", type=int, default=100)
    parser.add_argument("--folder", help="where the file goes while it is needed; default: the system's")
    parser.add_argument("--hardware", default="", help="name of the machine, to record the result")
    parser.add_argument("--note", default="", help="anything to know about the run, e.g. that the machine was shared")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "own.csv"
        begin = time.perf_counter()
        write_ratings(path, arguments.rows, arguments.users, arguments.items)
        print(f"wrote {arguments.rows:,} rows, {path.stat().st_size / 1e9:.2f} GB, {time.perf_counter() - begin:.0f} s")
        # A process of its own, so that its peak is not that of the writing.
        command = [str(Path(sys.executable).parent / "fairfold"), "data", "prepare", str(path)]
        begin = time.perf_counter()
        subprocess.run(
            [*command, "--top-users", str(arguments.top_users), "--cache", str(Path(folder) / "cache")], check=True
        )
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        size = path.stat().st_size
    print(f"{seconds:.1f} s, {arguments.rows / seconds / 1e6:.2f} million rows/s, peak memory {peak:,.0f} MiB")
    if arguments.hardware:
        record(
            {
                "hardware": arguments.hardware,
                "threads": os.cpu_count(),
                "rows": arguments.rows,
                "bytes": size,
                "top_users": arguments.top_users,
                "seconds": round(seconds, 1),
                "rows_per_second": round(arguments.rows / seconds),
                "peak_memory_mib": round(peak),
                "note": arguments.note,
            }
        )


def record(row: dict[str, object]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
