"""Plots of a table: ours beside the paper's, and values over rounds."""

from __future__ import annotations

from math import isfinite
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure

from fairfold.runs.plots import COLOURS, FAINT, INK, LOOK, STYLES, WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fairfold.reproduce.tables import Entry, Grid


MARKS = ("o", "D", "s")
"""Of columns, another where colours begin again."""
MOST_CURVES = 60
"""More than that cannot be told apart, and their names alone fill the plot."""


def figures(grid: Grid) -> dict[str, Figure]:
    """The plots of a table by name; none where nothing was run."""
    done = [entry for entry in grid.entries if entry.state == "done"]
    if not done:
        return {}
    with rc_context(LOOK):
        found = {"compared": _compared(grid, done)}
        curves = [entry for entry in done if len(entry.curve) > 1]
        if 0 < len(curves) <= MOST_CURVES:
            found["curves"] = _curves(grid, curves)
    return found


def _name(entry: Entry) -> str:
    return f"{entry.row} {entry.column}".strip()


def _label(grid: Grid) -> str:
    if grid.file.metric not in ("MSE", "accuracy") and not grid.file.metric.startswith("NDCG"):
        return grid.file.metric
    return f"{grid.file.metric} ({'smaller' if grid.smaller_is_better else 'larger'} is better)"


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
    for name, value in _together(grid, 0.025 * (high - low)):
        axes.axvline(value, color=FAINT, linestyle=(0, (5, 4)), linewidth=1.1, zorder=0.5)
        axes.annotate(
            name, (value, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            color="#616e7c", fontsize=8, ha="left", va="bottom", rotation=30, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(done)), [f"{entry.row} {entry.column}" for entry in done], fontsize=8.5)
    axes.set_ylim(len(done) - 0.5, -0.5)
    axes.set_xlabel(_label(grid))
    if grid.file.metric == "compression":
        axes.set_xscale("log")
    _legend(figure, axes)
    return figure


def _together(grid: Grid, room: float) -> list[tuple[str, float]]:
    """Reference rows by value; those closer than a label needs share one, at the first of them."""
    found: list[tuple[str, float]] = []
    values = {name: value for name, value in grid.references.items() if isinstance(value, float)}
    for name, value in sorted(values.items(), key=lambda row: row[1]):
        if found and value - found[-1][1] < room:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, value))
    return found


def _curves(grid: Grid, done: list[Entry]) -> Figure:
    """Mean over the seeds; a colour a column and a line a row where there are more than seven."""
    figure = Figure(figsize=WIDE, layout="constrained")
    axes = figure.add_subplot()
    columns = list(dict.fromkeys(entry.column for entry in done))
    rows = list(dict.fromkeys(entry.row for entry in done))
    few = len(done) <= len(COLOURS)
    for number, entry in enumerate(done):
        colour = COLOURS[(number if few else columns.index(entry.column)) % len(COLOURS)]
        style = STYLES[0] if few else STYLES[rows.index(entry.row) % len(STYLES)]
        across, up = zip(*entry.curve, strict=True)
        axes.plot(across, up, color=colour, linestyle=style, linewidth=1.6, label=_name(entry))
    axes.set_xlabel("round")
    if grid.file.curves == "loglog":
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel(str(done[0].facts.get("curve", grid.file.metric)))
    else:
        axes.set_ylabel(_label(grid))
        axes.set_xlim(left=0)
        _show_what_matters(axes, done, grid.smaller_is_better)
    low, high = axes.get_ylim()
    for name, value in _together(grid, 0.03 * (high - low)):
        if low < value < high:  # others would be drawn outside of the plot
            axes.axhline(value, color=FAINT, linestyle=(0, (5, 4)), linewidth=1.1, zorder=0.5)
            axes.annotate(
                name, (1.01, value), xycoords=("axes fraction", "data"), color="#616e7c", fontsize=8, va="center",
                annotation_clip=False,
            )  # fmt: skip
    _legend(figure, axes)
    return figure


def _show_what_matters(axes: Axes, done: list[Entry], smaller_is_better: bool) -> None:
    """Errors of the first rounds are so large that nothing else could be seen: show what comes after them.

    Nor may a few curves that collapse take the room of all others. If the better three quarters of the curves (of four
    or more), but for a twentieth of their points, lie within a quarter of the range, the plot ends a little beyond
    them, and says whose end is not in it.
    """
    sign = -1 if smaller_is_better else 1
    late = {_name(entry): _late(entry, sign) for entry in done}
    late = {name: values for name, values in late.items() if values}
    if not late:
        return
    ranked = sorted(late.values(), key=median, reverse=True)
    better = ranked[: len(ranked) * 3 // 4] if len(ranked) > 3 else ranked
    most = sorted(value for values in better for value in values)
    top, bottom = max(map(max, ranked)), min(map(min, ranked))
    usual = most[len(most) // 20]
    if top - usual < 0.25 * (top - bottom):
        bottom = usual - 0.5 * (top - usual)
    room = 0.1 * (top - bottom or 1)
    axes.set_ylim(*sorted([sign * (bottom - room), sign * (top + room)]))
    outside = [f"{name} ({sign * values[-1]:.2f})" for name, values in late.items() if values[-1] < bottom - room]
    if outside:
        axes.set_title(fill(f"Not in the plot at the end: {', '.join(outside)}", 130), fontsize=8.5, loc="left")


def _late(entry: Entry, sign: int) -> list[float]:
    """The values of a curve after its first fifth, with the sign that makes larger better."""
    return [sign * y for x, y in entry.curve if x >= 0.2 * entry.curve[-1][0] and isfinite(y)]


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8.5)
