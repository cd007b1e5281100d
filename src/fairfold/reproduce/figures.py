"""Plots of a table: ours beside the paper's, and values over rounds (:mod:`fairfold.reproduce.curves`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure

from fairfold.reproduce.curves import curves, label, legend, together
from fairfold.runs.plots import COLOURS, FAINT, INK, LOOK, WIDE

if TYPE_CHECKING:
    from fairfold.reproduce.tables import Entry, Grid


MARKS = ("o", "D", "s")
"""Of columns, another where colours begin again."""


def figures(grid: Grid) -> dict[str, Figure]:
    """The plots of a table by name; none where nothing was run."""
    done = [entry for entry in grid.entries if entry.state == "done"]
    if not done:
        return {}
    with rc_context(LOOK):
        found = {"compared": _compared(grid, done)}
        over_rounds = curves(grid, [entry for entry in done if len(entry.curve) > 1])
        if over_rounds is not None:
            found["curves"] = over_rounds
    return found


def _compared(grid: Grid, done: list[Entry]) -> Figure:
    """A dot a cell with its spread, the paper's figure as a cross, from top to bottom."""
    columns = list(dict.fromkeys(entry.column for entry in done))
    figure = Figure(figsize=(WIDE[0], 2.4 + 0.27 * len(done)), layout="constrained")
    axes = figure.add_subplot()
    for number, column in enumerate(columns):
        own = [(place, entry) for place, entry in enumerate(done) if entry.column == column]
        axes.errorbar(
            [entry.mean or 0.0 for _, entry in own],
            [place for place, _ in own],
            xerr=[entry.spread or 0.0 for _, entry in own],
            fmt=MARKS[number // len(COLOURS) % len(MARKS)], color=COLOURS[number % len(COLOURS)], capsize=3,
            label=column or grid.file.metric,
        )  # fmt: skip
    published = [(place, entry.paper) for place, entry in enumerate(done) if isinstance(entry.paper, float | int)]
    if published:
        axes.plot(
            [value for _, value in published], [place for place, _ in published],
            "x", color=INK, markersize=7, label="the paper's figure",
        )  # fmt: skip
    known = [value for value in grid.references.values() if isinstance(value, float)]
    low, high = min([axes.get_xlim()[0], *known]), max([axes.get_xlim()[1], *known])
    for name, value in together(grid, 0.025 * (high - low)):
        axes.axvline(value, color=FAINT, linestyle=(0, (5, 4)), linewidth=1.1, zorder=0.5)
        axes.annotate(
            name, (value, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            color="#616e7c", fontsize=8, ha="left", va="bottom", rotation=30, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(done)), [f"{entry.row} {entry.column}" for entry in done], fontsize=8.5)
    axes.set_ylim(len(done) - 0.5, -0.5)
    axes.set_xlabel(label(grid))
    if grid.file.metric == "compression":
        axes.set_xscale("log")
    legend(figure, [axes])
    return figure
