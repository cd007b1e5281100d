"""The files of a run's folder: how each says what it should be, and readers that refuse one that is something else."""

import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidSettings
from fairfold.runs.checkpoint import FORMAT, other_format
from fairfold.sealed import Damaged, content_of, lines_in, reading, sealed_line, values_in
from fairfold.settings import Settings
from fairfold.settings.files import load_settings, to_toml
from fairfold.subspace import parse_scheme

SETTINGS, METRICS, RESULT, MODEL, LOG = "settings.toml", "metrics.csv", "result.json", "model.safetensors", "run.log"
DATA = "data.toml"
"""Where `fairfold federate` says what data it has given to its devices, in its own folder."""

AUDIT = "audit.json"
"""What `fairfold audit` wrote, where it was asked for."""

ROUND_COLUMNS = ["round", "seconds", "clients", "bytes_down", "bytes_up", "server"]
CHECK = "check"
"""Last column of the metrics: a checksum of the line before it."""

RESUME = "Restore it, or let the run write it anew with --resume."
NAMED = "Restore it, or go on with --resume and the same settings from a file or a recipe; the checkpoint knows them."
HEAD = re.compile(rb"# fairfold run, format (\d+), sha256 ([0-9a-f]{64})\n")


def sealed_settings(settings: Settings) -> bytes:
    """The settings of a run as a file that `fairfold train` reads as well; its first line says what the others are."""
    text = to_toml(settings).encode()
    return f"# fairfold run, format {FORMAT}, sha256 {hashlib.sha256(text).hexdigest()}\n".encode() + text


def require_run(folder: Path) -> None:
    """Refuse a folder that is no run."""
    if not (folder / SETTINGS).is_file():
        raise InvalidSettings(
            f"{folder}, which holds no {SETTINGS}", "the folder of a run", "Name what `fairfold train` wrote."
        )


def read_run_settings(folder: Path) -> Settings:
    """The settings as run; refused where a folder is no run, one of another format, or the file is damaged."""
    require_run(folder)
    path = folder / SETTINGS
    with _reading(path, NAMED):
        content = content_of(path)
        head = HEAD.match(content)
        if head is None and not content.startswith(b"# fairfold run"):
            raise other_format(path, 1) if content else Damaged("nothing in it")
        if head is None or hashlib.sha256(content[head.end() :]).hexdigest().encode() != head[2]:
            raise Damaged("another checksum than it says")
        if int(head[1]) != FORMAT:
            raise other_format(path, int(head[1]))
        return load_settings(path, {})


def read_result(folder: Path) -> dict[str, Any]:
    """The closing table of a run; empty where it is not finished."""
    return read_values(folder / RESULT)


def read_values(path: Path, remedy: str = RESUME) -> dict[str, Any]:
    """Plain values of a run's folder; none where there is no such file, refused where it is damaged."""
    if not path.exists():
        return {}
    with _reading(path, remedy):
        return values_in(content_of(path))


def columns_of(settings: Settings) -> list[str]:
    """Of the metrics of a run."""
    return [*ROUND_COLUMNS, *(str(capacity) for capacity in parse_scheme(settings.fleet.capacities)), CHECK]


def lines_of(rows: Iterable[list[Any]]) -> bytes:
    """Rows of the metrics, each with its checksum."""
    return "".join(sealed_line(",".join(map(str, row)), ",") for row in rows).encode()


def read_metrics(folder: Path, settings: Settings, rounds: int | None = None) -> list[dict[str, str]]:
    """The metrics, a row per round, so many where that is known, but for a last line that a kill cut short."""
    path = folder / METRICS
    if not path.exists() and rounds is None:
        return []  # killed before the first round
    columns = columns_of(settings)
    with _reading(path):
        head, _, content = content_of(path).partition(b"\n")
        if head.decode() != ",".join(columns):
            raise Damaged("other columns than the run has")
        rows = [line.split(",") for line in lines_in(content, ",", first=2)]
        if [row[0] for row in rows] != [str(number + 1) for number in range(len(rows))]:
            raise Damaged("rounds are missing")
        if rounds is not None and len(rows) != rounds:
            raise Damaged(f"{len(rows)} of {rounds} rounds")
    return [dict(zip(columns, row, strict=False)) for row in rows]


def _reading(path: Path, remedy: str = RESUME) -> contextlib.AbstractContextManager[None]:
    return reading(path, InvalidSettings, "what the run wrote", remedy)
