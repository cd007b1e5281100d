"""Which figures of a run go to another program. Where they go is said by each of the files beside this one."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fairfold import files
from fairfold.errors import InvalidSettings
from fairfold.trackers.callback import Callback

if TYPE_CHECKING:
    from fairfold.settings import Settings
    from fairfold.simulate.result import Result, RoundReport
    from fairfold.subspace import Capacity

log = logging.getLogger("fairfold.trackers")

Plain = str | int | float | bool


class Tracker(Callback):
    """Sends settings at the start, seconds and bytes of every round, quality where it was evaluated, and the end.

    A subclass says how to ``open``, how to ``send`` numbers of a round, and how to ``shut``. What goes wrong at the
    start is told and ends the run; a service that fails later costs its figures, not the run.

    Args:
        kept: A file that keeps the name under which the service knows this run, so that a run that is gone on with is
            one run there, too.
    """

    TITLE: ClassVar[str]
    MODULE: ClassVar[str]
    EXTRA: ClassVar[str]

    def __init__(self, kept: Path | None = None) -> None:
        self.require()
        self._kept = kept
        self._sizes: list[str] = []
        self._working = self._ended = False
        self._round = 0

    # -- what a subclass says ------------------------------------------------------------------------------------------

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """The one that ``fairfold train`` makes for a run's folder."""
        raise NotImplementedError

    def open(self, settings: Mapping[str, Plain], first_round: int, known: str | None) -> str | None:
        """Begin, or go on with the run that is ``known`` by this name; gives the name."""
        raise NotImplementedError

    def send(self, values: Mapping[str, float], round_number: int) -> None:
        """Numbers of a round by their names."""
        raise NotImplementedError

    def shut(self, *, ended: bool) -> None:
        """Close; ``ended`` unless the run broke off."""
        raise NotImplementedError

    # -- what all have in common ---------------------------------------------------------------------------------------

    @classmethod
    def require(cls) -> None:
        """Refuse where the package is not installed."""
        try:
            import_module(cls.MODULE)
        except ImportError:
            given = f"{cls.TITLE}, which is not installed"
            raise InvalidSettings(given, cls.TITLE, f"pip install 'fairfold[{cls.EXTRA}]'") from None

    def on_start(self, settings: Settings, capacities: list[Capacity], first_round: int) -> None:
        """Open the run there, with its settings by ``table.key``."""
        self._sizes, self._ended, self._round = [str(capacity) for capacity in capacities], False, first_round - 1
        known = None
        if first_round > 1 and self._kept is not None and self._kept.exists():
            known = self._kept.read_text(encoding="utf-8").strip()
        name = self.open(flat(settings.plain()), first_round, known)
        self._working = True
        if name is not None and self._kept is not None:
            files.write_atomically(self._kept, name.encode())

    def on_round(self, report: RoundReport) -> None:
        """Seconds and bytes of every round, quality where it was evaluated."""
        names = ("seconds", "clients", "bytes_down", "bytes_up")
        found: dict[str, float | None] = {f"round/{name}": getattr(report, name) for name in names}
        if report.quality is not None:
            found["quality/server"] = report.quality.server
            found |= {f"quality/{name}": of for name, of in zip(self._sizes, report.quality.groups, strict=True)}
        self._send(found, report.round_number)

    def on_end(self, result: Result) -> None:
        """What each size holds, its quality for all users, and what others reach on the same data."""
        found: dict[str, float | None] = {"end/server": result.quality}
        for group in result.groups:
            found[f"end/{group.capacity}"] = group.quality if group.everybody is None else group.everybody
            found[f"bytes_held/{group.capacity}"] = group.bytes_held
        found |= {f"reference/{name}": value for name, value in result.references.items()}
        self._send(found, self._round)
        self._ended = True

    def close(self) -> None:
        """Flush and close."""
        if self._working:
            self._guarded("close", self.shut, ended=self._ended)
        self._working = False

    def _send(self, values: Mapping[str, float | None], round_number: int) -> None:
        self._round = round_number
        usable = {plain_name(name): float(of) for name, of in values.items() if of is not None and math.isfinite(of)}
        if self._working:
            self._working = self._guarded(f"round {round_number}", self.send, usable, round_number)

    def _guarded(self, what: str, call: Any, *args: Any, **kwargs: Any) -> bool:
        try:
            call(*args, **kwargs)
        except Exception as error:
            log.warning("%s failed at %s and is told no more; the run goes on: %s", self.TITLE, what, error)
            return False
        return True


def flat(tables: Mapping[str, Any], before: str = "") -> dict[str, Plain]:
    """Nested tables as one, by ``table.key``."""
    found: dict[str, Plain] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value if isinstance(value, str | int | float) else str(value)
    return found


def plain_name(name: str) -> str:
    """A name that all of them take: letters, digits and a few signs."""
    return re.sub(r"[^\w\-. /]", "-", name, flags=re.ASCII)
