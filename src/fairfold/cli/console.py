"""The terminal of the commands: output, errors as one line with an exit status, and help with examples.

Exit status 2 is a reported error, 130 an interruption (Ctrl-C), 143 a request to end (SIGTERM), and 141 a closed pipe.
Any other exception is a defect, and keeps its traceback.
"""

import contextlib
import errno
import inspect
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click
import typer
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fairfold.cli import on_signals
from fairfold.errors import FairfoldError, printable


class Terminal(Console):
    """A rich console that does not wrap lines in a file or a pipe, and obeys nothing in names of items and users."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr)
        if not self.is_terminal:
            self.width = 140

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(printable(part.text), part.style) for part in buffer
        )

    def echo(self, text: str) -> None:
        """Print a line without markup and without wrapping it."""
        self.print(text, soft_wrap=True, highlight=False, markup=False)


FAILED = 2
INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143
EXAMPLES = "\n\nExamples:\n"


def make_table(left: Sequence[str], right: Sequence[str], **options: Any) -> Table:
    """A table with columns that are aligned to the left, then columns that are aligned to the right."""
    table = Table(*left, **options)
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that everything unwinds as it does for Ctrl-C."""


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Turn expected errors, and those of the machine, into a message and an exit status."""
    try:
        yield
    except KeyboardInterrupt as error:
        _print_line(Text("interrupted"))
        raise typer.Exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED) from None
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # else rich reports a closed pipe
        _discard_output()
        raise typer.Exit(CLOSED_PIPE) from None
    except (FairfoldError, OSError, MemoryError, RuntimeError) as error:
        if not print_error(error):
            raise
        raise typer.Exit(FAILED) from None


def print_error(error: Exception) -> bool:
    """Print an expected error in one line; False for a defect, which keeps its traceback."""
    if isinstance(error, FairfoldError):
        message = str(error)
    elif _is_out_of_memory(error):
        reason = str(error).split("\n", 1)[0][:200]
        message = (
            f"out of memory{f' ({reason})' if reason else ''}; needed: more than this machine, or its limits, give. "
            "Ask for less (fewer users, items or factors, smaller blocks), or use a machine with more."
        )
    elif isinstance(error, OSError):  # the name of a stream is not known
        message = f"{error.filename or 'standard output'}: {error.strerror or error}"
    else:
        return False
    _print_line(Text.assemble(("error: ", "red"), message))
    return True


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch raises a RuntimeError, or a class of its own for a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return any(words in text for words in ("can't allocate memory", "not enough memory", "out of memory"))


def _print_line(message: Text) -> None:
    with contextlib.suppress(OSError):  # the error stream may be closed as well
        Terminal(stderr=True).print(message, soft_wrap=True)


def _discard_output() -> None:
    """Drop what is still buffered: the interpreter would try to write it once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            try:
                stream.flush()
            except OSError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _open_closed_streams() -> None:
    """Open closed standard streams to nowhere: else the next opened file would take their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process


class ErrorReporting(click.Command):
    """Mixin of commands that end in a result, or in an error message of one line."""

    def invoke(self, ctx: click.Context) -> Any:
        _open_closed_streams()
        owner = os.getpid()

        def end(_number: int, _frame: FrameType | None) -> NoReturn:
            if os.getpid() != owner:  # a fork has nothing to unwind
                os._exit(TERMINATED)
            raise Terminated

        try:
            with _errors_as_messages(), on_signals(end, signal.SIGTERM):
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except typer.Exit:
            _discard_output()
            raise


class ErrorReportingGroup(ErrorReporting, TyperGroup):
    """A group of commands with that handling of errors."""


class CommandWithExamples(TyperCommand):
    """A command whose docstring ends with ``Examples:``, one per line, shown below the options."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:  # noqa: A002 - click's name
        text, _, examples = inspect.cleandoc(help or "").partition(EXAMPLES)
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        self.examples = [line.strip() for line in examples.splitlines() if line.strip()]
        shown = ["Examples:", *self.examples] if self.examples else []
        super().__init__(*args, **settings | {"help": "\n\n".join(paragraphs), "epilog": "\n\n".join(shown)})
