"""Plots of runs side by side, for the report page and as PNG files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fairfold.runs.summary import labels, references_of, sizes_of
from fairfold.runs.units import human_bytes

if TYPE_CHECKING:
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


def figures(runs: list[RunSummary]) -> dict[str, Figure]:
    """All plots of runs on the same data, by name."""
    shown = [run for run in runs if run.evaluations]
    if not shown:
        return {}
    with rc_context(LOOK):
        return {
            "quality over rounds": _lines(shown, labels(shown), "round", WIDE),
            "quality by device size": _bars(shown, labels(shown)),
            "quality over bytes": _lines(shown, labels(shown), "bytes", NARROW),
        }


def rendered(figure: Figure, kind: str) -> bytes:
    """The file of a figure, ``png`` or ``svg``."""
    content = io.BytesIO()
    with rc_context(LOOK):
        figure.savefig(content, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _lines(runs: list[RunSummary], names: list[str], over: str, inches: tuple[float, float]) -> Figure:
    figure, axes = _figure(runs[0].metric, inches)
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        across = [
            evaluation.round_number if over == "round" else evaluation.bytes_moved for evaluation in run.evaluations
        ]
        axes.plot(
            across,
            [evaluation.server for evaluation in run.evaluations],
            color=COLOURS[number % len(COLOURS)],
            linestyle=STYLES[number // len(COLOURS) % len(STYLES)],
            marker="o",
            markersize=3.5 if len(across) < 40 else 0,
            linewidth=1.8,
            label=name,
        )
    _references(axes, runs)
    if over == "round":
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlabel("bytes sent and received by all devices")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    _legend(figure, axes, 4 if inches == WIDE else 2)
    return figure


def _bars(runs: list[RunSummary], names: list[str]) -> Figure:
    """The last quality of every size's own model, a cluster a run."""
    figure, axes = _figure(runs[0].metric, NARROW)
    sizes = sizes_of(runs)
    bars = [*sizes, "server"]
    width = 0.8 / len(bars)
    for number, size in enumerate(bars):
        heights, places = [], []
        for place, run in enumerate(runs):
            value = None if run.last is None else run.last.server if size == "server" else run.last.sizes.get(size)
            if value is not None:
                heights.append(value)
                places.append(place + (number - (len(bars) - 1) / 2) * width)
        colour = INK if size == "server" else SHADES[min(number, len(SHADES) - 1)]
        axes.bar(places, heights, width * 0.92, color=colour, label="server's model" if size == "server" else size)
    _references(axes, runs)
    axes.set_xticks(
        range(len(runs)), [name.replace(" ", "\n", 1) for name in names], fontsize=8.5 if len(runs) < 6 else 7
    )
    axes.grid(visible=False, axis="x")
    _legend(figure, axes, len(bars))
    return figure


def _figure(metric: str, inches: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(f"{metric} ({'smaller' if metric == 'MSE' else 'larger'} is better)")
    return figure, axes


def _references(axes: Axes, runs: list[RunSummary]) -> None:
    """Dashed lines, named beside the plot."""
    for name, value in references_of(runs).items():
        axes.axhline(value, color=FAINT, linestyle=(0, (5, 4)), linewidth=1.2, zorder=0.5)
        axes.annotate(
            name.replace(" ", "\n"), (1.01, value), xycoords=("axes fraction", "data"),
            color="#616e7c", fontsize=8.5, ha="left", va="center", annotation_clip=False,
        )  # fmt: skip


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Below the plot, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=9)
    axes.margins(y=0.12)
