"""The ``fairfold`` command. Each subcommand has a module of its own; heavy imports wait until one is called."""

from fairfold.cli.start import end_now, interruptible

with interruptible():  # what follows takes part of a second, in which Ctrl-C may come
    from typing import Annotated, Any

    import typer

    from fairfold.cli.audit import audit
    from fairfold.cli.data import data
    from fairfold.cli.demo import demo
    from fairfold.cli.doctor import doctor
    from fairfold.cli.errors import TOLD, Guarded, tell
    from fairfold.cli.export import export
    from fairfold.cli.federate import federate
    from fairfold.cli.help import Explained
    from fairfold.cli.node import node
    from fairfold.cli.node_recommend import node_recommend
    from fairfold.cli.plan import plan
    from fairfold.cli.recommend import recommend
    from fairfold.cli.report import report
    from fairfold.cli.reproduce import reproduce
    from fairfold.cli.server import server
    from fairfold.cli.train import train
    from fairfold.cli.watch import watch


class _Application(typer.Typer):
    """The commands; an interruption before any of them has begun ends like one within."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            end_now(130)
        except OSError as error:  # help that cannot be printed
            tell(error)
            end_now(TOLD, b"")


app = _Application(
    cls=Guarded,
    name="fairfold",
    help="Train recommenders on devices of every size, simulated or real. `fairfold COMMAND --help` says more.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from fairfold.version import __version__

        typer.echo(f"fairfold {__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, train, recommend, report, export, plan, audit, watch, federate, reproduce, doctor):
    app.command()(command)
node.command("recommend")(node_recommend)
for name, group in (("data", data), ("server", server), ("node", node)):
    app.add_typer(group, name=name)
for commands in (app, data, server, node):
    for known in commands.registered_commands:
        known.cls = Explained
