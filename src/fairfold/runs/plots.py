"""Plots that compare runs, for the report and as PNG files, and the style that all plots share."""

import io
import re
from collections.abc import Mapping
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fairfold.runs.report import RunSummary, baselines_of, labels, sizes_of
from fairfold.runs.units import human_bytes

# Of runs; distinct for people with color vision deficiencies (Okabe and Ito).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
# Of sizes, from large devices to small ones.
SHADES = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7")
WIDE, NARROW = (10.4, 4.2), (6.2, 4.4)  # sizes of figures in inches: as wide as the page, and half as wide
STYLES = ("-", "--", ":", "-.")
Point = tuple[str, int, float]  # size, bytes held and quality of devices
INK, FAINT = "#1f2933", "#9aa5b1"
STYLE: Any = {"font.size": 10, "legend.frameon": False, "axes.grid": True, "axes.axisbelow": True}
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
STYLE |= {"axes.edgecolor": FAINT, "grid.color": "#e4e7eb", "axes.spines.top": False, "axes.spines.right": False}
STYLE["svg.hashsalt"] = "fairfold"  # the same runs give the same page


def line_styles(runs: list[RunSummary]) -> list[tuple[str, str]]:
    """Color and line style of every run; of many runs a color per method and a line style per scheme."""
    if len(runs) <= len(COLORS):
        return [(color, STYLES[0]) for color in COLORS[: len(runs)]]
    methods = list(dict.fromkeys(run.method for run in runs))
    schemes = list(dict.fromkeys(run.settings.fleet.capacities for run in runs))
    places = [(methods.index(run.method), schemes.index(run.settings.fleet.capacities)) for run in runs]
    return [(COLORS[method % len(COLORS)], STYLES[scheme % len(STYLES)]) for method, scheme in places]


def figures(runs: list[RunSummary]) -> dict[str, Figure]:
    """Make all plots of runs on the same data, by name."""
    runs = [run for run in runs if run.evaluations]
    if not runs:
        return {}
    names = labels(runs)
    with rc_context(STYLE):
        first = {"quality against bytes held": _memory(runs, names)} if any(map(_points, runs)) else {}
        return first | {
            "quality over rounds": _lines(runs, names, "round"),
            "quality by device size": _bars(runs, names),
            "quality over bytes": _lines(runs, names, "bytes"),
        }


def render_figure(figure: Figure, kind: str) -> bytes:
    """Render a figure as ``png``, or as ``svg`` with a transparent background."""
    content = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with rc_context(STYLE):
        figure.savefig(content, format=kind, dpi=160, metadata=metadata, transparent=kind == "svg")
    return content.getvalue()


def _points(run: RunSummary) -> list[Point]:
    """Size, bytes held and quality of the devices that hold a model."""
    points = [(group.capacity, group.bytes_held, group.comparable_quality) for group in run.groups]
    return [(size, held, quality) for size, held, quality in points if held and quality is not None]


def _memory(runs: list[RunSummary], names: list[str]) -> Figure:
    """Plot the quality of each size's own model against its memory, a line per run."""
    looks = [{"color": color, "linestyle": style, "marker": "o"} for color, style in line_styles(runs)]
    lines = [(name, _points(run), look) for name, run, look in zip(names, runs, looks, strict=True)]
    # Of many runs names of sizes would overlap
    return quality_by_memory(lines, runs[0].metric, baselines_of(runs), annotated=len(runs) <= len(COLORS))


def quality_by_memory(
    lines: list[tuple[str, list[Point], dict[str, str]]],
    metric: str,
    baselines: Mapping[str, float],
    *,
    annotated: bool = True,
) -> Figure:
    """Plot quality against bytes held (logarithmic), a line of devices by name with its look; baselines are dashed."""
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(metric_label(metric))
    sizes: dict[tuple[float, float], str] = {}
    for name, unordered, look in lines:
        points = sorted(unordered, key=lambda point: point[1])
        places = [(held, reached) for _, held, reached in points]
        own: Any = look if len(points) > 1 else look | {"linestyle": ""}
        axes.plot(*zip(*places, strict=True) if places else ((), ()), linewidth=1.8, label=name, **own)
        for place in set(places) if annotated else ():  # equal sizes share a label
            sizes[place] = ", ".join(size for size, *point in points if tuple(point) == place)
    _baselines(baselines, axes, "y")
    _write_sizes(axes, sizes)
    axes.set_xscale("log")
    held = sorted({held for _, points, _ in lines for _, held, _ in points})
    ticks, room = held[:1], (held[-1] / held[0]) ** 0.16  # for a label, on this scale
    for value in held[1:]:
        ticks += [value] if value > ticks[-1] * room else []
    axes.set_xticks(ticks, list(map(human_bytes, ticks)))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("bytes of memory that a device holds")
    legend(figure, [axes], 2)
    axes.margins(0.12, 0.15)
    return figure


def _write_sizes(axes: Axes, sizes: Mapping[tuple[float, float], str]) -> None:
    """Write sizes at their points: above each, or below it where the label would reach the next point above."""
    low, high = axes.get_ylim()
    for (held, reached), text in sorted(sizes.items()):
        is_below = any(other == held and 0 < above - reached < 0.08 * (high - low) for other, above in sizes)
        offset, side = (-7, "top") if is_below else (7, "bottom")
        axes.annotate(text, (held, reached), (0, offset), textcoords="offset points", ha="center", va=side)


def _baselines(baselines: Mapping[str, float], axes: Axes, axis: Literal["x", "y"], **text: Any) -> None:
    """Draw a line for every baseline; those that are close to each other share a label."""
    known: dict[str, float] = {}
    for name, value in baselines.items():
        known.setdefault(short_name(name), value)
    low, high = axes.get_ylim() if axis == "y" else axes.get_xlim()
    room = 0.045 * (max(high, *known.values()) - min(low, *known.values())) if known else 0.0
    for name, values in merge_labels(known, *((room, room) if axis == "y" else (3 * room, 0.0))):
        baseline_line(axes, axis, values, name, **text)


def merge_labels(known: Mapping[str, float], room: float, line: float = 0.0) -> list[tuple[str, list[float]]]:
    """Group baselines that are closer than their labels need: a label of a line per short name, and the values.

    Two labels of one line need ``room`` between their middles, and half of ``line`` more for every further line.
    """
    groups = [([short_name(name)], [value]) for name, value in sorted(known.items(), key=lambda row: row[1])]
    at = 0
    while at + 1 < len(groups):
        (names, values), (others, more) = groups[at : at + 2]
        needed = room + line * (len(names) + len(others) - 2) / 2
        if (more[0] + more[-1] - values[0] - values[-1]) / 2 < needed:
            groups[at : at + 2] = [(list(dict.fromkeys(names + others)), values + more)]
            at = max(at - 1, 0)  # the label has grown: it may reach the one before now
        else:
            at += 1
    return [(",\n".join(names), values) for names, values in groups]


def short_name(name: str) -> str:
    """Name of a baseline without its items and tuned settings."""
    return re.split(r" \(| of | cut to |, items", name)[0]


def _lines(runs: list[RunSummary], names: list[str], over: str) -> Figure:
    """Plot the quality of the server's models over rounds or bytes."""
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(metric_label(runs[0].metric))
    for run, name, (color, style) in zip(runs, names, line_styles(runs), strict=True):
        across = [one.round_number if over == "round" else one.total_bytes for one in run.evaluations]
        axes.plot(
            across,
            [one.server for one in run.evaluations],
            color=color,
            linestyle=style,
            linewidth=1.8,
            marker="o",
            markersize=3.5 if len(across) < 40 else 0,
            label=name,
        )
    _baselines(baselines_of(runs), axes, "y")
    axes.set_xlim(left=0)
    if over == "round":
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlabel("bytes sent and received by all devices")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    if over == "round" or len(runs) <= len(COLORS):  # many runs have one legend, that of the plot over rounds
        legend(figure, [axes], 2)
    axes.margins(y=0.12)
    return figure


def _bars(runs: list[RunSummary], names: list[str]) -> Figure:
    """Plot the last quality of every size's own model, a cluster of bars per run."""
    bars = [*sizes_of(runs), "server"]
    figure = Figure(figsize=(NARROW[0], max(NARROW[1], 1.2 + 0.42 * len(runs))), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(metric_label(runs[0].metric))
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
    _baselines(baselines_of(runs), axes, "x", ha="center")
    axes.set_yticks(range(len(runs)), names, fontsize=8.5)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    legend(figure, [axes], min(len(bars), 6))
    return figure


def baseline_line(axes: Axes, axis: Literal["x", "y"], values: list[float], name: str, **text: Any) -> None:
    """Draw a dashed line at each value of an axis, and one label for them beside or above the plot."""
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


def metric_label(metric: str) -> str:
    """Label of a metric, which says whether smaller or larger values are better."""
    if metric not in ("MSE", "accuracy") and not metric.startswith("NDCG"):
        return metric
    return f"{metric} ({'smaller' if metric == 'MSE' else 'larger'} is better)"


def legend(figure: Figure, plots: list[Axes], columns: int = 4) -> None:
    """Draw a legend below the plots, with every name once."""
    found = {name: line for axes in plots for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, fontsize=8.5)
