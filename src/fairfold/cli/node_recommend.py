"""``fairfold node recommend``: what a device suggests to its own users, without a network."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fairfold.cli.console import Terminal


def node_recommend(
    folder: Annotated[Path, typer.Argument(help="Folder of the device.")],
    user: Annotated[str | None, typer.Option(help="Which of its users, where it has several.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many items to recommend.")] = 10,
    data: Annotated[Path | None, typer.Option(help="The device's own file; default as it was enrolled.")] = None,
) -> None:
    """Recommend items on this device, by the newest model that it was given and by its own file; nothing is sent.

    Examples:
        fairfold node recommend device3 --user 100 --top 3
    """
    import tomllib

    from fairfold.errors import InvalidSettings, InvalidState
    from fairfold.flower.local import LocalFile
    from fairfold.flower.offline import MODEL_FILE, read_model, recommend

    state = folder if (folder / MODEL_FILE).is_file() else folder / "state"
    enrolled, catalogue = folder / "node.toml", folder / "catalogue.txt"
    if data is None and enrolled.is_file():
        try:
            data = Path(tomllib.loads(enrolled.read_text(encoding="utf-8"))["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidState(f"{enrolled}: {error}", "where the device's data is", "Name it with --data.") from None
    if data is None:
        raise InvalidSettings(f"{folder}, which does not say where its data is", "--data", "Name the device's file.")
    names = catalogue.read_text(encoding="utf-8").splitlines() if catalogue.is_file() else None
    source = LocalFile(data, catalogue=catalogue if names is not None else None)
    histories = source.histories(read_model(state).items)
    if user is None and len(histories) > 1:
        some = ", ".join(sorted(histories)[:3])
        raise InvalidSettings(
            f"a device with {len(histories)} users",
            f"--user, such as {some}",
            "Add --user with the name of one of them.",
        )
    chosen = next(iter(histories), "") if user is None else user
    if chosen not in histories:
        raise InvalidSettings(f"user {chosen!r}", f"a user of {data}", "Check the name.")
    model, found = recommend(state, histories[chosen], top)
    table = Table()
    for heading, justify in (("rank", "right"), ("item", "left"), ("score", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for rank, (item, score) in enumerate(found, 1):
        table.add_row(str(rank), str(item) if names is None else names[item], "–" if score is None else f"{score:.4f}")
    console = Terminal()
    console.say(f"By the model of a {model.told['capacity']} device after round {model.round_number}, on this device.")
    console.print(table)
    console.say(f"Left out: the {len(set(histories[chosen]))} items this user has.")
