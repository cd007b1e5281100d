"""Runs side by side on one page that opens anywhere: no scripts, nothing fetched, plots inside."""

import base64
import re
from importlib import resources
from pathlib import Path
from typing import Any

from fairfold.errors import InvalidSettings
from fairfold.files import make_folder, write_atomically
from fairfold.runs.summary import RunSummary, by_data, differing_settings, labels, references_of, sizes_of
from fairfold.runs.units import difference_words, human_bytes, human_seconds
from fairfold.simulate.world import BEST_POSSIBLE
from fairfold.version import __version__

PAGE = "report.html"


def require_plots() -> None:
    """Refuse before any work where plots and page could not be made."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidSettings(
            f"plots and a page without {error.name}", "Jinja2 and matplotlib", "pip install 'fairfold[report]'"
        ) from None


def rendered_page(package: str, name: str, **values: Any) -> str:
    """A template of a package, filled; in HTML, values are text and nothing else."""
    import jinja2

    escaped = name.endswith(".html")
    environment = jinja2.Environment(autoescape=escaped, undefined=jinja2.StrictUndefined, trim_blocks=True)
    if escaped:  # all pages look alike
        values |= {"style": (resources.files("fairfold.runs") / "templates/page.css").read_text(encoding="utf-8")}
    return environment.from_string((resources.files(package) / name).read_text(encoding="utf-8")).render(**values)


def write_report(runs: list[RunSummary], out: Path) -> list[Path]:
    """Write the page to a folder, and each plot as a PNG file beside it; returns the files, the page first.

    Runs on different data get sections of their own.
    """
    require_plots()
    from fairfold.runs.plots import figures, looks, rendered

    make_folder(out)
    groups, written = by_data(runs), [out / PAGE]
    sections: list[dict[str, Any]] = []
    for (data, metric), members in groups.items():
        plots = []
        for name, figure in figures(members).items():
            plots.append({"name": name, "content": base64.b64encode(rendered(figure, "svg")).decode()})
            stem = name if len(groups) == 1 else f"{name} {data} {metric}"
            written.append(out / f"{re.sub(r'[^A-Za-z0-9]+', '-', stem).strip('-')}.png")
            write_atomically(written[-1], rendered(figure, "png"))
        differing = differing_settings(members) if len(members) > 1 else {}
        colours = (colour for colour, _ in looks([run for run in members if run.evaluations]))
        sections.append(
            {
                "data": data,
                "metric": metric,
                "sentence": sentence(members),
                "memory": memory_rows(members),
                "sizes": sizes_of(members),
                "headings": headings(members),
                "rows": [
                    row | {"colour": next(colours) if run.evaluations else "transparent"}
                    for row, run in zip(table_rows(members), members, strict=True)
                ],
                "references": [(name, f"{value:.4f}") for name, value in references_of(members).items()],
                "apart": [[name, *(_apart(run, name) for run in members)] for name in references_of(members)],
                "plots": plots,
                "differing": [[key, *values] for key, values in differing.items()],
                "turned": [[name, *values] for name, *values in zip(labels(members), *differing.values(), strict=True)],
            }
        )
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    page = rendered_page(
        "fairfold.runs", f"templates/{PAGE}", title="Federated runs side by side", count=count, groups=sections,
        version=__version__, paths=[str(run.path) for run in runs],
    )  # fmt: skip
    write_atomically(out / PAGE, page.encode())
    return written


def sentence(runs: list[RunSummary]) -> str:
    """What runs on the same data have reached, in words; nothing where none was evaluated."""
    named = [(run, name) for run, name in zip(runs, labels(runs), strict=True) if run.best is not None]
    if not named:
        return ""
    smaller, metric = runs[0].settings.smaller_is_better, runs[0].metric
    sign = 1 if smaller else -1
    run, name = min(named, key=lambda each: sign * each[0].best.server if each[0].best else 0.0)
    assert run.best is not None
    which = f"The best of {len(named)} runs, {name}," if len(named) > 1 else f"The run {name}"
    words = [f"{which} reaches {metric} {run.best.server:.4f} ({'smaller' if smaller else 'larger'} is better)."]
    known = {name: value for name, value in references_of(runs).items() if name != BEST_POSSIBLE}
    if known:
        strongest = min(known, key=lambda name: sign * known[name])
        words.append(f"Without federation, {strongest} reaches {known[strongest]:.4f}.")
    ends = [one for one in run.devices if one.held and one.shown is not None]
    for one in [ends[0], *ends[-1:]] if len(ends) > 1 else ends:
        words.append(f"A device of {one.size} holds {human_bytes(one.held)} and reaches {one.shown:.4f}.")
    return " ".join(words)


def memory_rows(runs: list[RunSummary]) -> list[list[str]]:
    """One row per run and size of devices: all as text."""
    return [
        [name, one.size, f"{one.users:,}", *map(human_bytes, (one.held, one.down, one.up)),
         *("–" if value is None else f"{value:.4f}" for value in (one.quality, one.everybody))]
        for run, name in zip(runs, labels(runs), strict=True)
        for one in run.devices
    ]  # fmt: skip


def _apart(run: RunSummary, name: str) -> str:
    return difference_words(run.differences[name]) if name in run.differences else ""


def headings(runs: list[RunSummary]) -> list[str]:
    """Of the cells of :func:`table_rows`."""
    return ["rounds", f"best {runs[0].metric}", "in round", "last", *sizes_of(runs), "per round", "down", "up"]


def table_rows(runs: list[RunSummary]) -> list[dict[str, Any]]:
    """One row per run: all as text, as table and page show it."""
    sign = 1 if runs[0].settings.smaller_is_better else -1
    reached = [run.best.server * sign for run in runs if run.best is not None]
    rows = []
    for run, label in zip(runs, labels(runs), strict=True):
        best, last, quality = run.best, run.last, ["–"] * 3
        if best is not None and last is not None:
            quality = [f"{best.server:.4f}", str(best.round_number), f"{last.server:.4f}"]
        sizes = [f"{last.sizes[size]:.4f}" if last and size in last.sizes else "" for size in sizes_of(runs)]
        seconds = "–" if run.seconds_per_round is None else human_seconds(run.seconds_per_round)
        rows.append(
            {
                "label": label,
                "mark": "unfinished" if run.state == "unfinished" else "",
                "reason": run.reason if run.state == "N/A" else "",
                "popularity": run.popularity,
                "told": run.told,
                "audit": run.audit,
                "is_best": best is not None and len(reached) > 1 and best.server * sign == min(reached),
                "cells": [
                    str(run.rounds), *quality, *sizes, seconds, human_bytes(run.bytes_down), human_bytes(run.bytes_up)
                ],
            }
        )  # fmt: skip
    return rows
