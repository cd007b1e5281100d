"""The folder a run leaves behind.

``settings.toml`` as run · ``metrics.csv`` a line per round · ``run.log`` · ``checkpoints/`` the last two ·
``model.safetensors`` the server's tensors · ``result.json`` the closing table, which comes last: a run without it is
unfinished. Each of them holds its own checksum, so that whoever reads one can tell whether it is what was written.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fairfold import files
from fairfold.errors import InvalidSettings
from fairfold.runs.read import LOG, METRICS, MODEL, RESULT, SETTINGS, columns_of, lines_of, read_result, sealed_settings
from fairfold.runs.tensors import write_sealed
from fairfold.runs.units import popularity_facts
from fairfold.sealed import sealed_values
from fairfold.settings import Settings
from fairfold.simulate.result import Result, RoundReport
from fairfold.version import __version__


class RunFolder:
    """Writes a run as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    @classmethod
    def create(cls, settings: Settings, path: Path | None = None, *, again: bool = False) -> "RunFolder":
        """A new folder, ``runs/DATE-TIME-DATA`` unless a path is given, or with ``again`` one that holds a run."""
        path = _free_name(settings) if path is None else path
        cls(path).require_free(again=again)
        files.make_folder(path)
        return cls(path)

    def begin(self, settings: Settings, history: list[RoundReport]) -> None:
        """Write the settings as run, then all else that a run begins with: from here on it can be gone on with.

        A closing table of an earlier end goes first of all: from the next round on it would not be this run's.
        """
        files.remove_leftovers(self.path)
        if (self.path / RESULT).exists():
            files.remove(self.path / RESULT)
            with files.saying(self.path):
                files.sync_folder(self.path)
        files.write_atomically(self.path / SETTINGS, sealed_settings(settings))
        with files.saying(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        self._write_metrics(settings, history)

    def require_free(self, *, again: bool = False) -> None:
        """Refuse a folder that holds something; or, with ``again``, one that holds no run to go on with.

        Where a note says that a run could not be, another may take its place.
        """
        if again and not self.holds_a_run():
            raise InvalidSettings(
                f"--resume with --out {self.path}, which holds no {SETTINGS}",
                "the folder of a run",
                "Check the name, or leave out --resume to train from the start.",
            )
        usable = again or self.was_refused()
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
            return "refused" in read_result(self.path)
        except InvalidSettings:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training here. The system drops the lock of a process that is killed."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(files.locked(self.path, wait=False))
            except BlockingIOError:
                raise InvalidSettings(
                    f"--out {self.path}, where another process is training", "a folder of its own", "Name another."
                ) from None
            yield

    @contextlib.contextmanager
    def logging(self, form: str = "text") -> Iterator[None]:
        """Send what fairfold logs to the folder; the terminal sees it only where the caller has set logging up."""
        with files.saying(self.path / LOG):
            handler = _Log(self.path / LOG, encoding="utf-8")
        plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        handler.setFormatter(_Json() if form == "json" else plain)
        logger = logging.getLogger("fairfold")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            with contextlib.suppress(OSError):
                handler.close()

    def _write_metrics(self, settings: Settings, history: list[RoundReport]) -> None:
        self._columns = columns_of(settings)
        head = (",".join(self._columns) + "\n").encode()
        files.write_atomically(self.path / METRICS, head + lines_of(self._row(report) for report in history))

    def _row(self, report: RoundReport) -> list[Any]:
        quality = report.quality
        found = [report.round_number, f"{report.seconds:.6f}", report.clients, report.bytes_down, report.bytes_up]
        found += [] if quality is None else [quality.server, *quality.groups]
        found = ["" if value is None else value for value in found]
        return found + [""] * (len(self._columns) - 1 - len(found))

    def refuse(self, settings: Settings, reason: str) -> None:
        """Write down that the method cannot serve these settings, for the report to say so."""
        files.write_atomically(self.path / SETTINGS, sealed_settings(settings))
        files.write_atomically(self.path / RESULT, sealed_values({"refused": reason}, indent=2))

    def note(self, report: RoundReport) -> None:
        """Append one round to the metrics; a line that a kill cuts short is written anew when the run goes on."""
        with files.saying(self.path / METRICS), (self.path / METRICS).open("ab") as file:
            file.write(lines_of([self._row(report)]))

    def finish(self, result: Result, seconds: float, stopped: str, data: dict[str, Any]) -> None:
        """Write the model, then the closing table, which says that the run is finished."""
        settings = result.settings
        self._write_metrics(settings, result.history)  # the last round's quality may have come after its line
        evaluated = [(one.round_number, one.quality.server) for one in result.history if one.quality is not None]
        sign = 1 if settings.smaller_is_better else -1
        best = min(evaluated, key=lambda pair: sign * pair[1], default=None)
        summary = {
            "metric": result.metric,
            "rounds": result.state.round_number,
            "stopped": stopped,
            "seconds": round(seconds, 3),
            "server": {
                "quality": result.quality,
                "references": dict(result.references),
                "differences": dict(result.differences),
            },
            "best": None if best is None else {"round": best[0], "quality": best[1]},
            "groups": [vars(group) | {"references": dict(group.references)} for group in result.groups],
            "rejections": dict(result.rejections),
            "told": result.told,
            "privacy": dict(result.privacy),
            "popularity": popularity_facts(result),
            "data": data,
            "versions": {"fairfold": __version__, "torch": torch.__version__},
        }
        metadata = {"settings": json.dumps(settings.plain()), "round": str(result.state.round_number)}
        write_sealed(self.path / MODEL, result.state.full, metadata)
        files.write_atomically(self.path / RESULT, sealed_values(summary, indent=2))


def _free_name(settings: Settings) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = Path(settings.data.name).name or "data"
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
        if entry.suffix != files.TEMPORARY and not (entry.name == "checkpoints" and not any(entry.iterdir()))
    ]


class _Json(logging.Formatter):
    """An object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """When, how grave, of which part, and what."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told = {"time": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps(told | ({"error": self.formatException(record.exc_info)} if record.exc_info else {}))


class _Log(logging.FileHandler):
    """A line that cannot be written is lost: no result depends on it, and whatever does says that the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing."""
