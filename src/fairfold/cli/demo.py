"""``fairfold demo``: four federations of different device sizes in one table and one plot, or a fleet to be joined."""

from __future__ import annotations

import math
import select
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairfold.cli.console import Terminal, make_table
from fairfold.errors import install_hint

if TYPE_CHECKING:
    from rich.table import Table

    from fairfold.estimator import Model

FEDERATIONS: dict[str, tuple[str, str]] = {
    "everybody full": ("fedavg", "1x"),
    "FAIR's mix": ("fair", "1x-4x-16x"),
    "everybody small": ("fair", "16x"),
    "only large devices": ("full_trn", "1x-4x-16x"),
}
"""The compared federations: method and capacities."""

MIX = "FAIR's mix"
USER = 17
Rows = list[tuple[str, str, int, float]]
"""Federation, size, bytes held and quality over all users; NaN where a size was left out."""


def demo(
    users: Annotated[int, typer.Option(min=20, help="Number of synthetic readers.")] = 600,
    items: Annotated[int, typer.Option(min=80, help="Books of the synthetic data.")] = 4_000,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of every federation: 30, with --fleet 16.", show_default=False)
    ] = None,
    picture: Annotated[Path, typer.Option(help="File for the picture (.svg or .png).")] = Path("why.svg"),
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Start a fleet on this machine instead, whose devices are browser tabs.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --fleet: the page's port; 0 for a free one.")] = 0,
) -> None:
    """Show why devices of every size should train together: four federations, one table, one picture.

    The readers and books are made up. A device of 1x holds the whole table of books, one of 16x holds a sixteenth.
    With --fleet a server and two small devices start on this machine, and a link that makes three tabs of a browser
    devices of 1x, 4x and 16x.

    Examples:
        fairfold demo --picture why.svg
        fairfold demo --fleet
    """
    if fleet:
        demo_fleet(users, items, rounds or 16, port)
        return
    from fairfold.estimator import fit
    from fairfold.estimator.display import result_rows

    console, rounds = Terminal(), rounds or 30
    settings: dict[str, Any] = {
        "data.users": users, "data.items": items, "data.interactions_per_user": min(100, items // 4),
        "run.rounds": rounds, "run.evaluate_every": rounds, "fleet.clients_per_round": None,
        "algorithm.kind": "closed_form", "model.factors": 16,
    }  # fmt: skip
    console.echo(f"{users:,} readers, {items:,} books. Readings stay on devices; only sums leave them.")
    models: dict[str, Model] = {}
    for name, (method, capacities) in FEDERATIONS.items():
        console.echo(f"Training: {name} ({method}, {capacities}) ...")
        own = {"subspace.support": 0} if method == "fair" else {}  # so that 1x is the whole table
        models[name] = fit("synthetic", capacities, method=method, settings=settings | own, progress=False)
    rows = [
        (name, row["devices"], row["bytes_held"], row[model.result.metric])
        for name, model in models.items()
        for row in result_rows(model.result, "sizes")[:-1]
    ]
    mix = models[MIX]
    popularity = mix.result.baselines["popularity"]
    console.print(_results_table(rows, mix.result.metric, popularity))
    console.echo(_summary_sentence(rows, popularity))
    titles = [mix.data.titles[item] for item in mix.data.train.of(USER).tolist()[:3]] if mix.data.titles else []
    console.echo(f"Reader {USER} has read {', '.join(titles)} and others. A 16x device recommends:")
    for title in mix.recommend(USER, k=3, capacity="16x").titles:
        console.echo(f"  {title}")
    _write_picture(rows, mix.result.metric, popularity, picture, console)


def demo_fleet(users: int, items: int, rounds: int, port: int) -> None:
    """Run a fleet on this machine until interrupted; training begins with three tabs, or at a press of Enter."""
    from fairfold.cli.options import resolve_settings
    from fairfold.cli.qr import terminal_code
    from fairfold.cli.server import require_flower

    require_flower()
    from fairfold.flower.fleet.demo_fleet import DemoFleet

    console = Terminal()
    data = {"data.name": "synthetic", "data.users": users, "data.items": items}
    data |= {"data.interactions_per_user": min(100, items // 4), "run.rounds": rounds, "run.evaluate_every": 4}
    settings = resolve_settings(None, None, data).settings

    def on_link(link: str) -> None:
        typer.echo(terminal_code(link))
        typer.echo(f"\nOpen this link in three tabs of a browser on this machine, and join in each:\n\n  {link}\n")
        console.echo("Training begins when three tabs have joined, or when you press Enter. Ctrl-C ends everything.")

    def begins(tabs: int) -> bool:
        pressed = sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], 0)[0]) and bool(sys.stdin.readline())
        return pressed or tabs >= len(local.tabs)

    with tempfile.TemporaryDirectory(prefix="fairfold-demo-") as folder:
        local, loaded = DemoFleet.of(settings, Path(folder))
        local.prepare(loaded)
        console.echo(f"{users:,} made-up readers, {items:,} books. A server and two small devices start.")
        try:
            local.show(port, console.echo, on_link, begins)
        except KeyboardInterrupt:
            console.echo("The server and its devices have ended; what they stored is deleted.")


def _results_table(rows: Rows, metric: str, popularity: float) -> Table:
    from fairfold.runs.units import human_bytes

    title = "Why devices of every size should train together"
    table = make_table(["who trains", "device"], ["memory", metric], title=title)
    last = ""
    for name, size, held, value in rows:
        if last and name != last:
            table.add_section()
        shown = "left out" if math.isnan(value) else f"{value:.3f}"
        table.add_row(name if name != last else "", size, human_bytes(held) if held else "–", shown)
        last = name
    table.add_section()
    table.add_row("popularity", "any", "–", f"{popularity:.3f}")
    return table


def _summary_sentence(rows: Rows, popularity: float) -> str:
    quality = {(name, size): value for name, size, _, value in rows}
    alone = quality["only large devices", "1x"]
    return (
        f"With the help of all a large device reaches {quality[MIX, '1x']:.3f}, with large ones alone {alone:.3f}. A "
        f"small device reaches {quality[MIX, '16x']:.3f} in a sixteenth of the memory; left out, it would have "
        f"popularity, {popularity:.3f}."
    )


def _write_picture(rows: Rows, metric: str, popularity: float, path: Path, console: Terminal) -> None:
    try:
        from matplotlib import rc_context

        from fairfold.runs.plots import COLORS, STYLE, quality_by_memory
    except ImportError:
        console.echo(f"The picture needs matplotlib: {install_hint('report')}.")
        return
    lines = []
    for name, color, marker in zip(FEDERATIONS, COLORS, "so^D", strict=False):
        points = [(size, held, value) for federation, size, held, value in rows if federation == name]
        known = [point for point in points if not math.isnan(point[2])]
        lines.append((name, known, {"color": color, "marker": marker}))
    with rc_context(STYLE | {"svg.fonttype": "none"}):
        drawn = quality_by_memory(lines, metric, {"popularity": popularity})
        drawn.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    console.echo(f"The picture is in {path}")
