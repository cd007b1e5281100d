"""How a model shows itself: rows, a table for a notebook, and one picture of bytes against quality."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fairfold.errors import InvalidSettings
from fairfold.fitting.suggest import html_table
from fairfold.runs.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from fairfold.simulate.result import Result


def as_rows(result: Result, what: str) -> list[dict[str, Any]]:
    """Plain values of the ``"sizes"`` or of the ``"rounds"``."""
    if what == "rounds":
        names = [group.capacity for group in result.groups]
        return [
            {"round": one.round_number, "seconds": one.seconds, "bytes_down": one.bytes_down, "bytes_up": one.bytes_up}
            | ({} if one.quality is None else {"server": one.quality.server})
            | ({} if one.quality is None else dict(zip(names, one.quality.groups, strict=True)))
            for one in result.history
        ]
    if what != "sizes":
        raise InvalidSettings(f"what = {what!r}", "'sizes' or 'rounds'", "Ask for one of them.")
    rows = [
        {"devices": group.capacity, "users": group.users, "bytes_held": group.bytes_held,
         result.metric: _value(group.quality if group.everybody is None else group.everybody)}
        for group in result.groups
    ]  # fmt: skip
    server = {"devices": "server", "users": result.users, "bytes_held": full_bytes(result)}
    return [*rows, server | {result.metric: result.quality}]


def full_bytes(result: Result) -> int:
    """Of the server's own tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in result.state.full.values())


def _value(quality: float | None) -> float:
    return math.nan if quality is None else quality


def as_html(result: Result, title: str, notes: Sequence[str]) -> str:
    """A table of sizes for a notebook, with what others reach on the same data."""
    rows: list[list[Any]] = []
    for row in as_rows(result, "sizes"):
        value = row[result.metric]
        shown = "–" if math.isnan(value) else value
        rows.append([row["devices"], f"{row['users']:,}", human_bytes(row["bytes_held"]), shown])
    rows += [[name, "", "", value] for name, value in result.references.items() if not math.isnan(value)]
    heads = ["devices", "users", "memory", f"{result.metric}, all users"]
    return html_table(heads, rows, title=title, note=" ".join([*result.told, *notes]))


def figure(result: Result, path: Path | None) -> Figure:
    """Bytes held (logarithmic) against quality, a point for each size; references are dashed lines."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        from fairfold.runs.plots import COLOURS, INK, LOOK, NARROW, direction, reference, rendered
    except ImportError:
        raise InvalidSettings("a plot without matplotlib", "matplotlib", "pip install 'fairfold[report]'") from None
    *sizes, server = as_rows(result, "sizes")
    with rc_context(LOOK):
        drawn = Figure(figsize=NARROW, layout="constrained")
        axes = drawn.add_subplot()
        axes.plot([row["bytes_held"] for row in sizes], [row[result.metric] for row in sizes], "o-", color=COLOURS[0])
        axes.plot([server["bytes_held"]], [server[result.metric]], "s", color=INK)
        for row in [*sizes, server]:
            place = (row["bytes_held"], row[result.metric])
            if math.isfinite(place[1]):
                axes.annotate(row["devices"], place, xytext=(0, 7), textcoords="offset points", ha="center")
        for name, value in result.references.items():
            if math.isfinite(value):
                reference(axes, "y", [value], name.replace(" ", "\n"))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
        axes.set_xlabel("bytes that a device holds")
        axes.set_ylabel(direction(result.metric))
        axes.margins(0.12)
        if path is not None:
            drawn.savefig(path, dpi=160)
    object.__setattr__(drawn, "_repr_png_", lambda: rendered(drawn, "png"))  # what a notebook shows
    return drawn
