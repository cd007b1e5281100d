"""The files of a run's folder: how each says what it should be, and readers that refuse one that is something else."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidSettings
from fairfold.runs.checkpoint import FORMAT, checksum_of_values, other_format
from fairfold.settings import Settings
from fairfold.settings.files import load_settings, to_toml
from fairfold.subspace import parse_scheme

SETTINGS, METRICS, RESULT, MODEL, LOG = "settings.toml", "metrics.csv", "result.json", "model.safetensors", "run.log"
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
    content = _bytes(path)
    head = HEAD.match(content)
    if head is None and not content.startswith(b"# fairfold run"):
        raise other_format(path, 1) if content else _damaged(path, "nothing in it", NAMED)
    if head is None or hashlib.sha256(content[head.end() :]).hexdigest().encode() != head[2]:
        raise _damaged(path, "another checksum than it says", NAMED)
    if int(head[1]) != FORMAT:
        raise other_format(path, int(head[1]))
    return load_settings(path, {})


def sealed_json(values: Mapping[str, Any]) -> bytes:
    """Plain values as a file, with their checksum."""
    return (json.dumps(dict(values) | {"checksum": checksum_of_values(values)}, indent=2) + "\n").encode()


def read_result(folder: Path) -> dict[str, Any]:
    """The closing table of a run; empty where it is not finished."""
    return read_sealed(folder / RESULT)


def read_sealed(path: Path, remedy: str = RESUME) -> dict[str, Any]:
    """What :func:`sealed_json` wrote; empty where there is no such file, refused where it is damaged."""
    if not path.exists():
        return {}
    try:
        content = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error), remedy) from None
    if not isinstance(content, dict) or content.pop("checksum", None) != checksum_of_values(content):
        raise _damaged(path, "another checksum than it says, or none", remedy)
    return content


def columns_of(settings: Settings) -> list[str]:
    """Of the metrics of a run."""
    return [*ROUND_COLUMNS, *(str(capacity) for capacity in parse_scheme(settings.fleet.capacities)), CHECK]


def lines_of(rows: Iterable[list[Any]]) -> bytes:
    """Rows of the metrics, each with its checksum; the head has the word for it."""
    lines = [",".join(map(str, row)) for row in rows]
    return "".join(f"{line},{CHECK if line.startswith(ROUND_COLUMNS[0]) else _crc(line)}\n" for line in lines).encode()


def read_metrics(folder: Path, settings: Settings, rounds: int | None = None) -> list[dict[str, str]]:
    """The metrics, a row per round, so many where that is known, but for a last line that a kill cut short."""
    path = folder / METRICS
    if not path.exists() and rounds is None:
        return []  # killed before the first round
    try:
        *lines, _ = _bytes(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from None
    columns, rows = columns_of(settings), list[dict[str, str]]()
    for number, line in enumerate(lines):
        body, _, check = line.rpartition(",")
        if (line != ",".join(columns)) if number == 0 else (check != _crc(body) or not body.startswith(f"{number},")):
            raise _damaged(path, f"line {number + 1} is not what was written")
        rows += [dict(zip(columns, line.split(","), strict=False))] if number else []
    if rounds is not None and len(rows) != rounds:
        raise _damaged(path, f"{len(rows)} of {rounds} rounds")
    return rows


def _crc(line: str) -> str:
    return f"{zlib.crc32(line.encode()):08x}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidSettings(f"{path}: {error.strerror}", "a file that can be read", "Check it.") from None


def _damaged(path: Path, why: str, remedy: str = RESUME) -> InvalidSettings:
    return InvalidSettings(f"{path}: damaged ({why})", "what the run wrote", remedy)
