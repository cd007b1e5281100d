"""Damaged data files by the thousand: each is read, and read right, or refused in words; memory stays bounded.

    python tests/faults/fuzz_data.py --count 20000 --seed 1
    python tests/faults/fuzz_data.py --seed 1 --case 1234      # one of them again

A case is made from seed and number alone. The cases run in a child process, so that one that kills it is found as well.
"""

import argparse
import math
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import polars

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that it runs as a program as well

from fairfold.data import load, load_images, prepare, readers
from fairfold.data.download import _unpack
from fairfold.data.images import read_images
from fairfold.data.preparing import find_source, is_image_folder, read_titles
from fairfold.errors import FairfoldError
from tests.faults import data_files

MOST_BYTES = 1 << 30
"""Of address space that a case may add to what the program starts with."""
SECONDS = 60
PART = 5000
"""Cases of one child: its allocator keeps some address space of every case, and the bound is meant for one."""
EVERY = 20
"""One case in so many goes all the way through the cache; it waits for the disk."""


def case(seed: int, number: int, folder: Path) -> str:
    """Make a damaged file and read it; return the outcome."""
    source = random.Random(f"{seed} {number}")
    form = source.choice(sorted(data_files.FORMS))
    path = data_files.damaged(form, source, folder)
    whole = number % EVERY == 0
    try:
        if form == "zip":
            (folder / "out").mkdir()
            _unpack(folder / "set.zip", folder / "out", ("ratings.csv", "movies.csv"))
            path = folder / "out"
        if form in ("images", "femnist"):
            _check_images(path, folder / "cache", whole)
        else:
            _check_interactions(path, folder / "cache", whole)
    except FairfoldError as error:
        if len(str(error)) > 5000:
            raise RuntimeError("an error that is too long") from error
        return f"{form}: refused"
    return f"{form}: read"


def _check_images(path: Path, cache: Path, whole: bool) -> None:
    if not is_image_folder(path):
        return
    found = load_images(path, cache=cache) if whole else read_images(path)
    for split in (found.train, found.test):
        assert split.images.ndim == 3
        assert len(split) == len(split.images) > 0
        assert int(split.labels.min()) >= 0
        assert int(split.labels.max()) < found.num_classes
        assert split.writers is None or len(split.writers) == len(split)


def _check_interactions(path: Path, cache: Path, whole: bool) -> None:
    if whole:
        counted = prepare(path, cache=cache)
        data = load(path, cache=cache)
        counts = counted.manifest["counts"]
        assert len(data.train) + len(data.test) == counts["train"] + counts["test"] >= 1
        assert int(data.train.items.max()) < data.num_items
    found = find_source(path)
    if found.titles is not None:
        titles = read_titles(found.titles)
        assert titles["id"].n_unique() == titles.height
    for file in found.files:
        large = _rows(readers.read(file.path, file.file_format, repairs=Counter()), file.file_format.scale)
        # Where blocks end decides nothing, but for quotes that are never closed.
        if (
            file.file_format.kind != "parquet"
            and b'"' not in file.path.read_bytes()
            and file.file_format.quote != "strip"
        ):
            small = _rows(
                readers.read(file.path, file.file_format, repairs=Counter(), block_size=97), file.file_format.scale
            )
            assert small == large, "other rows with other blocks"


def _rows(frames: Iterator[polars.DataFrame], scale: tuple[float, float] | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for frame in frames:
        for name in ("user", "item"):
            assert frame.schema[name] in (polars.Int64, polars.String)
            assert not frame[name].null_count()
            assert "" not in frame[name].cast(polars.String).to_list()[:1000]
        if "rating" in frame.columns:
            given = frame["rating"].drop_nulls().to_list()
            assert all(math.isfinite(value) for value in given)
            assert scale is None or all(scale[0] <= value <= scale[1] for value in given)
        rows += frame.select(polars.all().cast(polars.String)).rows()
    return rows


def work(seed: int, first: int, count: int, progress: Path) -> int:
    """Run cases, in a child; the number of failures."""
    polars.read_csv(b"a,b\n1,2\n").lazy().collect(engine="streaming")  # the engine's threads reserve address space
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES,) * 2)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    outcomes: Counter[str] = Counter()
    failures = 0
    base = Path(tempfile.mkdtemp(prefix="fuzz-data-"))
    with progress.open("w") as output:
        for number in range(first, first + count):
            output.seek(0)
            output.write(f"{number:12d}")
            output.flush()
            folder = base / "set"
            folder.mkdir()
            signal.alarm(SECONDS)
            try:
                outcomes[case(seed, number, folder)] += 1
            except BaseException as error:
                failures += 1
                sys.stdout.write(f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}\n")
                if failures <= 20:
                    sys.stdout.write("".join(traceback.format_exception(error)[-3:]))
                sys.stdout.flush()
            finally:
                signal.alarm(0)
                shutil.rmtree(folder)
    shutil.rmtree(base, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = ", ".join(f"{outcome} {times}" for outcome, times in sorted(outcomes.items()))
    sys.stdout.write(f"{count} files, {failures} failures, {peak:.0f} MiB at the peak ({counts})\n")
    return failures


def fuzz(seed: int, count: int, first: int = 0, echo: Callable[[str], object] = str) -> tuple[int, str]:
    """Run cases in children; failures, of which a dead child is one, and the output, which ``echo`` gets at once."""
    failures, output = 0, ""
    stop = first + count
    with tempfile.TemporaryDirectory() as place:
        progress = Path(place) / "progress"
        while first < stop:
            command = [sys.executable, __file__, "--child", str(progress), "--seed", str(seed)]
            part = min(PART, stop - first)
            command += ["--first", str(first), "--count", str(part)]
            ended = False
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    output += line
                    echo(line)
                    failures += line.startswith("case ")
                    ended |= " failures, " in line
            if ended:
                first += part
                continue
            first = int(progress.read_text() or first)
            failures += 1
            output += f"case {first} of seed {seed} ended the process ({child.returncode})\n"
            echo(output.splitlines(keepends=True)[-1])
            first += 1
    return failures, output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--child", type=Path)
    given = parser.parse_args()
    if given.case is not None:
        kept = Path(tempfile.mkdtemp(prefix=f"case-{given.case}-"))
        sys.stdout.write(f"{kept}\n")
        sys.stdout.write(case(given.seed, given.case, kept) + "\n")
    elif given.child is not None:
        sys.exit(work(given.seed, given.first, given.count, given.child) > 0)
    else:
        began = time.monotonic()
        found, _ = fuzz(given.seed, given.count, given.first, lambda line: print(line, end="", flush=True))  # noqa: T201
        sys.stdout.write(f"seed {given.seed}, {time.monotonic() - began:.0f} s, {found} failures\n")
        sys.exit(found > 0)
