"""The blocks of the pages, and a small world in which their commands and code are run.

A page is run from top to bottom in an empty folder, as a reader would: Python in one session, commands in this process,
on data sets of the published names and forms that hold a few users. What a block of ``text`` shows must have been said.
"""

import contextlib
import io
import os
import random
import re
import shlex
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fairfold.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^ *```([^\s`]*)[^\n`]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"in a file `([\w/]+\.py)`")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
PROGRAMS = ("fairfold", "python", "pip", "make", "flwr", "flower-supernode", "torchrun")
TOLERANCE = 0.25
"""Between what a page shows and what is said here. Other processors round otherwise, and a page need not be written
anew with every small change of a recipe; who is named, and every whole number, must be the same."""


@dataclass(frozen=True)
class Block:
    """What stands between two fences of a page."""

    page: str
    kind: str
    body: str
    before: str
    """The last paragraph before it."""

    @property
    def commands(self) -> list[str]:
        """Lines that are typed; none of a synopsis or a drawing."""
        if self.kind not in ("", "sh", "bash"):
            return []
        lines = [line.strip() for line in self.body.replace("\\\n", " ").splitlines()]
        return [line for line in lines if line.removeprefix("PYTHONPATH=. ").split(" ")[0] in PROGRAMS]

    @property
    def synopsis(self) -> bool:
        """Whether it shows how commands are written, and is none."""
        return bool(re.search(r"(?<!\S)\[|[|…]|\.\.\.", self.body))


def pages() -> list[Path]:
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for block in FENCE.finditer(text):
        before = text[end : block.start()].strip().rpartition("\n\n")[2]
        found.append(Block(name_of(page), block[1], block[2], before))
        end = block.end()
    return found


class Reader:
    """Somebody who types a page, and remembers what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.printed = folder, dict[str, Any](), list[str]()

    def python(self, block: Block) -> None:
        """Run a block, or write the file that it is."""
        if file := FILE.search(block.before):
            (self.folder / file[1]).write_text(block.body)
            return
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.body, block.page, "exec"), self.names)
        self.printed += output.getvalue().splitlines()

    def types(self, line: str, extra: list[str]) -> None:
        """Run a command of fairfold in this process; RUN is the last run."""
        words = shlex.split(line.removeprefix("PYTHONPATH=. "), comments=True)
        runs = [printed.rpartition("Results are in ")[2] for printed in self.printed if "Results are in " in printed]
        words = [runs[-1] if word == "RUN" else word for word in words]
        done = CliRunner().invoke(app, [*words[1:], *extra], env={"COLUMNS": "160"})
        printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.output)
        assert done.exit_code == 0, f"{line}\n{printed}\n{done.exception!r}"
        self.printed += printed.splitlines()

    def expect_output(self, block: Block) -> None:
        """Every line of the block was printed, but for small differences in its numbers."""
        for line in filter(str.strip, block.body.splitlines()):
            assert any(alike(line, printed) for printed in self.printed), (
                f"{block.page}: nobody says {line!r}:\n"
                + "\n".join(printed for printed in self.printed if shape(printed)[:12] == shape(line)[:12])
            )


def shape(line: str) -> str:
    return NUMBER.sub("#", re.sub(r"[\s+-]+", " ", line)).strip()


def alike(line: str, printed: str) -> bool:
    if shape(line) != shape(printed):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(printed), strict=True)
    return all(close(one, other) for one, other in pairs)


def close(one: str, other: str) -> bool:
    """Equal, or nearly so where it was measured: a number with a point."""
    if "." not in one + other:
        return one == other
    first, second = (float(word.replace(",", "")) for word in (one, other))
    step = 10.0 ** -len(one.partition(".")[2])
    return abs(first - second) <= max(2 * step, 0.02, TOLERANCE * abs(first))


# -- a small world -----------------------------------------------------------------------------------------------------


def furnish(folder: Path) -> None:
    """Data sets of the published names in the published forms, of a few users, and files that pages suppose."""
    draw, users, items = random.Random(0), range(1, 25), range(1, 121)
    many = range(1, 121)  # as many as the sums of private devices need
    liked = {user: draw.sample(items, 20) for user in many}
    data = folder / "data"
    _write(data / "ml-100k" / "u.data", (f"{u}\t{i}\t{draw.randint(1, 5)}\t0" for u in users for i in liked[u]))
    _write(data / "ml-100k" / "u.item", (f"{item}|Film {item} (1990)|||" for item in items))
    _write(data / "ml-1m" / "ratings.dat", (f"{u}::{i}::{draw.randint(1, 5)}::0" for u in many for i in liked[u]))
    _write(data / "ml-1m" / "movies.dat", (f"{item}::Film {item} (1990)::Drama" for item in items))
    for name, part in (("train", slice(0, 14)), ("test", slice(14, None))):
        words = (" ".join(map(str, [u - 1, *(i - 1 for i in liked[u][part])])) for u in users)
        _write(data / "goodreads-100" / f"{name}.txt", words)
    for name, count in (("train", 60), ("t10k", 20)):
        pixels = bytes(draw.randrange(256) for _ in range(28 * 28)) * count
        _bytes(data / "mnist" / f"{name}-images-idx3-ubyte", struct.pack(">4i", 2051, count, 28, 28) + pixels)
        labels = bytes(number % 10 for number in range(count))
        _bytes(data / "mnist" / f"{name}-labels-idx1-ubyte", struct.pack(">2i", 2049, count) + labels)
    rows = (f"{u},{i},{draw.randint(1, 5)}" for u in users for i in liked[u])
    _write(folder / "here" / "ratings.csv", ["user,item,rating", *rows])
    _write(folder / "here" / "my-items.txt", map(str, liked[1][:5]))
    _bytes(folder / "here" / "load.py", (ROOT / "examples" / "serving" / "load.py").read_bytes())


def _write(path: Path, lines: Any) -> None:
    _bytes(path, "".join(f"{line}\n" for line in lines).encode())


def _bytes(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@contextlib.contextmanager
def at_home(folder: Path) -> Any:
    """In the furnished folder, with its data and a cache of its own."""
    furnish(folder)
    kept, place, loaded = dict(os.environ), Path.cwd(), set(sys.modules)
    os.environ |= {"FAIRFOLD_DATA": str(folder / "data"), "FAIRFOLD_CACHE": str(folder / "cache"), "COLUMNS": "160"}
    os.chdir(folder / "here")
    sys.path.insert(0, str(folder / "here"))
    try:
        yield folder / "here"
    finally:
        os.chdir(place)
        sys.path.remove(str(folder / "here"))
        os.environ.clear()
        os.environ.update(kept)
        for name in set(sys.modules) - loaded:  # what pages wrote
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]
