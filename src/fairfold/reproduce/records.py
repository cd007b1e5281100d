"""What came of a cell, what makes two cells the same, and the finished ones, kept as one CSV file with a row each.

Processes that run cells side by side leave each finished one as a small file under ``.under-way``. Whoever started them
joins these into the one file; until then they are read beside it, so a run that is killed loses none.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairfold.files import locked, write_atomically
from fairfold.reproduce.machine import CHANGED, software
from fairfold.reproduce.rows import HEADER, record_in, row_of
from fairfold.sealed import SENSELESS, sealed_values, values_in

if TYPE_CHECKING:
    from fairfold.reproduce.experiment import Cell

FORMAT = 1
"""Raised whenever a cell of the same settings would be run in another way: what was kept is then run again."""

CELLS, TRIALS, UNDER_WAY = "cells", "trials", ".under-way"

JUDGED = "NDCG@20", "MSE", "accuracy"
"""Metrics that are means over users, or over test images."""

Record = dict[str, Any]
"""A row: label, fingerprint, versions, table, row, column, kind, seed, settings, and the outcome."""


@dataclass(frozen=True)
class Outcome:
    """One cell for one seed."""

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
        """From evaluations in order."""
        sign = 1 if metric == "MSE" else -1
        best = min(curve, key=lambda point: (math.isnan(point[1]), sign * point[1]))  # what diverged is never best
        return cls(
            best=best[1], best_round=best[0], last=curve[-1][1], last_round=curve[-1][0], curve=tuple(curve), **others
        )

    @classmethod
    def of_value(cls, value: float, at: float, **others: Any) -> "Outcome":
        """From a single value, found in round ``at``."""
        return cls(best=value, best_round=at, last=value, last_round=at, **others)


def fingerprint(kind: str, values: dict[str, Any], seed: int, data: dict[str, Any]) -> str:
    """What makes two cells the same: what their settings mean, seed and the data's own checksum."""
    content = {"format": FORMAT, "kind": kind, "values": values, "seed": seed, "data": data}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_name(label: str) -> str:
    """A cell's label as the name of a file."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", label).strip("-")


class Watcher:
    """Told how an experiment goes; every method may be left as it is."""

    def on_plan(self, kept: int, lacking: int, to_run: "list[Cell]") -> None:
        """Before the first cell: how many are kept, how many have no data, and what is to be run."""

    def on_share(self, cell: "Cell", share: float) -> None:
        """How much of a cell is done."""

    def on_cell(self, cell: "Cell", outcome: Outcome) -> None:
        """A cell is over."""

    def on_note(self, text: str) -> None:
        """Something a person should know."""


def new_record(label: str, mark: str, described: dict[str, Any], outcome: Outcome) -> Record:
    """A cell that was finished just now, with its fingerprint, described for whoever reads the file."""
    return {"label": label, "fingerprint": mark, **software(), **described, "outcome": asdict(outcome)}


def traced(record: Record) -> bool:
    """Whether a record says by which code, and where, it came about: older ones do not."""
    return bool(record.get("torch") and record.get("commit") and record["outcome"]["facts"].get("machine"))


def whole(record: Record) -> bool:
    """Whether a record says that, and what each user got."""
    if not record:
        return False
    outcome = record["outcome"]
    judged = outcome["state"] == "done" and (record["kind"] == "fedrec" or outcome["facts"].get("metric") in JUDGED)
    return traced(record) and bool(outcome.get("by_user") or not judged)


def of_this_code(record: Record) -> bool:
    """Whether a record was made by the commit that is checked out, with nothing changed since."""
    now = software()["commit"]
    return bool(now) and not str(now).endswith(CHANGED) and record.get("commit") == now


def outcome_of(record: Record) -> Outcome:
    """What came of a kept cell."""
    kept = record["outcome"]
    return Outcome(**kept | {"curve": tuple((float(x), float(y)) for x, y in kept["curve"])})


def keep(place: Path, record: Record, name: str = CELLS) -> None:
    """Leave a finished cell for :meth:`Records.join`; any process may."""
    waiting = place / UNDER_WAY
    with locked(place):  # or the folder might go as empty before the file is in it
        waiting.mkdir(exist_ok=True)
        write_atomically(waiting / f"{name}-{file_name(record['label'])}.json", sealed_values(record))


class Records:
    """What is kept in an experiment's folder: all that can be read, by label, and what is damaged, and why."""

    def __init__(self, place: Path, name: str = CELLS) -> None:
        self.place, self.by_label, self.damaged = place, dict[str, Record](), list[str]()
        self._name, self._path = name, place / f"{name}.csv"
        with locked(place):
            self._read()

    def outcome(self, label: str, mark: str) -> Outcome | None:
        """Of a cell; None where it is not kept, or is kept for other settings or data."""
        record = self.by_label.get(label)
        return outcome_of(record) if record is not None and record["fingerprint"] == mark else None

    def join(self, more: Iterable[Record] = ()) -> None:
        """Write one file of what it holds, what processes have left, and ``more``."""
        added = {record["label"]: record for record in more}
        with locked(self.place):
            waiting = self._read()  # again: another process may have joined its own
            if waiting or added:
                self.by_label |= added
                rows = [row_of(self.by_label[label]) for label in sorted(self.by_label)]
                write_atomically(self._path, "".join([f"{HEADER}\n", *rows]).encode())
            for path in waiting:
                path.unlink()
            with suppress(OSError):  # what is under way here stays
                (self.place / UNDER_WAY).rmdir()

    def _read(self) -> list[Path]:
        """Read the file, then what waits to be joined, which is newer; returns the latter's paths."""
        self.by_label, self.damaged = {}, []
        waiting = sorted((self.place / UNDER_WAY).glob(f"{self._name}-*.json"))
        if (former := self._path.with_suffix(".jsonl")).exists():
            self.damaged.append(f"{former.name} is of a former version, and not read")
        rows = self._path.read_bytes().removesuffix(b"\n").split(b"\n") if self._path.exists() else []
        for number, row in enumerate(rows, start=1):
            if number > 1 or row != HEADER.encode():
                self._take(lambda row=row: record_in(row), f"{self._path.name}, line {number},")  # type: ignore[misc]
        for path in waiting:
            self._take(lambda path=path: values_in(path.read_bytes()), path.name)  # type: ignore[misc]
        return waiting

    def _take(self, read: Callable[[], Record], where: str) -> None:
        try:
            record = read()
            outcome_of(record)
            self.by_label[str(record["label"])] = record | {"fingerprint": str(record["fingerprint"])}
        except SENSELESS as error:
            self.damaged.append(f"{where} is unreadable ({type(error).__name__}: {error})")
