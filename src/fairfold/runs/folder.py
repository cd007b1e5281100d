"""The folder of a run: written as the run goes, and read back.

``settings.toml`` as run · ``metrics.csv`` a line per round · ``run.log`` · ``checkpoints/`` the last two ·
``model.safetensors`` the server's tensors · ``result.json`` the result, written last: a run without it is unfinished.
Each file holds its own checksum, and readers refuse a damaged one.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fairfold import __version__, atomic_io, checksums
from fairfold.config import Settings
from fairfold.config.files import load_settings, to_toml
from fairfold.errors import InvalidSettings
from fairfold.federation.evaluation import Result, RoundReport
from fairfold.runs.checkpoint import FORMAT, other_format_error
from fairfold.runs.tensors import write_checked_tensors
from fairfold.runs.units import popularity_facts
from fairfold.subspace import parse_scheme

SETTINGS, METRICS, RESULT, MODEL, LOG = "settings.toml", "metrics.csv", "result.json", "model.safetensors", "run.log"
DATA = "data.toml"  # settings of the data that `fairfold federate` gave to its devices
AUDIT = "audit.json"  # findings of `fairfold audit`
ROUND_COLUMNS = ["round", "seconds", "clients", "bytes_down", "bytes_up", "server"]
CHECK = "check"  # last column of the metrics: a checksum of the line
RESTORE = "Restore it, or let the run write it again with --resume."
RESTORE_SETTINGS = "Restore it, or go on with --resume and the same settings from a file or a recipe."
HEAD = re.compile(rb"# fairfold run, format (\d+), sha256 ([0-9a-f]{64})\n")


class RunFolder:
    """Writes the folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []

    @classmethod
    def create(cls, settings: Settings, path: Path | None = None, *, resume: bool = False) -> "RunFolder":
        """Create a folder, by default ``runs/DATE-TIME-DATA``; with ``resume`` take one that holds a run."""
        folder = cls(_free_name(settings) if path is None else path)
        folder.require_free(resume=resume)
        atomic_io.make_folder(folder.path)
        return folder

    def begin(self, settings: Settings, history: list[RoundReport]) -> None:
        """Write the settings and the metrics so far: from here on the run can be resumed."""
        atomic_io.remove_temporary_files(self.path)
        if (self.path / RESULT).exists():  # of an earlier end: the next round would make it wrong
            atomic_io.remove(self.path / RESULT)
            with atomic_io.write_errors(self.path):
                atomic_io.sync_folder(self.path)
        atomic_io.write_atomically(self.path / SETTINGS, settings_with_checksum(settings))
        with atomic_io.write_errors(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        self._write_metrics(settings, history)

    def require_free(self, *, resume: bool = False) -> None:
        """Refuse a folder that is not empty, unless its run was refused; with ``resume`` one that holds no run."""
        if resume and not self.holds_run():
            given = f"--resume with --out {self.path}, which holds no {SETTINGS}"
            remedy = "Check the name, or leave out --resume to train from the start."
            raise InvalidSettings(given, "the folder of a run", remedy)
        usable = resume or self.was_refused()
        if self.path.exists() and not usable and (not self.path.is_dir() or _content(self.path)):
            remedy = "Name another, remove it, or go on with --resume."
            raise InvalidSettings(f"--out {self.path}", "a new or empty folder", remedy)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def holds_run(self) -> bool:
        """True if a run was begun here."""
        return (self.path / SETTINGS).is_file()

    def was_refused(self) -> bool:
        """True if the folder holds only the note that its settings were refused."""
        try:
            return "refused" in read_result(self.path)
        except InvalidSettings:
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; the system releases the lock of a killed process."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(atomic_io.locked(self.path, wait=False))
            except BlockingIOError:
                given = f"--out {self.path}, where another process is training"
                raise InvalidSettings(given, "a folder of its own", "Name another.") from None
            yield

    @contextlib.contextmanager
    def logging(self, form: str = "text") -> Iterator[None]:
        """Write fairfold's log to the folder."""
        with atomic_io.write_errors(self.path / LOG):
            handler = _LogHandler(self.path / LOG, encoding="utf-8")
        plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        handler.setFormatter(_JsonFormatter() if form == "json" else plain)
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
        self._columns = metric_columns(settings)
        head = (",".join(self._columns) + "\n").encode()
        atomic_io.write_atomically(
            self.path / METRICS, head + metric_lines(self._metrics_row(report) for report in history)
        )

    def _metrics_row(self, report: RoundReport) -> list[Any]:
        quality = report.quality
        found = [report.round_number, f"{report.seconds:.6f}", report.num_clients, report.bytes_down, report.bytes_up]
        found += [] if quality is None else [quality.server, *quality.groups]
        found = ["" if value is None else value for value in found]
        return found + [""] * (len(self._columns) - 1 - len(found))

    def write_refusal(self, settings: Settings, reason: str) -> None:
        """Write why the method cannot serve these settings, for the report."""
        atomic_io.write_atomically(self.path / SETTINGS, settings_with_checksum(settings))
        atomic_io.write_atomically(self.path / RESULT, checksums.with_checksum({"refused": reason}, indent=2))

    def append_round(self, report: RoundReport) -> None:
        """Append one round to the metrics; a line cut short by a kill is written again on resume."""
        with atomic_io.write_errors(self.path / METRICS), (self.path / METRICS).open("ab") as file:
            file.write(metric_lines([self._metrics_row(report)]))

    def finish(self, result: Result, seconds: float, stopped: str, data: dict[str, Any]) -> None:
        """Write the model, then the result, which marks the run as finished."""
        settings = result.settings
        self._write_metrics(settings, result.history)  # the last round is evaluated after its line was written
        evaluated = [(one.round_number, one.quality.server) for one in result.history if one.quality is not None]
        sign = 1 if settings.smaller_is_better else -1
        best = min(evaluated, key=lambda pair: sign * pair[1], default=None)
        baselines, differences = dict(result.baselines), dict(result.differences)
        summary = {
            "metric": result.metric,
            "rounds": result.state.round_number,
            "stopped": stopped,
            "seconds": round(seconds, 3),
            "server": {"quality": result.quality, "baselines": baselines, "differences": differences},
            "best": None if best is None else {"round": best[0], "quality": best[1]},
            "groups": [vars(group) | {"baselines": dict(group.baselines)} for group in result.groups],
            "rejections": dict(result.rejections),
            "warnings": result.warnings,
            "notes": result.notes,
            "privacy": dict(result.privacy),
            "popularity": popularity_facts(result),
            "data": data,
            "versions": {"fairfold": __version__, "torch": torch.__version__},
        }
        metadata = {"settings": json.dumps(settings.plain()), "round": str(result.state.round_number)}
        write_checked_tensors(self.path / MODEL, result.state.full, metadata)
        atomic_io.write_atomically(self.path / RESULT, checksums.with_checksum(summary, indent=2))


def _free_name(settings: Settings) -> Path:
    path = Path("runs") / f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{Path(settings.data.name).name or 'data'}"
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], others) if not free.exists())


def _content(path: Path) -> list[Path]:
    """Entries of a folder, without what a run killed before writing its settings leaves."""
    entries = [entry for entry in path.iterdir() if entry.suffix != atomic_io.TEMPORARY]
    return [entry for entry in entries if entry.name != "checkpoints" or any(entry.iterdir())]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {"time": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps(values | ({"error": self.formatException(record.exc_info)} if record.exc_info else {}))


class _LogHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop lines that cannot be written, since no result depends on the log."""


def settings_with_checksum(settings: Settings) -> bytes:
    """Settings as TOML that `fairfold train` reads; the first line has the format and a checksum."""
    text = to_toml(settings).encode()
    return f"# fairfold run, format {FORMAT}, sha256 {hashlib.sha256(text).hexdigest()}\n".encode() + text


def run_of(folder: Path) -> Path:
    """The run in a folder: the folder itself, or what a server or `fairfold federate` wrote inside it."""
    inside = (folder / "server" / "run", folder / "run")
    return next((path for path in inside if (path / SETTINGS).is_file()), folder)


def require_run(folder: Path) -> None:
    """Refuse a folder that holds no run."""
    if not (folder / SETTINGS).is_file():
        given = f"{folder}, which holds no {SETTINGS}"
        raise InvalidSettings(given, "the folder of a run", "Name what `fairfold train` wrote.")


def read_run_settings(folder: Path) -> Settings:
    """Read the settings of a run; refuse a folder without a run, of another format, or with a damaged file."""
    require_run(folder)
    path = folder / SETTINGS
    with run_read_errors(path, RESTORE_SETTINGS):
        content = checksums.read_limited(path)
        head = HEAD.match(content)
        if head is None and not content.startswith(b"# fairfold run"):
            raise other_format_error(path, 1) if content else checksums.Damaged("nothing in it")
        if head is None or hashlib.sha256(content[head.end() :]).hexdigest().encode() != head[2]:
            raise checksums.Damaged("another checksum than it says")
        if int(head[1]) != FORMAT:
            raise other_format_error(path, int(head[1]))
        return load_settings(path, {})


def read_result(folder: Path) -> dict[str, Any]:
    """Read the result of a run; empty if it is not finished."""
    return read_json(folder / RESULT)


def read_json(path: Path, remedy: str = RESTORE) -> dict[str, Any]:
    """Read a JSON file of a run's folder; empty if there is no such file, refused if it is damaged."""
    if not path.exists():
        return {}
    with run_read_errors(path, remedy):
        return checksums.parse_with_checksum(checksums.read_limited(path))


def metric_columns(settings: Settings) -> list[str]:
    """Columns of the metrics of a run."""
    return [*ROUND_COLUMNS, *(str(capacity) for capacity in parse_scheme(settings.fleet.capacities)), CHECK]


def metric_lines(rows: Iterable[list[Any]]) -> bytes:
    """Lines of the metrics, each with its checksum."""
    return "".join(checksums.line_with_checksum(",".join(map(str, row)), ",") for row in rows).encode()


def read_metrics(folder: Path, settings: Settings, rounds: int | None = None) -> list[dict[str, str]]:
    """Read the metrics, a row per round, without a last line cut short by a kill; ``rounds`` is checked if given."""
    path = folder / METRICS
    if not path.exists() and rounds is None:
        return []  # killed before the first round
    columns = metric_columns(settings)
    with run_read_errors(path):
        head, _, content = checksums.read_limited(path).partition(b"\n")
        if head.decode() != ",".join(columns):
            raise checksums.Damaged("other columns than the run has")
        rows = [line.split(",") for line in checksums.parse_lines(content, ",", first=2)]
        if [row[0] for row in rows] != [str(number + 1) for number in range(len(rows))]:
            raise checksums.Damaged("rounds are missing")
        if rounds is not None and len(rows) != rounds:
            raise checksums.Damaged(f"{len(rows)} of {rounds} rounds")
    return [dict(zip(columns, row, strict=False)) for row in rows]


def run_read_errors(path: Path, remedy: str = RESTORE) -> contextlib.AbstractContextManager[None]:
    """Turn errors of reading a run's file into one InvalidSettings with a remedy."""
    return checksums.read_errors(path, InvalidSettings, "what the run wrote", remedy)
