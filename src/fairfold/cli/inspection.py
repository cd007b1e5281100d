"""Commands that look at runs and at the machine: ``report``, ``watch``, ``audit`` and ``doctor``."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairfold.cli.console import Terminal, make_table
from fairfold.errors import install_hint

if TYPE_CHECKING:
    from fairfold.runs.report import RunSummary


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or fleets, or of many such.")],
    out: Annotated[Path, typer.Option(help="Folder for the page (report.html) and the plots.")] = Path("report"),
    page: Annotated[bool, typer.Option(help="Write the page and the plots, or only show the table.")] = True,
) -> None:
    """Compare runs in a table and on a page: quality by device size, time and bytes, beside baselines.

    The page opens offline and can be mailed: plots are inside, and nothing is fetched. Each plot is also a PNG file.

    Examples:
        fairfold report runs/first
        fairfold report runs --out comparison
    """
    from fairfold.runs.report import by_data, read_runs, write_report

    console = Terminal()
    found = read_runs(runs)
    for (data, _), members in by_data(found).items():
        console.print(comparison(data, members))
        for run in members:
            if run.state == "N/A":
                console.echo(f"N/A {run.path}: {run.reason}")
            elif run.popularity is not None:
                console.echo(f"{run.path}: {run.popularity}")
            if run.audit:
                console.echo(f"{run.path}: {' '.join(run.audit['notes'])}")
                console.print(audit_table(run.audit))
    if page:
        written = write_report(found, out)
        console.echo(f"Page: {written[0]} ({len(written) - 1} plots beside it)")


def comparison(data: str, runs: list[RunSummary]) -> Table:
    """A table of runs on the same data, with the baselines below."""
    from fairfold.runs.report import baselines_of, headings, table_rows

    table = make_table(["run"], headings(runs), title=escape(data), title_justify="left")
    for row in table_rows(runs):
        label = escape(f"{row['label']} ({row['mark']})" if row["mark"] else row["label"])
        if row["reason"]:
            table.add_row(label, "–", "N/A")
            continue
        rounds, best, *others = row["cells"]
        table.add_row(label, rounds, f"[bold]{best}[/bold]" if row["is_best"] else best, *others)
    table.add_section()
    for name, value in baselines_of(runs).items():
        table.add_row(f"[italic]{name}[/italic]", "", f"{value:.4f}")
    return table


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of a fleet's server, or of `federate`.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on; other than localhost needs --token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(envvar="FAIRFOLD_WATCH_TOKEN", help="Password of the page.")] = None,
) -> None:
    """Show a run in a browser while it trains: rounds, quality by size, devices, refused updates, bytes.

    Only the run's folder is read, and nothing is written. For a server also its connected devices are shown, and its
    run as soon as there is one. /metrics has the figures for Prometheus, /status.json has all of them.

    Examples:
        fairfold watch runs/first
        fairfold watch fleet
    """
    import asyncio

    from fairfold.errors import InvalidSettings
    from fairfold.flower.fleet.processes import bind_port
    from fairfold.flower.fleet.server import ServerFolder
    from fairfold.runs.folder import require_run
    from fairfold.runs.watch import LOOPBACK, RunMonitor, make_app

    try:
        import uvicorn
    except ImportError:
        raise InvalidSettings(
            "`fairfold watch`, which needs uvicorn", "the extra 'flower'", install_hint("flower")
        ) from None
    folders = [folder for folder in (run, run / "server") if (folder / ServerFolder.FILE).is_file()]  # or of `federate`
    server = ServerFolder.open(folders[0]) if folders else None
    if server is None:
        require_run(run)
    if host not in LOOPBACK and not token:
        raise InvalidSettings(
            f"--host {host} without a token",
            "--token",
            "Add --token with a long random password, and put TLS before the page.",
        )
    console = Terminal()
    monitor = RunMonitor(run) if server is None else RunMonitor(server.run, server.nodes_by_state)
    app = make_app(monitor, token or None)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    with bind_port(host, port, "End it, or name another with --port; 0 takes any free one.") as socket:
        name = f"[{host}]" if ":" in host else host
        console.echo(f"http://{name}:{socket.getsockname()[1]}/ shows {run}; Ctrl-C ends it.")
        asyncio.run(uvicorn.Server(config).serve(sockets=[socket]))


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    users: Annotated[int, typer.Option(min=2, help="How many users are attacked, drawn at random.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds over which users are re-identified.")] = 12,
    data: Annotated[str | None, typer.Option(help="Data, a name or a folder, to replay a fleet's run with.")] = None,
    compare: Annotated[bool, typer.Option(help="Also attack single updates, and sums of 5, 20, 100 clients.")] = True,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Play hostile devices and a lying server instead of a curious one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Attack a run: what could a curious server find out about its users from what it saw?

    The run is replayed from its settings, data and seed, and what its server sees at the run's level of privacy is
    attacked: users' vectors, histories, pairs read from sums, re-identification, membership. The figures are also
    written to audit.json in the run's folder, where `fairfold report` finds them. An attack that fails proves nothing.

    With --fleet as many users are devices of a fleet with the run's settings: how many hostile ones promote an item,
    or halve the quality, and how many devices a lying server invents to read a user (docs/robustness.md).

    Examples:
        fairfold audit runs/first --users 60
        fairfold audit runs/first --users 60 --fleet
    """
    import json

    from fairfold.privacy.audit.auditor import Auditor, load_for_replay
    from fairfold.runs.folder import run_of

    console = Terminal()
    folder = run_of(run)
    if fleet:
        from fairfold.privacy.audit.fleet_report import fleet_findings

        sentences = fleet_findings(*load_for_replay(folder, data), users, seed)
        typer.echo(json.dumps(sentences, indent=2) if as_json else "\n".join(sentences))
        return
    if as_json:
        settings, loaded = load_for_replay(folder, data)
        found = Auditor(settings, loaded, users, rounds, seed).audit(compare=compare)
        found.write(folder)
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    run_audit(console, folder, users, rounds, seed, data, compare=compare)


def run_audit(
    console: Terminal,
    folder: Path,
    users: int = 60,
    rounds: int = 12,
    seed: int = 0,
    data: str | None = None,
    *,
    compare: bool = False,
) -> None:
    """Attack the run in a folder, and print the figures."""
    from fairfold.privacy.audit.auditor import Auditor, load_for_replay

    settings, loaded = load_for_replay(folder, data, console.echo)
    with console.status("replaying") as status:
        last = ""

        def show_progress(what: str, share: float) -> None:
            nonlocal last
            if console.is_terminal:
                status.update(f"attacking {what}: {share:.0%}")
            elif what != last:
                console.echo(f"Attacking {what}")
            last = what

        found = Auditor(settings, loaded, users, rounds, seed, show_progress).audit(compare=compare)
    path = found.write(folder)
    for line in found.notes:
        console.echo(line)
    console.print(audit_table(found.plain()))
    console.echo(f"Written to {path}. An attack that fails is no proof that none succeeds: see docs/privacy.md.")


def audit_table(content: dict[str, Any]) -> Table:
    """A table of an audit: what the run's own server saw first, then what other servers would see."""
    title = "What a curious server can find out (95 % intervals over users)"
    beside = any(heading.endswith("*") for heading in content["headings"])
    caption = "* for comparison: not what this run's server sees" if beside else None
    table = Table(title=title, title_justify="left", caption=caption)
    for place, heading in enumerate(content["headings"]):
        table.add_column(heading, justify="left" if place < 2 else "right", style="dim" if "*" in heading else "")
    for cells in content["rows"]:
        table.add_row(*map(escape, cells))
    return table


EXTRAS = [
    # module, what it gives, how to get it
    ("matplotlib", "plots in reports", install_hint("report")),
    ("triton", "GPU kernels (CUDA)", "comes with torch's CUDA build"),
    ("flwr", "federations over a network (fairfold federate)", install_hint("flower")),
    ("tensorboard", "curves of a run (train --track tensorboard)", install_hint("tensorboard")),
    ("mlflow", "the same in MLflow (--track mlflow)", install_hint("mlflow")),
    ("wandb", "the same in Weights & Biases (--track wandb)", install_hint("wandb")),
]
MISSING = "[yellow]missing[/yellow]"


def doctor() -> None:
    """Show what is installed, what is missing, and what it is good for.

    Examples:
        fairfold doctor
    """
    import torch

    from fairfold import __version__
    from fairfold.kernels.gpu import triton_problem
    from fairfold.kernels.native import status

    table = Table("part", "state", "what it means", title="fairfold doctor")
    table.add_row("fairfold", __version__, f"Python {platform.python_version()} on {platform.machine()}")
    table.add_row("torch", torch.__version__, f"{torch.get_num_threads()} threads")
    native = status()
    if native.available:
        serves = f"compiled kernels serve on the CPU, {'threaded' if native.threaded else 'one thread'}"
        table.add_row("native kernels", f"present ({native.instructions})", serves)
    else:
        why = f"plain torch serves, several times slower: {native.reason}. With a C compiler, install fairfold again"
        table.add_row("native kernels", MISSING, escape(why))
    if torch.cuda.is_available():
        table.add_row("GPU", torch.cuda.get_device_name(), "serves tensors on it; kernels need triton")
    else:
        table.add_row("GPU", "[yellow]none[/yellow]", "training runs on the CPU; a CUDA build of torch would use one")
    packages = importlib.metadata.packages_distributions()  # a module may come from a package of another name
    for module, gives, remedy in EXTRAS:
        if module in packages:
            problem = triton_problem() if module == "triton" else None  # which may be too old for the kernels
            state = importlib.metadata.version(packages[module][0])
            table.add_row(module, state, gives if problem is None else escape(f"{gives}: {problem}"))
        else:
            table.add_row(module, MISSING, escape(f"{gives}: {remedy}"))
    Console().print(table)
