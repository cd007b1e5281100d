"""``fairfold demo``: why devices of several sizes should train together, as one table and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fairfold.cli.console import Terminal

if TYPE_CHECKING:
    from fairfold.fitting import Model

FEDERATIONS: dict[str, tuple[str, str]] = {
    "everybody full": ("fedavg", "1x"),
    "FAIR's mix": ("fair", "1x-4x-16x"),
    "everybody small": ("fair", "16x"),
    "only large devices": ("full_trn", "1x-4x-16x"),
}
"""What is compared: the method, and the devices that there are."""

USER = 17


def demo(
    users: Annotated[int, typer.Option(min=20, help="Readers of the synthetic world.")] = 600,
    items: Annotated[int, typer.Option(min=80, help="Books of the synthetic world.")] = 4_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every federation.")] = 30,
    picture: Annotated[Path, typer.Option(help="File for the picture (.svg or .png).")] = Path("why.svg"),
) -> None:
    """Show why devices of every size should train together: four federations, one table, one picture.

    The readers and books are made up. A device of 1x holds the whole table of books, one of 16x holds a sixteenth.

    Examples:
        fairfold demo --picture why.svg
    """
    from fairfold.fitting import fit

    console = Terminal()
    world = {"data.users": users, "data.items": items, "data.interactions_per_user": min(100, items // 4)}
    settings: dict[str, Any] = world | {
        "run.rounds": rounds,
        "run.evaluate_every": rounds,
        "fleet.clients_per_round": None,
    }
    settings |= {"algorithm.kind": "closed_form", "model.factors": 16}
    console.say(f"{users:,} readers, {items:,} books. Readings stay on devices; what leaves them are sums.")
    models = dict[str, Any]()
    for name, (method, capacities) in FEDERATIONS.items():
        console.say(f"Training: {name} ({method}, {capacities}) ...")
        own = {"subspace.support": 0} if method == "fair" else {}  # so that 1x is the whole table
        models[name] = fit("synthetic", capacities, method=method, settings=settings | own, progress=False)
    console.print(table_of(models))
    console.say(_sentence(models))
    mix: Model = models["FAIR's mix"]
    had = [mix.data.titles[item] for item in mix.data.train.of(USER).tolist()[:3]] if mix.data.titles else []
    console.say(f"Reader {USER} has read {', '.join(had)} and others. A 16x device recommends:")
    for title in mix.recommend(USER, k=3, capacity="16x").titles:
        console.say(f"  {title}")
    _draw(models, picture, console)


def rows_of(models: dict[str, Any]) -> list[tuple[str, str, int, float | None]]:
    """Of every federation and size: its name, the size, bytes held, and quality over all users."""
    found = []
    for name, model in models.items():
        for group in model.result.groups:
            value = group.quality if group.everybody is None else group.everybody
            found.append((name, group.capacity, group.bytes_held, value))
    return found


def table_of(models: dict[str, Any]) -> Table:
    """One line for every federation and size, and popularity."""
    from fairfold.runs.units import human_bytes

    result = models["FAIR's mix"].result
    table = Table("who trains", "device", title="Why devices of every size should train together")
    for heading in ("memory", result.metric):
        table.add_column(heading, justify="right")
    last = ""
    for name, size, held, value in rows_of(models):
        if last and name != last:
            table.add_section()
        shown = "left out" if value is None else f"{value:.3f}"
        table.add_row(name if name != last else "", size, human_bytes(held) if held else "–", shown)
        last = name
    table.add_section()
    table.add_row("popularity", "any", "–", f"{result.references['popularity']:.3f}")
    return table


def _sentence(models: dict[str, Any]) -> str:
    """What the table shows, in words."""
    quality = {(name, size): value for name, size, _, value in rows_of(models)}
    popular = models["FAIR's mix"].result.references["popularity"]
    mixed, large = quality["FAIR's mix", "1x"], quality["only large devices", "1x"]
    small = quality["FAIR's mix", "16x"]
    assert mixed is not None
    assert large is not None
    assert small is not None
    return (
        f"With everybody's help a large device reaches {mixed:.3f}, alone with its like {large:.3f}. A small device "
        f"reaches {small:.3f} in a sixteenth of the memory; left out, it would have popularity, {popular:.3f}."
    )


def _draw(models: dict[str, Any], path: Path, console: Terminal) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        from fairfold.runs.plots import COLOURS, LOOK, direction, legend, reference
    except ImportError:
        console.say("The picture needs matplotlib: pip install 'fairfold[report]'.")
        return
    from fairfold.runs.units import human_bytes

    result = models["FAIR's mix"].result
    rows = [(name, size, held, value) for name, size, held, value in rows_of(models) if value is not None]
    with rc_context(LOOK | {"svg.fonttype": "none"}):
        drawn = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = drawn.add_subplot()
        for name, colour, marker in zip(models, COLOURS, "so^D", strict=False):
            mine = [row for row in rows if row[0] == name]
            look: Any = {"marker": marker, "color": colour, "label": name, "linestyle": "-" if len(mine) > 1 else ""}
            axes.plot([row[2] for row in mine], [row[3] for row in mine], **look)
        reference(axes, "y", [result.references["popularity"]], "popularity")
        axes.set_xscale("log")
        sizes = {held: f"{size}: {human_bytes(held)}" for _, size, held, _ in rows}
        axes.set_xticks(list(sizes), list(sizes.values()))
        axes.set_xticks([], minor=True)
        axes.set_xlabel("memory of a device")
        axes.set_ylabel(direction(result.metric))
        legend(drawn, [axes])
        axes.margins(0.15)
        drawn.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    console.say(f"The picture is in {path}")
