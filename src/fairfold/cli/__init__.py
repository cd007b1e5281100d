"""The ``fairfold`` command."""

import typer

from fairfold.cli.plan import plan

app = typer.Typer(
    name="fairfold",
    help="Federated learning of embedding tables on devices of every size.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Federated learning of embedding tables on devices of every size."""


app.command()(plan)
