"""The folder a run leaves behind.

``settings.toml`` as run · ``metrics.csv`` a line an evaluation · ``result.json`` the closing table ·
``model.safetensors`` the server's vector, with what is needed to read it.
"""

import csv
import io
import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save

from fairfold.errors import InvalidSettings
from fairfold.federation.settings import Settings, read_settings
from fairfold.runs.files import write_atomically
from fairfold.simulate.result import Result, RoundReport


def load_settings(path: Path | None, overrides: dict[str, Any]) -> Settings:
    """Settings from a TOML file (or the defaults), with overrides; ``world.users`` reaches into a table."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidSettings(f"{path}: {error.strerror}", "a readable TOML file", "Check the path.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidSettings(f"{path}: {error}", "a TOML file", "Mend that line.") from None
    for key, value in overrides.items():
        *tables, name = key.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{key} = {value!r}", f"{part!r} to be a table", "Check the key.")
        table[name] = value
    return read_settings(values)


class RunFolder:
    """Writes a run as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[dict[str, float]] = []

    @classmethod
    def create(cls, settings: Settings, path: Path | None = None) -> "RunFolder":
        """A new folder, ``runs/DATE-TIME-DATA`` unless a path is given; never one that holds something."""
        if path is None:
            stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
            path = Path("runs") / f"{stamp}-{settings.data}"
            number = 1
            while path.exists():
                number += 1
                path = path.with_name(f"{stamp}-{settings.data}-{number}")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidSettings(f"--out {path}", "a new or empty folder", "Name another, or remove it.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSettings(f"--out {path}: {error.strerror}", "a folder to write to", "Name another.") from None
        folder = cls(path)
        write_atomically(path / "settings.toml", tomli_w.dumps(settings.model_dump()).encode())
        return folder

    def note(self, report: RoundReport) -> None:
        """Keep one round's quality."""
        if report.quality is None:
            return
        row = {"round": report.round_number, "ndcg_server": report.quality.server}
        row |= {f"ndcg_group_{number}": value for number, value in enumerate(report.quality.groups)}
        self._rows.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self.path / "metrics.csv", text.getvalue().encode())

    def finish(self, result: Result, seconds: float) -> None:
        """Write the closing table and the model."""
        summary = {
            "rounds": result.state.round_number,
            "seconds": round(seconds, 3),
            "server": {"quality": result.quality, "references": dict(result.references)},
            "groups": [vars(group) | {"references": dict(group.references)} for group in result.groups],
        }
        write_atomically(self.path / "result.json", (json.dumps(summary, indent=2) + "\n").encode())
        metadata = {"settings": result.settings.model_dump_json(), "round": str(result.state.round_number)}
        write_atomically(self.path / "model.safetensors", save({"full": result.state.full.contiguous()}, metadata))
