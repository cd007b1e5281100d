"""The ``fairfold`` command; heavy imports wait until a subcommand is called."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_now(status: int, message: bytes = b"interrupted\n") -> NoReturn:
    """Write a message by system calls alone, and end the process."""
    with suppress(OSError):
        os.write(2, message)
    os._exit(status)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals that have their default handlers, within the context."""
    defaults: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if main and signal.getsignal(number) == defaults[number]]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, defaults[number])


def interruptible() -> AbstractContextManager[None]:
    """A context in which Ctrl-C and SIGTERM end the process at once: there is nothing to unwind."""
    return on_signals(lambda number, _frame: end_now(128 + number), signal.SIGINT, signal.SIGTERM)


with interruptible():  # what follows takes part of a second, in which Ctrl-C may come
    from typing import Annotated

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
        # OpenMP reads it when torch is imported. Threads that spin while they wait for each other take their time from
        # the one that they wait for, where another program runs: a run of seconds then takes minutes.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
