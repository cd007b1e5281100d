"""Summaries of runs, read from their folders, and the report: one HTML page that compares runs."""

import base64
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from fairfold import __version__
from fairfold.atomic_io import make_folder, write_atomically
from fairfold.config import Settings
from fairfold.config.tables import DeviceData, ImageData, SyntheticData
from fairfold.errors import InvalidSettings, install_hint
from fairfold.federation.algorithm import Centralized
from fairfold.federation.evaluation import GroupReport
from fairfold.federation.federation import BEST_POSSIBLE
from fairfold.runs import folder
from fairfold.runs.checkpoint import flat_keys
from fairfold.runs.units import describe_popularity, format_difference, human_bytes, human_seconds

PAGE = "report.html"
LABEL_SETTINGS = ("subspace.method", "fleet.capacities")  # settings that are in the labels of runs


@dataclass(frozen=True)
class Evaluation:
    """Quality of the server's model, and of each size's own, after a round."""

    round_number: int
    total_bytes: int  # of all rounds so far
    server: float
    sizes: dict[str, float]


@dataclass(frozen=True)
class RunSummary:
    """Settings, metrics and result of a run, finished or not."""

    path: Path
    settings: Settings
    rounds: int = 0
    seconds_per_round: float | None = None  # median
    bytes_down: int = 0  # of all rounds and clients, as bytes_up
    bytes_up: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)  # in order of rounds
    baselines: dict[str, float] = field(default_factory=dict)  # quality, by name
    differences: dict[str, list[float]] = field(default_factory=dict)  # to the baselines, with standard errors
    groups: list[GroupReport] = field(default_factory=list)  # by size, large ones first; of a finished run
    state: str = "unfinished"  # or finished, N/A
    reason: str = ""  # why it ended, or why the method cannot serve the scheme
    notes: tuple[str, ...] = ()
    audit: dict[str, Any] = field(default_factory=dict)  # findings of `fairfold audit`
    popularity: str | None = None  # description of the source; None for the catalog's own order

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return self.settings.metric

    @property
    def data(self) -> str:
        """Description of the data set; runs with the same one can be compared."""
        data = self.settings.data
        if isinstance(data, SyntheticData):
            return f"synthetic: {data.users} users, {data.items} items, seed {self.settings.run.seed}"
        if isinstance(data, DeviceData):
            return f"devices: {data.items:,} items"
        name = Path(data.name).name
        if isinstance(data, ImageData):
            devices = f"{data.clients} devices, Dirichlet {data.concentration:g}"
            return f"{name}, {self.settings.model.kind}, {devices if data.split == 'dirichlet' else 'by writer'}"
        return f"{name}{'' if data.top_users is None else f', {data.top_users} users'}"

    @property
    def method(self) -> str:
        """Name of the method, or of a centralized algorithm."""
        algorithm = self.settings.algorithm
        return algorithm.kind if isinstance(algorithm, Centralized) else self.settings.subspace.method

    @property
    def sign(self) -> int:
        """1 if smaller values of the metric are better, else -1."""
        return 1 if self.settings.smaller_is_better else -1

    @property
    def best(self) -> Evaluation | None:
        """Best evaluation of the server's model."""
        return min(self.evaluations, key=lambda evaluation: self.sign * evaluation.server, default=None)

    @property
    def last(self) -> Evaluation | None:
        """Last evaluation, of the server's model and of every size."""
        return self.evaluations[-1] if self.evaluations else None


def read_run(path: Path) -> RunSummary:
    """Read the summary of a run from its folder."""
    settings = folder.read_run_settings(path)
    result = folder.read_result(path)
    if "refused" in result:
        return RunSummary(path, settings, state="N/A", reason=str(result["refused"]))
    rows = folder.read_metrics(path, settings, result.get("rounds"))
    server = result.get("server", {})
    return RunSummary(
        path,
        settings,
        rounds=int(rows[-1]["round"]) if rows else 0,
        seconds_per_round=median(float(row["seconds"]) for row in rows) if rows else None,
        bytes_down=sum(int(row["bytes_down"]) for row in rows),
        bytes_up=sum(int(row["bytes_up"]) for row in rows),
        evaluations=_evaluations(rows),
        baselines=server.get("baselines", {}),
        differences=server.get("differences", {}),
        groups=[GroupReport(**group) for group in result.get("groups", [])],
        state="finished" if result else "unfinished",
        reason=result.get("stopped", ""),
        notes=(*result.get("warnings", ()), *result.get("notes", ())),
        audit=folder.read_json(path / folder.AUDIT, "Write it again with `fairfold audit`, or remove it."),
        popularity=describe_popularity(settings, result.get("popularity", {})),
    )


def read_runs(paths: list[Path]) -> list[RunSummary]:
    """Read summaries of runs; a folder without a run stands for the runs in it, those of fleets too."""
    found: list[RunSummary] = []
    for path in paths:
        is_run = (path / folder.SETTINGS).is_file() or not path.is_dir()
        inside = [path] if is_run else sorted(path.iterdir())
        runs = [run for run in map(folder.run_of, inside) if (run / folder.SETTINGS).is_file()]
        found += map(read_run, runs or [path])
    return found


def labels(runs: list[RunSummary]) -> list[str]:
    """Make a label per run: method and capacities, and the folder's name if that is not unique."""
    short = [f"{run.method} {run.settings.fleet.capacities}" for run in runs]
    named = zip(short, runs, strict=True)
    return [name if short.count(name) == 1 else f"{name} ({run.path.name})" for name, run in named]


def by_data(runs: list[RunSummary]) -> dict[tuple[str, str], list[RunSummary]]:
    """Group runs that can be compared, by data and metric."""
    groups: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault((run.data, run.metric), []).append(run)
    return groups


def sizes_of(runs: list[RunSummary]) -> list[str]:
    """List the sizes of devices of some runs, large ones first."""
    found = dict.fromkeys(size for run in runs if run.last for size in run.last.sizes)
    return sorted(found, key=lambda size: float(size[:-1]) if size.endswith("x") else float("inf"))


def baselines_of(runs: list[RunSummary]) -> dict[str, float]:
    """Collect the baselines of runs on the same data."""
    return {name: value for run in runs for name, value in run.baselines.items()}


def differing_settings(runs: list[RunSummary]) -> dict[str, list[str]]:
    """Find the settings in which runs differ: a value per run, by key, without those in the labels."""
    flat = [flat_keys(run.settings.plain()) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in LABEL_SETTINGS]
    found = {key: [str(one.get(key, "–")) for one in flat] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _evaluations(rows: list[dict[str, str]]) -> list[Evaluation]:
    total = 0
    evaluations = []
    columns = (*folder.ROUND_COLUMNS, folder.CHECK)
    for row in rows:
        total += int(row["bytes_down"]) + int(row["bytes_up"])
        if row["server"]:
            sizes = {name: float(row[name]) for name in row if name not in columns and row[name]}
            evaluations.append(Evaluation(int(row["round"]), total, float(row["server"]), sizes))
    return evaluations


def require_plots() -> None:
    """Refuse if the packages for plots and pages are not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        given = f"plots and a page without {error.name}"
        raise InvalidSettings(given, "Jinja2 and matplotlib", install_hint("report")) from None


def fill_template(package: str, name: str, **values: Any) -> str:
    """Fill a template of a package; in HTML values are escaped."""
    import jinja2

    escaped = name.endswith(".html")
    environment = jinja2.Environment(autoescape=escaped, undefined=jinja2.StrictUndefined, trim_blocks=True)
    if escaped:
        values |= {"style": (resources.files("fairfold.runs") / "templates/page.css").read_text(encoding="utf-8")}
    return environment.from_string((resources.files(package) / name).read_text(encoding="utf-8")).render(**values)


def write_report(runs: list[RunSummary], out: Path) -> list[Path]:
    """Write the page, with a section per data set, and each plot as a PNG file; return the files, the page first."""
    require_plots()
    from fairfold.runs.plots import figures, line_styles, render_figure

    make_folder(out)
    groups = by_data(runs)
    written = [out / PAGE]
    sections: list[dict[str, Any]] = []
    for (data, metric), members in groups.items():
        plots = []
        for name, figure in figures(members).items():
            plots.append({"name": name, "content": base64.b64encode(render_figure(figure, "svg")).decode()})
            stem = name if len(groups) == 1 else f"{name} {data} {metric}"
            written.append(out / f"{re.sub(r'[^A-Za-z0-9]+', '-', stem).strip('-')}.png")
            write_atomically(written[-1], render_figure(figure, "png"))
        differing = differing_settings(members) if len(members) > 1 else {}
        colors = (color for color, _ in line_styles([run for run in members if run.evaluations]))
        rows = table_rows(members)
        for row, run in zip(rows, members, strict=True):
            row["color"] = next(colors) if run.evaluations else "transparent"
        known = baselines_of(members)
        section: dict[str, Any] = {"data": data, "metric": metric, "plots": plots, "rows": rows}
        section |= {"headings": headings(members), "sizes": sizes_of(members)}
        section |= {"sentence": sentence(members), "memory": memory_rows(members)}
        section["baselines"] = [(name, f"{value:.4f}") for name, value in known.items()]
        section["differences"] = [[name, *(_difference_cell(run, name) for run in members)] for name in known]
        section["differing"] = [[key, *values] for key, values in differing.items()]
        section["differing_by_run"] = list(map(list, zip(labels(members), *differing.values(), strict=True)))
        sections.append(section)
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    title = "Federated runs side by side" if len(runs) > 1 else f"A federated run: {labels(runs)[0]}"
    page = fill_template(
        "fairfold.runs",
        f"templates/{PAGE}",
        title=title,
        count=count,
        groups=sections,
        version=__version__,
        paths=[str(run.path) for run in runs],
    )
    write_atomically(out / PAGE, page.encode())
    return written


def sentence(runs: list[RunSummary]) -> str:
    """Summarize in sentences what runs on the same data have reached; empty if none was evaluated."""
    evaluated = [(run.best.server, run, name) for run, name in zip(runs, labels(runs), strict=True) if run.best]
    if not evaluated:
        return ""
    quality, run, name = min(evaluated, key=lambda entry: entry[1].sign * entry[0])
    which = f"The best of {len(evaluated)} runs, {name}," if len(evaluated) > 1 else f"The run {name}"
    direction = "smaller" if run.settings.smaller_is_better else "larger"
    sentences = [f"{which} reaches {run.metric} {quality:.4f} ({direction} is better)."]
    known = {name: value for name, value in baselines_of(runs).items() if name != BEST_POSSIBLE}
    if known:
        strongest = min(known, key=lambda name: run.sign * known[name])
        sentences.append(f"Without federation, {strongest} reaches {known[strongest]:.4f}.")
    groups = [group for group in run.groups if group.bytes_held and group.comparable_quality is not None]
    for group in [groups[0], groups[-1]] if len(groups) > 1 else groups:
        held = human_bytes(group.bytes_held)
        sentences.append(f"A device of {group.capacity} holds {held} and reaches {group.comparable_quality:.4f}.")
    return " ".join(sentences)


def memory_rows(runs: list[RunSummary]) -> list[list[str]]:
    """Rows of the table of memory: one per run and size of devices, as text."""
    rows = []
    for run, name in zip(runs, labels(runs), strict=True):
        for group in run.groups:
            traffic = map(human_bytes, (group.bytes_held, group.bytes_down, group.bytes_up))
            quality = ("–" if value is None else f"{value:.4f}" for value in (group.quality, group.everybody))
            rows.append([name, group.capacity, f"{group.users:,}", *traffic, *quality])
    return rows


def _difference_cell(run: RunSummary, name: str) -> str:
    return format_difference(run.differences[name]) if name in run.differences else ""


def note_row(note: str) -> tuple[str, str]:
    """What a note is about, and the rest of it: ``"16x"`` and how its model was cut; a list of values is settings."""
    what, found, rest = note.partition(": ")
    if " = " in what:
        return "settings", note
    return (what, rest) if found else ("note", note)


def headings(runs: list[RunSummary]) -> list[str]:
    """Headings of the cells of :func:`table_rows`."""
    return ["rounds", f"best {runs[0].metric}", "in round", "last", *sizes_of(runs), "per round", "down", "up"]


def table_rows(runs: list[RunSummary]) -> list[dict[str, Any]]:
    """Rows of the table of runs: one per run, as text."""
    reached = [run.best.server * run.sign for run in runs if run.best is not None]
    rows = []
    for run, label in zip(runs, labels(runs), strict=True):
        best, last = run.best, run.last
        quality = ["–"] * 3
        if best is not None and last is not None:
            quality = [f"{best.server:.4f}", str(best.round_number), f"{last.server:.4f}"]
        sizes = [f"{last.sizes[size]:.4f}" if last and size in last.sizes else "" for size in sizes_of(runs)]
        seconds = "–" if run.seconds_per_round is None else human_seconds(run.seconds_per_round)
        traffic = (human_bytes(run.bytes_down), human_bytes(run.bytes_up))
        row: dict[str, Any] = {"label": label, "cells": [str(run.rounds), *quality, *sizes, seconds, *traffic]}
        row |= {"popularity": run.popularity, "notes": list(map(note_row, run.notes)), "audit": run.audit}
        row["mark"] = run.state if run.state == "unfinished" else ""
        row["reason"] = run.reason if run.state == "N/A" else ""
        row["is_best"] = best is not None and len(reached) > 1 and best.server * run.sign == min(reached)
        rows.append(row)
    return rows
