"""The finished cells of an experiment, kept as one file with a line each.

Processes that run cells side by side leave each finished one as a small file under ``.under-way``. Whoever started them
joins these into the one file; until then they are read beside it, so a run that is killed loses none.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairfold.files import locked, write_atomically
from fairfold.reproduce.machine import software
from fairfold.reproduce.outcome import Outcome, file_name

CELLS, UNDER_WAY = "cells", ".under-way"

Record = dict[str, Any]
"""A line: label, fingerprint, versions, table, row, column, kind, seed, settings, and the outcome."""


def new_record(label: str, mark: str, described: dict[str, Any], outcome: Outcome) -> Record:
    """A cell that was finished just now.

    Args:
        label: Its own within the experiment.
        mark: Its fingerprint.
        described: Table, row, column, settings and seed, for whoever reads the file.
        outcome: What came of it.
    """
    return {"label": label, "fingerprint": mark, **software(), **described, "outcome": asdict(outcome)}


def outcome_of(record: Record) -> Outcome:
    """What came of a kept cell."""
    kept = record["outcome"]
    return Outcome(**kept | {"curve": tuple((float(x), float(y)) for x, y in kept["curve"])})


def keep(place: Path, record: Record, name: str = CELLS) -> None:
    """Leave a finished cell for :meth:`Records.join`; any process may."""
    waiting = place / UNDER_WAY
    with locked(place):  # or the folder might go as empty before the file is in it
        waiting.mkdir(exist_ok=True)
        write_atomically(waiting / f"{name}-{file_name(record['label'])}.json", _line(record))


class Records:
    """What is kept in an experiment's folder.

    Attributes:
        place: The folder.
        by_label: All that can be read.
        damaged: Where something cannot be read, and why.
    """

    def __init__(self, place: Path, name: str = CELLS) -> None:
        self.place, self.by_label, self.damaged = place, dict[str, Record](), list[str]()
        self._name, self._path = name, place / f"{name}.jsonl"
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
                lines = [_line(self.by_label[label]) for label in sorted(self.by_label)]
                write_atomically(self._path, b"".join(lines))
            for path in waiting:
                path.unlink()
            with suppress(OSError):  # what is under way here stays
                (self.place / UNDER_WAY).rmdir()

    def _read(self) -> list[Path]:
        """Read the file, then what waits to be joined, which is newer; returns the latter's paths."""
        self.by_label, self.damaged = {}, []
        waiting = sorted((self.place / UNDER_WAY).glob(f"{self._name}-*.json"))
        for path in (self._path, *waiting):
            lines = path.read_bytes().splitlines() if path.exists() else []
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    outcome_of(record)
                    self.by_label[str(record["label"])] = record | {"fingerprint": str(record["fingerprint"])}
                except (ValueError, KeyError, TypeError) as error:
                    self.damaged.append(f"{path.name}, line {number}, is unreadable ({type(error).__name__}: {error})")
        return waiting


def _line(record: Record) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()
