"""The ``fairfold`` command; heavy imports wait until a subcommand is called."""

from fairfold.cli.start import end_now, interruptible

with interruptible():  # what follows takes part of a second, in which Ctrl-C may come
    from typing import Annotated, Any

    import typer

    from fairfold.cli.console import FAILED, CommandWithExamples, ErrorReportingGroup, print_error
    from fairfold.cli.data import data
    from fairfold.cli.demo import demo
    from fairfold.cli.federate import federate
    from fairfold.cli.inference import export, recommend
    from fairfold.cli.inspection import audit, doctor, report, watch
    from fairfold.cli.node import node, node_recommend
    from fairfold.cli.plan import plan, recipes
    from fairfold.cli.server import server
    from fairfold.cli.train import train


class _Application(typer.Typer):
    """The commands, with interruptions and errors before any of them has begun handled as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            end_now(130)
        except OSError as error:  # help that cannot be printed
            print_error(error)
            end_now(FAILED, b"")


app = _Application(
    cls=ErrorReportingGroup,
    name="fairfold",
    help="Train recommenders on devices of every size, simulated or real. See also `fairfold COMMAND --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from fairfold import __version__

        typer.echo(f"fairfold {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, train, recipes, recommend, report, export, plan, audit, watch, federate, doctor):
    app.command()(command)
node.command("recommend")(node_recommend)
for name, group in (("data", data), ("server", server), ("node", node)):
    app.add_typer(group, name=name)
for commands in (app, data, server, node):
    for known in commands.registered_commands:
        known.cls = CommandWithExamples
