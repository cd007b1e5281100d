"""What a run's folder says of the run, finished or not, as plain values: for the page and for Prometheus.

Everything is read by the readers of the folder, which refuse what is damaged; that is told then. Events are appended,
so only those that are new are read.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from fairfold.errors import FairfoldError
from fairfold.protocol.noising import privacy_facts, privacy_words
from fairfold.runs.nodes import JOINED, LEFT_OUT, NODES, PUSHED, QUALITY, ROUND, Event, event_of
from fairfold.runs.read import (
    CHECK,
    LOG,
    METRICS,
    RESULT,
    ROUND_COLUMNS,
    SETTINGS,
    read_metrics,
    read_result,
    read_run_settings,
)
from fairfold.settings import Settings

MOST_ROUNDS, MOST_LINES, MOST_NODES = 600, 40, 50
"""Rounds of a curve, lines of the log and nodes of a list that are shown."""

QUIET = 120.0
"""Seconds without a change, beside three rounds, after which a run that is not finished is called quiet."""

ASKED = 10.0
"""Seconds after which a server is asked again who is connected."""

Told = dict[str, Any]


class Watched:
    """A run that is looked at again and again; with ``devices``, the run of a server, which may not have begun.

    Args:
        folder: Of the run.
        devices: Says how many devices the server has, by their state; an error where it does not answer.
    """

    def __init__(self, folder: Path, devices: Callable[[], dict[str, int]] | None = None) -> None:
        self.folder, whole = folder, folder.absolute()
        self._devices, self._server, self._asked = devices, Told({"devices": {}, "problem": ""}), -ASKED
        self.name = whole.name if whole.name != "run" else f"{whole.parent.name}/run"  # that of a server says whose
        self._events, self._read = Totals(), 0
        self._kept: dict[str, tuple[float, Any]] = {}

    def told(self) -> Told:
        """All there is to say now; where a file cannot be read, that."""
        self._ask()
        begun = self._devices is None or (self.folder / SETTINGS).exists()
        try:
            found = self._told() if begun else {"state": "no run yet", "now": time.time()}
        except FairfoldError as error:
            found = {"state": "damaged", "problem": str(error), "now": time.time()}
        return {"name": self.name} | self._server | found

    def _ask(self) -> None:
        """Ask the server for its devices, where there is one, and not every time."""
        if self._devices is None or time.monotonic() - self._asked < ASKED:
            return
        self._asked = time.monotonic()
        try:
            self._server = {"devices": self._devices(), "problem": ""}
        except FairfoldError as error:
            self._server = {"devices": {}, "problem": str(error)}

    def _told(self) -> Told:
        settings: Settings = self._fresh(SETTINGS, lambda: read_run_settings(self.folder))
        result: Told = self._fresh(RESULT, lambda: read_result(self.folder))
        rows: list[dict[str, str]] = self._fresh(METRICS, lambda: read_metrics(self.folder, settings))
        self._new_events()
        changed = max((self._changed(name) for name in (SETTINGS, METRICS, NODES, LOG, RESULT)), default=0.0)
        rounds, now = [_round(row) for row in rows], time.time()
        usual = median(row["seconds"] for row in rounds) if rounds else 0.0
        state = "finished" if result else "running" if now - changed < QUIET + 3 * usual else "quiet"
        return {
            "state": state, "now": now, "changed": changed,
            "method": settings.subspace.method, "algorithm": settings.algorithm.kind,
            "capacities": settings.fleet.capacities, "metric": settings.metric,
            "smaller_is_better": settings.smaller_is_better, "wanted": settings.run.rounds,
            "done": rounds[-1]["round"] if rounds else 0, "rounds": _thinned(rounds),
            "bytes": {key: sum(row[key] for row in rounds) for key in ("bytes_down", "bytes_up")},
            "answers": sum(row["clients"] for row in rounds), "seconds": usual,
            "stopped": result.get("stopped", result.get("refused", "")), "notes": result.get("told", []),
            "privacy": result.get("privacy") or privacy_facts(settings),
            "privacy_words": privacy_words(privacy_facts(settings)), "log": self._log(), **self._events.told(),
        }  # fmt: skip

    def _changed(self, name: str) -> float:
        try:
            return (self.folder / name).stat().st_mtime
        except OSError:
            return 0.0

    def _fresh(self, name: str, read: Any) -> Any:
        """What a file says, read again when it has changed."""
        changed = self._changed(name)
        if name not in self._kept or self._kept[name][0] != changed:
            self._kept[name] = changed, read()
        return self._kept[name][1]

    def _new_events(self) -> None:
        path = self.folder / NODES
        size = path.stat().st_size if path.exists() else 0
        if size < self._read:  # a run that went on from an earlier round
            self._events, self._read = Totals(), 0
        if size == self._read:
            return
        with path.open("rb") as file:
            file.seek(self._read)
            content = file.read(size - self._read)
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].splitlines():
            self._events.add(event_of(line, path))
        self._read += whole

    def _log(self) -> list[str]:
        try:
            with (self.folder / LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - (1 << 14)))
                return file.read().decode(errors="replace").splitlines()[-MOST_LINES:]
        except OSError:
            return []


class Totals:
    """What events come to."""

    def __init__(self) -> None:
        self.sizes: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.reasons: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.last_phases: dict[str, float] = {}
        self.recent: list[Told] = []
        self.empty: list[Told] = []
        self.empties = self.pushed = self.asked = 0
        self.taking_part: set[int] = set()
        self.last_used: set[int] = set()

    def add(self, event: Event) -> None:
        """One more."""
        kind = event["event"]
        if kind == JOINED:
            self.sizes[event["node"]] = event["size"]
            self.left.pop(event["node"], None)
        elif kind == LEFT_OUT:
            self.left[event["node"]] = event["reason"]
            self.sizes.pop(event["node"], None)
        elif kind == ROUND:
            self.asked += event["asked"]
            self.reasons.update(event["left_out"].values())
            self.phases.update(event["phases"])
            self.last_phases = event["phases"]
            self.last_used = set(event["used"])
            self.taking_part |= self.last_used
            left = [{"round": event["round"], "node": node, "why": why} for node, why in event["left_out"].items()]
            self.recent = [*self.recent, *left][-MOST_NODES:]
            if not event["counted"]:
                self.empties += 1
                why = Counter(event["left_out"].values()).most_common(3)
                words = ", ".join(f"{many} × {reason}" for reason, many in why) or "no node is there that takes part"
                self.empty = [*self.empty, {"round": event["round"], "why": words}][-MOST_NODES:]
        elif kind == PUSHED:
            self.pushed = len(event["nodes"])
        elif kind != QUALITY:
            raise ValueError(kind)

    def told(self) -> Told:
        """As plain values."""
        return {
            "nodes": {
                "known": len(self.sizes), "answered": len(self.taking_part), "last_round": len(self.last_used),
                "refused": len(self.left), "given_model": self.pushed, "by_size": dict(Counter(self.sizes.values())),
            },
            "asked": self.asked, "reasons": dict(self.reasons), "phases": dict(self.phases),
            "last_phases": self.last_phases, "empty_rounds": self.empties, "empty": self.empty[::-1],
            "left_out": self.recent[::-1],
            "refused": [{"node": str(node), "why": why} for node, why in list(self.left.items())[-MOST_NODES:]],
        }  # fmt: skip


def _round(row: dict[str, str]) -> Told:
    sizes = {key: float(value) for key, value in row.items() if key not in (*ROUND_COLUMNS, CHECK) and value}
    return {
        "round": int(row["round"]), "seconds": float(row["seconds"]), "clients": int(row["clients"]),
        "bytes_down": int(row["bytes_down"]), "bytes_up": int(row["bytes_up"]),
        "quality": float(row["server"]) if row["server"] else None, "sizes": sizes,
    }  # fmt: skip


def _thinned(rounds: list[Told]) -> list[Told]:
    """Of very many rounds the evaluated ones, and some; the last is always there."""
    if len(rounds) <= MOST_ROUNDS:
        return rounds
    judged = [row for row in rounds if row["quality"] is not None]
    step = -(-len(rounds) // MOST_ROUNDS)
    kept = {row["round"]: row for row in [*rounds[::step], *judged[-MOST_ROUNDS:], rounds[-1]]}
    return [kept[number] for number in sorted(kept)]


def finite(values: Any) -> Any:
    """The same where what is no number is nothing, as JSON has it."""
    if isinstance(values, dict):
        return {str(key): finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
