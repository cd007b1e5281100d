"""What a run's folder says about it, read back for reports: finished or not, in any order of reading."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fairfold.runs.checkpoint import flat_keys
from fairfold.runs.read import (
    AUDIT,
    CHECK,
    ROUND_COLUMNS,
    SETTINGS,
    read_metrics,
    read_result,
    read_run_settings,
    read_values,
)
from fairfold.runs.units import popularity_words
from fairfold.settings import Settings
from fairfold.settings.parts import DeviceData, ImageData, SyntheticData

NAMED = ("subspace.method", "fleet.capacities")
NO_SIZES = (*ROUND_COLUMNS, CHECK)


@dataclass(frozen=True)
class Evaluation:
    """Quality after a round: of the server's model, and of each size's own."""

    round_number: int
    bytes_moved: int
    server: float
    sizes: dict[str, float]


@dataclass(frozen=True)
class Devices:
    """What devices of one size hold and send, and how good their own model is, at the end of a run."""

    size: str
    users: int
    held: int  # bytes of a device's memory, as those received and sent
    down: int
    up: int
    quality: float | None  # for the users who hold it
    everybody: float | None  # for all users, where that has a meaning

    @property
    def shown(self) -> float | None:
        """The quality by which sizes are compared: over all users where it is known."""
        return self.quality if self.everybody is None else self.everybody


@dataclass(frozen=True)
class RunSummary:
    """One run."""

    path: Path
    settings: Settings
    rounds: int = 0
    seconds_per_round: float | None = None  # median
    bytes_down: int = 0  # in all, as those sent up
    bytes_up: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)  # in order of rounds
    references: dict[str, float] = field(default_factory=dict)  # what needs no federation, by name
    differences: dict[str, list[float]] = field(default_factory=dict)  # how much better the run is, and standard errors
    devices: list[Devices] = field(default_factory=list)  # by size, large ones first; known at the end
    state: str = "unfinished"  # or finished, N/A
    reason: str = ""  # why it ended, or why the method cannot serve the scheme
    told: tuple[str, ...] = ()  # what was found out on the way
    audit: dict[str, Any] = field(default_factory=dict)  # what `fairfold audit` found, where it was asked
    popularity: str | None = None  # where the order of the items came from, in words; None for the catalogue's own

    @property
    def metric(self) -> str:
        """Name of the quality."""
        return self.settings.metric

    @property
    def data(self) -> str:
        """The data set, so named that runs of equal names can be compared."""
        settings, chosen = self.settings, self.settings.data
        if isinstance(chosen, SyntheticData):
            return f"synthetic: {chosen.users} users, {chosen.items} items, seed {settings.run.seed}"
        if isinstance(chosen, DeviceData):
            return f"devices: {chosen.items:,} items"
        name = Path(chosen.name).name
        if isinstance(chosen, ImageData):
            devices = f"{chosen.devices} devices, Dirichlet {chosen.concentration:g}"
            return f"{name}, {settings.model.kind}, {devices if chosen.split == 'dirichlet' else 'by writer'}"
        return f"{name}{'' if chosen.top_users is None else f', {chosen.top_users} users'}"

    @property
    def method(self) -> str:
        """What the run is compared by: its method, or that all data was in one place."""
        algorithm = self.settings.algorithm
        return algorithm.kind if algorithm.pooled else self.settings.subspace.method

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation of the server's model."""
        sign = 1 if self.settings.smaller_is_better else -1
        return min(self.evaluations, key=lambda evaluation: sign * evaluation.server, default=None)

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation."""
        return self.evaluations[-1] if self.evaluations else None


def read_run(path: Path) -> RunSummary:
    """Read a run's folder; an error that names what is missing where it is none."""
    settings, result = read_run_settings(path), read_result(path)
    if "refused" in result:
        return RunSummary(path, settings, state="N/A", reason=str(result["refused"]))
    rows = read_metrics(path, settings, result.get("rounds"))
    return RunSummary(
        path,
        settings,
        rounds=int(rows[-1]["round"]) if rows else 0,
        seconds_per_round=median(float(row["seconds"]) for row in rows) if rows else None,
        bytes_down=sum(int(row["bytes_down"]) for row in rows),
        bytes_up=sum(int(row["bytes_up"]) for row in rows),
        evaluations=_evaluations(rows),
        references=result.get("server", {}).get("references", {}),
        differences=result.get("server", {}).get("differences", {}),
        devices=[_devices(group) for group in result.get("groups", [])],
        state="finished" if result else "unfinished",
        reason=result.get("stopped", ""),
        told=tuple(result.get("told", ())),
        audit=read_values(path / AUDIT, "Write it anew with `fairfold audit`, or remove it."),
        popularity=popularity_words(settings, result.get("popularity", {})),
    )


def read_runs(paths: list[Path]) -> list[RunSummary]:
    """Read runs; a folder that is none stands for the runs right inside it."""
    found: list[RunSummary] = []
    for path in paths:
        inside = sorted(entry.parent for entry in path.glob(f"*/{SETTINGS}")) if path.is_dir() else []
        if not (path / SETTINGS).is_file() and inside:
            found += [read_run(entry) for entry in inside]
        else:
            found.append(read_run(path))
    return found


def labels(runs: list[RunSummary]) -> list[str]:
    """A short name per run: method and scheme where that tells them apart, else with the folder's name."""
    short = [f"{run.method} {run.settings.fleet.capacities}" for run in runs]
    return [
        name if short.count(name) == 1 else f"{name} ({run.path.name})" for name, run in zip(short, runs, strict=True)
    ]


def by_data(runs: list[RunSummary]) -> dict[tuple[str, str], list[RunSummary]]:
    """Runs that can be compared, under the name of their data and their metric."""
    groups: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault((run.data, run.metric), []).append(run)
    return groups


def sizes_of(runs: list[RunSummary]) -> list[str]:
    """All device sizes of some runs, large devices first."""
    found = dict.fromkeys(size for run in runs if run.last for size in run.last.sizes)
    return sorted(found, key=lambda size: float(size[:-1]) if size.endswith("x") else float("inf"))


def references_of(runs: list[RunSummary]) -> dict[str, float]:
    """The reference rows of runs on the same data, once."""
    return {name: value for run in runs for name, value in run.references.items()}


def differing_settings(runs: list[RunSummary]) -> dict[str, list[str]]:
    """The settings in which runs differ, by key, each with a value per run; method and scheme are in their names."""
    flat = [flat_keys(run.settings.plain()) for run in runs]
    keys = [key for key in dict.fromkeys(k for one in flat for k in one) if key not in NAMED]
    found = {key: [str(one.get(key, "–")) for one in flat] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _devices(group: dict[str, Any]) -> Devices:
    return Devices(
        group["capacity"], group["users"], group["bytes_held"], group["bytes_down"], group["bytes_up"],
        group["quality"], group.get("everybody"),
    )  # fmt: skip


def _evaluations(rows: list[dict[str, str]]) -> list[Evaluation]:
    moved, found = 0, []
    for row in rows:
        moved += int(row["bytes_down"]) + int(row["bytes_up"])
        if row["server"]:
            sizes = {name: float(value) for name, value in row.items() if name not in NO_SIZES and value}
            found.append(Evaluation(int(row["round"]), moved, float(row["server"]), sizes))
    return found
