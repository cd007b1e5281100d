"""The folder a run leaves behind.

``settings.toml`` as run · ``metrics.csv`` a line a round · ``run.log`` · ``checkpoints/`` the last two ·
``result.json`` the closing table · ``model.safetensors`` the server's vector, with what is needed to read it.
"""

import contextlib
import csv
import io
import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from fairfold.errors import CannotWrite, InvalidSettings
from fairfold.federation.settings import Settings
from fairfold.files import TEMPORARY, remove_leftovers, write_atomically
from fairfold.runs import popularity
from fairfold.runs.settings import to_toml
from fairfold.runs.tensors import write_tensors
from fairfold.simulate.result import Result, RoundReport
from fairfold.subspace import parse_scheme
from fairfold.version import __version__

SETTINGS, METRICS, RESULT, MODEL, LOG = "settings.toml", "metrics.csv", "result.json", "model.safetensors", "run.log"
ROUND_COLUMNS = ["round", "seconds", "clients", "bytes_down", "bytes_up", "server"]


class RunFolder:
    """Writes a run as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    @classmethod
    def create(cls, settings: Settings, path: Path | None = None, *, again: bool = False) -> "RunFolder":
        """A new folder, ``runs/DATE-TIME-DATA`` unless a path is given; never one that holds something.

        Args:
            settings: Of the run.
            path: Of the folder.
            again: Take a folder that holds a run.
        """
        path = _free_name(settings) if path is None else path
        cls(path).require_free(again=again)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidSettings(f"--out {path}: {error.strerror}", "a folder to write to", "Name another.") from None
        return cls(path)

    def begin(self, settings: Settings, history: list[RoundReport]) -> None:
        """Write the settings as run, the head of the metrics, and the rounds before those that are to come."""
        remove_leftovers(self.path)
        if self.was_refused():
            (self.path / RESULT).unlink()
        write_atomically(self.path / SETTINGS, to_toml(settings).encode())
        self._write_metrics(settings, history)

    def require_free(self, *, again: bool = False) -> None:
        """Refuse a folder that holds something else than a run to go on with (``again``) or a run that could not be."""
        usable = self.was_refused() or (again and self.holds_a_run())
        if self.path.exists() and not usable and (not self.path.is_dir() or _content(self.path)):
            raise InvalidSettings(
                f"--out {self.path}", "a new or empty folder", "Name another, remove it, or go on with --resume."
            )

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / SETTINGS).is_file()

    def was_refused(self) -> bool:
        """Whether all there is here is a note that a run could not be."""
        try:
            return "refused" in json.loads((self.path / RESULT).read_bytes())
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here. The system drops the lock of a process that is killed."""
        try:
            import fcntl
        except ImportError:  # a system without it: nothing guards the folder
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidSettings(
                    f"--out {self.path}, where another process is training", "a folder of its own", "Name another."
                ) from None
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Send what fairfold logs to the folder; the terminal sees it only where the caller has set logging up."""
        handler = logging.FileHandler(self.path / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("fairfold")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()

    def _write_metrics(self, settings: Settings, history: list[RoundReport]) -> None:
        self._columns = [*ROUND_COLUMNS, *(str(capacity) for capacity in parse_scheme(settings.capacities))]
        rows = [self._columns, *(_row(report, len(self._columns)) for report in history)]
        write_atomically(self.path / METRICS, _lines(rows))

    def refuse(self, settings: Settings, reason: str) -> None:
        """Write down that the method cannot serve these settings, for the report to say so."""
        write_atomically(self.path / SETTINGS, to_toml(settings).encode())
        write_atomically(self.path / RESULT, (json.dumps({"refused": reason}, indent=2) + "\n").encode())

    def note(self, report: RoundReport) -> None:
        """Append one round to the metrics; a line that a kill cuts short is written anew when the run goes on."""
        try:
            with (self.path / METRICS).open("ab") as file:
                file.write(_lines([_row(report, len(self._columns))]))
        except OSError as error:
            raise CannotWrite(
                f"{self.path / METRICS}: {error.strerror}", "a file that can be written", "Go on with --resume."
            ) from error

    def finish(self, result: Result, seconds: float, stopped: str, data: dict[str, Any]) -> None:
        """Write the closing table and the model."""
        settings = result.settings
        self._write_metrics(settings, result.history)  # the last round's quality may have come after its line
        smaller_is_better = result.metric == "MSE"
        evaluated = [report for report in result.history if report.quality is not None]
        best = min(evaluated, key=lambda report: _server(report) * (1 if smaller_is_better else -1), default=None)
        summary = {
            "metric": result.metric,
            "rounds": result.state.round_number,
            "stopped": stopped,
            "seconds": round(seconds, 3),
            "server": {"quality": result.quality, "references": dict(result.references)},
            "best": None if best is None else {"round": best.round_number, "quality": _server(best)},
            "groups": [vars(group) | {"references": dict(group.references)} for group in result.groups],
            "rejections": dict(result.rejections),
            "popularity": popularity.facts_of(result),
            "data": data,
            "versions": {"fairfold": __version__, "torch": torch.__version__},
        }
        write_atomically(self.path / RESULT, (json.dumps(summary, indent=2) + "\n").encode())
        metadata = {"settings": settings.model_dump_json(), "round": str(result.state.round_number)}
        write_tensors(self.path / MODEL, result.state.full, metadata)


def _free_name(settings: Settings) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = Path(settings.data).name or "data"
    path = Path("runs") / f"{stamp}-{name}"
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stamp}-{name}-{number}")
    return path


def _content(path: Path) -> list[Path]:
    """What a folder holds, but for what a killed run may have left before its settings were written."""
    return [
        entry
        for entry in path.iterdir()
        if entry.suffix != TEMPORARY and not (entry.name == "checkpoints" and not any(entry.iterdir()))
    ]


def _server(report: RoundReport) -> float:
    assert report.quality is not None
    return report.quality.server


def _row(report: RoundReport, columns: int) -> list[Any]:
    row = [report.round_number, f"{report.seconds:.6f}", report.clients, report.bytes_down, report.bytes_up]
    if report.quality is None:
        return row + [""] * (columns - len(row))
    return row + ["" if value is None else value for value in (report.quality.server, *report.quality.groups)]


def _lines(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
