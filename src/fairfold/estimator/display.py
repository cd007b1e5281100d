"""Rows, an HTML table and a plot of the quality by size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidSettings, install_hint
from fairfold.estimator.recommendations import html_table
from fairfold.runs.units import human_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from fairfold.federation.evaluation import Result


def result_rows(result: Result, what: str) -> list[dict[str, Any]]:
    """A dict per size (``"sizes"``) or per round (``"rounds"``) of a run."""
    if what == "rounds":
        names = [group.capacity for group in result.groups]
        rounds: list[dict[str, Any]] = []
        for one in result.history:
            row: dict[str, Any] = {"round": one.round_number, "seconds": one.seconds, "bytes_down": one.bytes_down}
            row["bytes_up"] = one.bytes_up
            if one.quality is not None:
                row |= {"server": one.quality.server} | dict(zip(names, one.quality.groups, strict=True))
            rounds.append(row)
        return rounds
    if what != "sizes":
        raise InvalidSettings(f"what = {what!r}", "'sizes' or 'rounds'", "Ask for one of them.")
    sizes = [(group.capacity, group.users, group.bytes_held, group.comparable_quality) for group in result.groups]
    keys = ("devices", "users", "bytes_held", result.metric)
    rows = [*sizes, ("server", result.users, full_bytes(result), result.quality)]
    return [dict(zip(keys, (*row, math.nan if value is None else value), strict=True)) for *row, value in rows]


def full_bytes(result: Result) -> int:
    """Bytes of the server's full tensors, uncompressed."""
    return sum(tensor.numel() * tensor.element_size() for tensor in result.state.full.values())


def result_html(result: Result, title: str) -> str:
    """An HTML table of the sizes for a notebook, with the baselines."""
    rows: list[list[Any]] = []
    for row in result_rows(result, "sizes"):
        value = row[result.metric]
        shown = "–" if math.isnan(value) else value
        rows.append([row["devices"], f"{row['users']:,}", human_bytes(row["bytes_held"]), shown])
    rows += [[name, "", "", value] for name, value in result.baselines.items() if not math.isnan(value)]
    heads = ["devices", "users", "memory", f"{result.metric}, all users"]
    return html_table(heads, rows, title=title, note=" ".join([*result.warnings, *result.notes]))


def figure(result: Result, path: Path | None) -> Figure:
    """A plot of bytes held (logarithmic) against quality, a point per size; baselines are dashed lines."""
    try:
        from matplotlib import rc_context

        from fairfold.runs.plots import COLORS, INK, STYLE, quality_by_memory, render_figure
    except ImportError:
        raise InvalidSettings("a plot without matplotlib", "matplotlib", install_hint("report")) from None
    rows = [(row["devices"], row["bytes_held"], row[result.metric]) for row in result_rows(result, "sizes")]
    *sizes, server = [row for row in rows if math.isfinite(row[2])] or rows
    lines = [
        ("devices", sizes, {"color": COLORS[0], "marker": "o"}),
        ("server", [server], {"color": INK, "marker": "s"}),
    ]
    baselines = {name: value for name, value in result.baselines.items() if math.isfinite(value)}
    with rc_context(STYLE):
        drawn = quality_by_memory(lines, result.metric, baselines)
        if path is not None:
            drawn.savefig(path, dpi=160)
    object.__setattr__(drawn, "_repr_png_", lambda: render_figure(drawn, "png"))  # what a notebook shows
    return drawn
