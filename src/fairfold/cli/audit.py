"""``fairfold audit``: what the server of a run could find out about its users."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fairfold.cli.console import Terminal


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    users: Annotated[int, typer.Option(min=2, help="How many users are attacked, drawn at random.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds over which users are to be named.")] = 12,
    data: Annotated[
        str | None,
        typer.Option(help="Data to replay a fleet's run with, a name or a folder: its own data lies on devices."),
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Also attack single answers, and exact sums of 5, 20 and 100 devices.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Attack a run: what could a curious server find out about its users from what it saw?

    The run is replayed from its settings, data and seed, and what its server sees at the run's level of privacy is
    attacked: users' vectors, histories, pairs read from sums, users named over rounds, membership. The figures are also
    written to audit.json in the run's folder, where `fairfold report` finds them. An attack that fails proves nothing.

    Examples:
        fairfold audit runs/first --users 60
    """
    import json

    from fairfold.audit.attacks import Auditor
    from fairfold.audit.opening import replayable, run_folder

    console, folder = Terminal(), run_folder(run)
    if as_json:
        settings, loaded = replayable(folder, data)
        found = Auditor(settings, loaded, users, rounds, seed).audit(compare=compare)
        found.write(folder)
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    attack(console, folder, users, rounds, seed, data, compare=compare)


def attack(
    console: Terminal, folder: Path, users: int = 60, rounds: int = 12, seed: int = 0, data: str | None = None, *,
    compare: bool = False,
) -> None:  # fmt: skip
    """Attack the run in a folder, and show what came of it."""
    from fairfold.audit.attacks import Auditor
    from fairfold.audit.opening import replayable

    settings, loaded = replayable(folder, data, console.say)
    with console.status("replaying") as status:
        told = ""

        def watch(what: str, share: float) -> None:
            nonlocal told
            if console.is_terminal:
                status.update(f"attacking {what}: {share:.0%}")
            elif what != told:
                console.say(f"Attacking {what}")
            told = what

        found = Auditor(settings, loaded, users, rounds, seed, watch).audit(compare=compare)
    path = found.write(folder)
    for line in found.words:
        console.say(line)
    console.print(audit_table(found.plain()))
    console.say(f"Written to {path}. An attack that fails is no proof that none succeeds; docs/privacy.md says more.")


def audit_table(content: dict[str, Any]) -> Table:
    """The figures of an audit as they were written: what the run's own server saw first, then what others would."""
    title = "What a curious server can find out (95 % intervals over users)"
    beside = any(heading.endswith("*") for heading in content["headings"])
    caption = "* for comparison: not what this run's server sees" if beside else None
    table = Table(title=title, title_justify="left", caption=caption)
    for place, heading in enumerate(content["headings"]):
        table.add_column(heading, justify="left" if place < 2 else "right", style="dim" if "*" in heading else "")
    for cells in content["rows"]:
        table.add_row(*map(escape, cells))
    return table
