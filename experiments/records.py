"""Records of cells: outcomes, fingerprints, and one CSV file of finished cells per experiment.

Worker processes write each finished cell to a small file under ``.under-way``. The main process merges these into the
one file; until then they are read beside it, so a run that is killed loses none.
"""

import csv
import hashlib
import io
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairfold import __version__
from fairfold.atomic_io import locked, write_atomically
from fairfold.checksums import (
    MAX_FILE_BYTES,
    PARSE_ERRORS,
    Damaged,
    line_with_checksum,
    parse_json_object,
    parse_line,
    parse_with_checksum,
    with_checksum,
)

if TYPE_CHECKING:
    from experiments.experiment import Cell


FORMAT = 1
"""Raised whenever a cell of the same settings would run differently: stored cells are then run again."""

CELLS, TRIALS, UNDER_WAY = "cells", "trials", ".under-way"

MEASURED_METRICS = "NDCG@20", "MSE", "accuracy"
"""Metrics that are means over users or test images."""

Record = dict[str, Any]
"""A row: label, fingerprint, versions, table, row, column, kind, seed, settings, and the outcome."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one cell for one seed."""

    state: Literal["done", "N/A", "no data", "broken"] = "done"  # N/A: the method cannot serve the capacities
    reason: str = ""  # why it is not done
    best: float | None = None  # over the evaluations
    best_round: float | None = None
    last: float | None = None
    last_round: float | None = None
    curve: tuple[tuple[float, float], ...] = ()  # round (or what runs along the x axis) and value of all evaluations
    seconds: float = 0.0  # all sittings together
    facts: dict[str, Any] = field(default_factory=dict)  # what else was found, by name
    data: dict[str, Any] = field(default_factory=dict)  # what identifies the data
    by_user: dict[str, str] = field(default_factory=dict)  # what each user got, packed, by measure: see paired.py

    @classmethod
    def of_curve(cls, curve: list[tuple[float, float]], metric: str, **others: Any) -> "Outcome":
        """Build from evaluations in order."""
        sign = 1 if metric == "MSE" else -1
        best = min(curve, key=lambda point: (math.isnan(point[1]), sign * point[1]))  # what diverged is never best
        return cls(
            best=best[1], best_round=best[0], last=curve[-1][1], last_round=curve[-1][0], curve=tuple(curve), **others
        )

    @classmethod
    def of_value(cls, value: float, at: float, **others: Any) -> "Outcome":
        """Build from a single value, of round ``at``."""
        return cls(best=value, best_round=at, last=value, last_round=at, **others)


def fingerprint(kind: str, values: dict[str, Any], seed: int, data: dict[str, Any]) -> str:
    """Identity of a cell: SHA-256 of its canonical settings, seed and the fingerprint of its data."""
    content = {"format": FORMAT, "kind": kind, "values": values, "seed": seed, "data": data}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_name(label: str) -> str:
    """A cell's label as the name of a file."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", label).strip("-")


class Watcher:
    """Callbacks of an experiment; every method may be overridden."""

    def on_plan(self, kept: int, lacking: int, to_run: "list[Cell]") -> None:
        """Called before the first cell: how many are stored, how many lack data, and which will run."""

    def on_progress(self, cell: "Cell", share: float) -> None:
        """Called with the share of a cell that is done."""

    def on_cell(self, cell: "Cell", outcome: Outcome) -> None:
        """Called when a cell is finished."""

    def on_note(self, text: str) -> None:
        """Called with a message for the user."""


def new_record(label: str, mark: str, described: dict[str, Any], outcome: Outcome) -> Record:
    """Record of a cell that has just finished."""
    return {"label": label, "fingerprint": mark, **software(), **described, "outcome": asdict(outcome)}


def is_traced(record: Record) -> bool:
    """Whether a record names the code and the hardware; older ones do not."""
    return bool(record.get("torch") and record.get("commit") and record["outcome"]["facts"].get("machine"))


def is_complete(record: Record) -> bool:
    """Whether a record is traced and has values by user."""
    if not record:
        return False
    outcome = record["outcome"]
    measured = outcome["state"] == "done" and (
        record["kind"] == "fedrec" or outcome["facts"].get("metric") in MEASURED_METRICS
    )
    return is_traced(record) and bool(outcome.get("by_user") or not measured)


def is_of_this_code(record: Record) -> bool:
    """Whether a record is of the checked-out commit, without local changes."""
    now = software()["commit"]
    return bool(now) and not str(now).endswith(CHANGED) and record.get("commit") == now


def outcome_from_record(record: Record) -> Outcome:
    """The outcome of a record."""
    kept = record["outcome"]
    return Outcome(**kept | {"curve": tuple((float(x), float(y)) for x, y in kept["curve"])})


def save_record(place: Path, record: Record, name: str = CELLS) -> None:
    """Save a finished cell for :meth:`Records.join`; may be called by any process."""
    waiting = place / UNDER_WAY
    with locked(place):  # or the folder might go as empty before the file is in it
        waiting.mkdir(exist_ok=True)
        write_atomically(waiting / f"{name}-{file_name(record['label'])}.json", with_checksum(record))


class Records:
    """The records in an experiment's folder: readable ones by label, and why others are damaged."""

    def __init__(self, place: Path, name: str = CELLS) -> None:
        self.place = place
        self.by_label = dict[str, Record]()
        self.damaged = list[str]()
        self._name, self._path = name, place / f"{name}.csv"
        with locked(place):
            self._read()

    def outcome(self, label: str, mark: str) -> Outcome | None:
        """Outcome of a cell; None if it is not stored for these settings and data."""
        record = self.by_label.get(label)
        return outcome_from_record(record) if record is not None and record["fingerprint"] == mark else None

    def join(self, more: Iterable[Record] = ()) -> None:
        """Merge the file, what processes have saved, and ``more`` records into one file."""
        added = {record["label"]: record for record in more}
        with locked(self.place):
            waiting = self._read()  # again: another process may have joined its own
            if waiting or added:
                self.by_label |= added
                rows = [record_to_row(self.by_label[label]) for label in sorted(self.by_label)]
                write_atomically(self._path, "".join([f"{HEADER}\n", *rows]).encode())
            for path in waiting:
                path.unlink()
            with suppress(OSError):  # what is under way here stays
                (self.place / UNDER_WAY).rmdir()

    def _read(self) -> list[Path]:
        """Read the file, then the newer cells that wait to be merged; returns the paths of the latter."""
        self.by_label, self.damaged = {}, []
        waiting = sorted((self.place / UNDER_WAY).glob(f"{self._name}-*.json"))
        if (former := self._path.with_suffix(".jsonl")).exists():
            self.damaged.append(f"{former.name} is of a former version, and not read")
        rows = self._path.read_bytes().removesuffix(b"\n").split(b"\n") if self._path.exists() else []
        for number, row in enumerate(rows, start=1):
            if number > 1 or row != HEADER.encode():
                self._take(lambda row=row: row_to_record(row), f"{self._path.name}, line {number},")  # type: ignore[misc]
        for path in waiting:
            self._take(lambda path=path: parse_with_checksum(path.read_bytes()), path.name)  # type: ignore[misc]
        return waiting

    def _take(self, read: Callable[[], Record], where: str) -> None:
        try:
            record = read()
            outcome_from_record(record)
            self.by_label[str(record["label"])] = record | {"fingerprint": str(record["fingerprint"])}
        except PARSE_ERRORS as error:
            self.damaged.append(f"{where} is unreadable ({type(error).__name__}: {error})")


# -- records as rows of CSV --------------------------------------------------------------------------------------------
# Structured values (settings, curve, facts, users) are JSON in one column. A row is one line with a checksum, so a
# damaged one costs no other.

LABELS = "label", "table", "row", "column"
MADE_BY = "kind", "fairfold", "torch", "commit"
NUMBERS = "best", "best_round", "last", "last_round", "seconds"
PARTS = "curve", "facts", "data", "by_user"

COLUMNS = (*LABELS, "seed", "state", *NUMBERS, "reason", *PARTS, "settings", *MADE_BY, "fingerprint")
HEADER = ",".join([*COLUMNS, "checksum"])

_JSON = {"seed", *NUMBERS, "reason", *PARTS, "settings"}
_EMPTY: dict[str, Any] = {"reason": "", "curve": [], "facts": {}, "data": {}, "by_user": {}}
_NOTHING: list[Any] = [None, "", [], (), {}]


def record_to_row(record: dict[str, Any]) -> str:
    """Serialize a record as a CSV line with a checksum."""
    columns = record | record["outcome"]
    cells = [_cell(name, columns.get(name)) for name in COLUMNS]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return line_with_checksum(text.getvalue(), ",")


def _cell(name: str, value: Any) -> Any:
    if value in _NOTHING:
        return ""
    return json.dumps(value) if name in _JSON else value


def row_to_record(line: bytes) -> dict[str, Any]:
    """Parse a CSV line; :class:`~fairfold.checksums.Damaged` if its checksum is wrong."""
    text = parse_line(line, ",")
    if text is None:
        raise Damaged("another checksum than it says, or none")
    usual = csv.field_size_limit(MAX_FILE_BYTES)  # what every user of a large data set got is one text
    try:
        cells = next(csv.reader([text]))
    finally:
        csv.field_size_limit(usual)
    columns = dict(zip(COLUMNS, cells, strict=True))
    read = parse_json_object(
        "{" + ",".join(f'"{name}":{columns[name]}' for name in COLUMNS if name in _JSON and columns[name]) + "}"
    )
    outcome = {"state": columns["state"]} | {name: read.get(name, _EMPTY.get(name)) for name in (*NUMBERS, *_EMPTY)}
    made = {"commit": columns["commit"] or None} | {name: columns[name] for name in MADE_BY if columns[name]}
    asked = {"settings": read.get("settings", {})} | ({"seed": read["seed"]} if "seed" in read else {})
    return {name: columns[name] for name in (*LABELS, "fingerprint")} | made | asked | {"outcome": outcome}


# -- hardware and software ---------------------------------------------------------------------------------------------

ZEN = (
    (23, range(0x30), "Zen"), (23, range(0x30, 0x100), "Zen 2"), (25, range(0x10), "Zen 3"),
    (25, range(0x10, 0x20), "Zen 4"), (25, range(0x20, 0x60), "Zen 3"), (25, range(0x60, 0x100), "Zen 4"),
    (26, range(0x100), "Zen 5"),
)  # fmt: skip
"""AMD's generations by family and model number: virtual machines often say no more than "AMD EPYC"."""


CHANGED = "-changed"
"""Suffix of a commit with local changes."""


@cache
def machine(*, gpu: bool = False) -> str:
    """Name of the hardware, e.g. ``2-core Zen 4 (AMD EPYC)``, preceded by the GPU if it is used."""
    import torch

    name, family, model = _processor(Path("/proc/cpuinfo"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    named = (word for of, models, word in ZEN if "AMD" in name and of == family and model in models)
    generation = next(named, "")
    processor = f"{cores}-core {generation} ({name})" if generation else f"{cores}-core {name}"
    return f"{torch.cuda.get_device_name()}, {processor}" if gpu else processor


def _processor(path: Path) -> tuple[str, int, int]:
    facts: dict[str, str] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    numbers = [int(facts.get(key, "-1") or -1) for key in ("cpu family", "model")]
    return facts.get("model name") or platform.processor() or platform.machine(), numbers[0], numbers[1]


@cache
def software() -> dict[str, str | None]:
    """Versions of fairfold and torch, and the commit of the checkout."""
    import torch

    return {"fairfold": __version__, "torch": str(torch.__version__), "commit": commit(Path(__file__).parents[1])}


def commit(checkout: Path) -> str | None:
    """The checked-out commit, with :data:`CHANGED` if there are local changes; None outside of a checkout."""
    if not (checkout / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    git = ["git", "-C", str(checkout)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        same = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", "src", "native", "experiments", ":!experiments/results"],
            capture_output=True,
            check=False,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found if same.returncode == 0 else f"{found}{CHANGED}"
