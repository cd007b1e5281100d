"""Plots of a result table: our figures beside the paper's, and curves over rounds.

Of the latter there is one plot where a few lines can be distinguished, else one per row or per column of the table.
"""

from __future__ import annotations

from math import ceil, isfinite
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure

from fairfold.runs.plots import COLORS, INK, STYLE, STYLES, WIDE, baseline_line, legend, merge_labels, metric_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from experiments.tables import Entry, ResultTable


MARKS = ("o", "D", "s")
"""Of columns, another where colors begin again."""

MOST_LINES, MOST_PANELS = len(COLORS) * len(STYLES), 16
"""Beyond these, lines of one panel look alike, and panels are too small to see anything."""

TALL = 7.6
"""Inches: the width of a plot that is to be read on a phone, too."""

Panel = tuple[str, list[tuple[str, "Entry"]]]
"""A title, and its lines with their names."""


def figures(result_table: ResultTable) -> dict[str, Figure]:
    """The plots of a table by name; none where nothing was run."""
    done = [entry for entry in result_table.entries if entry.state == "done"]
    if (
        result_table.file.metric in result_table.file.measures
    ):  # bytes and seconds have no place on the axis of a quality
        done = [entry for entry in done if entry.column == result_table.file.metric]
    if not done:
        return {}
    with rc_context(STYLE):
        found = {"compared": _compared(result_table, done)}
        over_rounds = _curves(result_table, [entry for entry in done if len(entry.curve) > 1])
        if over_rounds is not None:
            found["curves"] = over_rounds
    return found


def _compared(result_table: ResultTable, done: list[Entry]) -> Figure:
    """A dot per cell with its spread, the paper's figure as a cross, from top to bottom."""
    columns = list(dict.fromkeys(entry.column for entry in done))
    figure = Figure(figsize=(TALL, 2.4 + 0.27 * len(done)), layout="constrained")
    axes = figure.add_subplot()
    for number, column in enumerate(columns):
        own = [(place, entry) for place, entry in enumerate(done) if entry.column == column]
        axes.errorbar(
            [entry.mean or 0.0 for _, entry in own],
            [place for place, _ in own],
            xerr=[entry.spread or 0.0 for _, entry in own],
            fmt=MARKS[number // len(COLORS) % len(MARKS)], color=COLORS[number % len(COLORS)], capsize=3,
            label=column or result_table.file.metric,
        )  # fmt: skip
    published = [(place, entry.paper) for place, entry in enumerate(done) if isinstance(entry.paper, float | int)]
    if published:
        axes.plot(
            [value for _, value in published], [place for place, _ in published],
            "x", color=INK, markersize=7, label="the paper's figure",
        )  # fmt: skip
    known = [value for value in result_table.baselines.values() if isinstance(value, float)]
    low, high = min([axes.get_xlim()[0], *known]), max([axes.get_xlim()[1], *known])
    for name, values in _together(result_table, 0.14 * (high - low)):
        baseline_line(axes, "x", values, name, ha="center", fontsize=8)
    axes.set_yticks(range(len(done)), [f"{entry.row} {entry.column}" for entry in done], fontsize=8.5)
    axes.set_ylim(len(done) - 0.5, -0.5)
    axes.set_xlabel(metric_label(result_table.file.metric))
    if result_table.file.metric == "compression":
        axes.set_xscale("log")
    legend(figure, [axes])
    return figure


def _curves(result_table: ResultTable, done: list[Entry]) -> Figure | None:
    """Means over the seeds; None where there is nothing to draw, or more than could be distinguished."""
    panels = _panels(done)
    lines = list(dict.fromkeys(name for _, own in panels for name, _ in own))
    if not done or len(lines) > MOST_LINES or len(panels) > MOST_PANELS:
        return None
    across = min(len(panels), 2 if len(panels) <= 4 else 3 if len(panels) <= 9 else 4)
    down = ceil(len(panels) / across)
    height = WIDE[1] if len(panels) == 1 else 1.2 + 2.5 * down
    figure = Figure(figsize=(WIDE[0], height), layout="constrained")
    plots: list[Axes] = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    for axes, (title, own) in zip(plots, panels, strict=False):
        for name, entry in own:
            number = lines.index(name)
            color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS)]
            axes.plot(*zip(*entry.curve, strict=True), color=color, linestyle=style, linewidth=1.6, label=name)
        axes.set_title(title, fontsize=9.5, loc="left")
    shown = plots[: len(panels)]
    for axes in plots[len(panels) :]:
        axes.set_visible(False)
    loglog = result_table.file.curves == "loglog"
    for axes in shown[::across]:
        axes.set_ylabel(
            str(done[0].facts.get("curve", result_table.file.metric))
            if loglog
            else metric_label(result_table.file.metric)
        )
    for axes in shown[-across:]:  # no other is below
        axes.set_xlabel("round (means over the seeds)")
        axes.tick_params(labelbottom=True)
    if loglog:
        plots[0].set_xscale("log")
        plots[0].set_yscale("log")
    else:
        plots[0].set_xlim(left=0)
        _show_what_matters(figure, plots[0], done, result_table.smaller_is_better)
    low, high = plots[0].get_ylim()
    for name, known in _together(result_table, 0.03 * (high - low) * down):
        values = [value for value in known if low < value < high]
        if not values:  # would be drawn outside of the plot
            continue
        for place, axes in enumerate(shown, 1):  # named at the right end of each line of panels
            baseline_line(axes, "y", values, "" if place % across else name.replace("\n", " "), fontsize=8)
    legend(figure, shown)
    return figure


def _panels(done: list[Entry]) -> list[Panel]:
    """One for a few lines; else one per row or one per column, whichever are fewer."""
    if len(done) <= len(COLORS):
        return [("", [(_named(entry), entry) for entry in done])]
    rows, columns = ({getattr(entry, side) for entry in done} for side in ("row", "column"))
    apart, along = ("row", "column") if len(rows) <= len(columns) else ("column", "row")
    found: dict[str, list[tuple[str, Entry]]] = {}
    for entry in done:
        found.setdefault(getattr(entry, apart), []).append((getattr(entry, along), entry))
    return list(found.items())


def _named(entry: Entry) -> str:
    return f"{entry.row} {entry.column}".strip()


def _together(result_table: ResultTable, room: float) -> list[tuple[str, list[float]]]:
    """Baseline rows by value, those that are close with one name."""
    return merge_labels(
        {name: value for name, value in result_table.baselines.items() if isinstance(value, float)}, room
    )


def _show_what_matters(figure: Figure, axes: Axes, done: list[Entry], smaller_is_better: bool) -> None:
    """Errors of the first rounds are so large that nothing else could be seen: show what comes after them.

    Nor may a few curves that collapse take the room of all others. If the better three quarters of the curves (of four
    or more), but for a twentieth of their points, lie within a quarter of the range, the plot ends a little beyond
    them, and says whose end is not in it.
    """
    sign = -1 if smaller_is_better else 1
    late = {_named(entry): _late(entry, sign) for entry in done}
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
        figure.suptitle(fill(f"Not in the plot at the end: {', '.join(outside)}", 130), fontsize=8.5)


def _late(entry: Entry, sign: int) -> list[float]:
    """The values of a curve after its first fifth, with the sign that makes larger better."""
    return [sign * y for x, y in entry.curve if x >= 0.2 * entry.curve[-1][0] and isfinite(y)]
