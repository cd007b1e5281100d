"""Plots of runs side by side, for the report page and as PNG files."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Literal

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fairfold.runs.summary import labels, references_of, sizes_of
from fairfold.runs.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from fairfold.runs.summary import RunSummary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
"""Told apart by people who see colours differently (Okabe and Ito)."""

SHADES = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7")
"""Of sizes, from large devices to small ones: no colour that stands for a run."""

WIDE, NARROW = (10.4, 4.2), (6.2, 4.4)
"""Inches: as wide as the page, and two side by side."""

STYLES = ("-", "--", ":", "-.")
INK, FAINT = "#1f2933", "#9aa5b1"
LOOK: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "fairfold",  # the same runs give the same page
}


def looks(runs: list[RunSummary]) -> list[tuple[str, str]]:
    """Colour and line of every run: a colour each; where there are more, a colour per method and a line per scheme."""
    if len(runs) <= len(COLOURS):
        return [(COLOURS[number], STYLES[0]) for number in range(len(runs))]
    methods = list(dict.fromkeys(run.method for run in runs))
    schemes = list(dict.fromkeys(run.settings.fleet.capacities for run in runs))
    places = [(methods.index(run.method), schemes.index(run.settings.fleet.capacities)) for run in runs]
    return [(COLOURS[method % len(COLOURS)], STYLES[scheme % len(STYLES)]) for method, scheme in places]


def figures(runs: list[RunSummary]) -> dict[str, Figure]:
    """All plots of runs on the same data, by name."""
    shown = [run for run in runs if run.evaluations]
    if not shown:
        return {}
    with rc_context(LOOK):
        first = {"quality against bytes held": _held(shown, labels(shown))} if any(map(_points, shown)) else {}
        return first | {
            "quality over rounds": _lines(shown, labels(shown), "round"),
            "quality by device size": _bars(shown, labels(shown)),
            "quality over bytes": _lines(shown, labels(shown), "bytes"),
        }


def rendered(figure: Figure, kind: str) -> bytes:
    """The file of a figure, ``png`` or ``svg``."""
    content = io.BytesIO()
    with rc_context(LOOK):
        clear, when = kind == "svg", {"Date": None} if kind == "svg" else None  # pages have a ground of their own
        figure.savefig(content, format=kind, dpi=160, metadata=when, transparent=clear)
    return content.getvalue()


def _points(run: RunSummary) -> list[tuple[str, int, float]]:
    """Size, bytes held and quality of the devices that hold a model."""
    return [(one.size, one.held, one.shown) for one in run.devices if one.held and one.shown is not None]


def _held(runs: list[RunSummary], names: list[str]) -> Figure:
    """What a device of each size holds (logarithmic) against the quality of its own model, a line per run."""
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(direction(runs[0].metric))
    for run, name, (colour, style) in zip(runs, names, looks(runs), strict=True):
        points = sorted(_points(run), key=lambda point: point[1])
        held, reached = [point[1] for point in points], [point[2] for point in points]
        axes.plot(held, reached, color=colour, linestyle=style, marker="o", linewidth=1.8, label=name)
        if len(runs) > len(COLOURS):
            continue  # names of sizes would cover each other
        for place in sorted(set(zip(held, reached, strict=True))):  # sizes that hold the same have one name together
            sizes = [size for size, *point in points if tuple(point) == place]
            axes.annotate(", ".join(sizes), place, xytext=(0, 7), textcoords="offset points", ha="center")
    _references(runs, axes, "y")
    axes.set_xscale("log")
    held = sorted({held for run in runs for _, held, _ in _points(run)})
    room = (held[-1] / held[0]) ** 0.12  # of a label, on this scale
    ticks = [value for number, value in enumerate(held) if number == 0 or value > held[number - 1] * room]
    axes.set_xticks(ticks, list(map(human_bytes, ticks)))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("bytes of memory that a device holds")
    legend(figure, [axes], 2)
    axes.margins(0.12, 0.15)
    return figure


def _references(runs: list[RunSummary], axes: Axes, axis: Literal["x", "y"], **text: Any) -> None:
    """A line for every reference by its short name; those that are close to each other share one."""
    known: dict[str, float] = {}
    for name, value in references_of(runs).items():
        known.setdefault(short(name), value)
    low, high = axes.get_ylim() if axis == "y" else axes.get_xlim()
    room = 0.045 * (max(high, *known.values()) - min(low, *known.values())) if known else 0.0
    for name, values in together(known, room if axis == "y" else 3 * room):
        reference(axes, axis, values, name, **text)


def together(known: Mapping[str, float], room: float) -> list[tuple[str, list[float]]]:
    """Short names with their values; those closer than a label needs share one label, a line of it each."""
    found: list[tuple[list[str], list[float]]] = []
    for name, value in sorted(known.items(), key=lambda row: row[1]):
        if not found or value - found[-1][1][0] >= room:
            found.append(([], []))
        found[-1][1].append(value)
        if short(name) not in found[-1][0]:
            found[-1][0].append(short(name))
    return [(",\n".join(names), values) for names, values in found]


def short(name: str) -> str:
    """The name of a reference without what it was given: its items, and what it was tuned to."""
    return re.split(r" \(| of |, items", name)[0]


def _lines(runs: list[RunSummary], names: list[str], over: str) -> Figure:
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(direction(runs[0].metric))
    for run, name, (colour, style) in zip(runs, names, looks(runs), strict=True):
        across = [one.round_number if over == "round" else one.bytes_moved for one in run.evaluations]
        axes.plot(
            across, [one.server for one in run.evaluations], color=colour, linestyle=style, linewidth=1.8,
            marker="o", markersize=3.5 if len(across) < 40 else 0, label=name,
        )  # fmt: skip
    _references(runs, axes, "y")
    axes.set_xlim(left=0)
    if over == "round":
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlabel("bytes sent and received by all devices")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    if over == "round" or len(runs) <= len(COLOURS):  # among more the colours are those of the plot over rounds
        legend(figure, [axes], 2)
    axes.margins(y=0.12)
    return figure


def _bars(runs: list[RunSummary], names: list[str]) -> Figure:
    """The last quality of every size's own model, a cluster per run, from top to bottom."""
    bars = [*sizes_of(runs), "server"]
    figure = Figure(figsize=(NARROW[0], max(NARROW[1], 1.2 + 0.42 * len(runs))), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(direction(runs[0].metric))
    for number, size in enumerate(bars):
        ends = [{**run.last.sizes, "server": run.last.server} if run.last else {} for run in runs]
        held = [(place, end[size]) for place, end in enumerate(ends) if size in end]
        width = 0.8 / len(bars)
        axes.barh(
            [place + (number - (len(bars) - 1) / 2) * width for place, _ in held],
            [value for _, value in held],
            width * 0.92,
            color=INK if size == "server" else SHADES[min(number, len(SHADES) - 1)],
            label="server's model" if size == "server" else size,
        )
    _references(runs, axes, "x", ha="center")
    axes.set_yticks(range(len(runs)), names, fontsize=8.5)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    legend(figure, [axes], min(len(bars), 6))
    return figure


def reference(axes: Axes, axis: Literal["x", "y"], values: list[float], name: str, **text: Any) -> None:
    """A dashed line at each of some values of an axis, and one name for them beside or above the plot."""
    for value in values:
        line = axes.axhline if axis == "y" else axes.axvline
        line(value, color=FAINT, linestyle=(0, (5, 4)), linewidth=1.2, zorder=0.5)
    middle = (values[0] + values[-1]) / 2
    place = (1.01, middle) if axis == "y" else (middle, 1.0)
    sides: Any = ("axes fraction", "data") if axis == "y" else ("data", "axes fraction")
    look: Any = {"fontsize": 8.5, "xytext": (0, 0 if axis == "y" else 3), "va": "center" if axis == "y" else "bottom"}
    axes.annotate(
        name, place, xycoords=sides, textcoords="offset points", color="#616e7c", annotation_clip=False, **look | text
    )


def direction(metric: str) -> str:
    """A metric, and of those of quality which way is better."""
    if metric not in ("MSE", "accuracy") and not metric.startswith("NDCG"):
        return metric
    return f"{metric} ({'smaller' if metric == 'MSE' else 'larger'} is better)"


def legend(figure: Figure, plots: list[Axes], columns: int = 4) -> None:
    """Every name once, below the plot, where it hides nothing."""
    found = {name: line for axes in plots for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8.5)
