"""How errors reach a person at the terminal: one clear line, no traceback, and a status that says what happened.

Status 2 is an error that was told, 130 an interruption (Ctrl-C), 143 the request to end (SIGTERM), and 141 a reader
that has gone away. Anything else is a defect, and keeps its traceback.
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fairfold.cli.start import on_signals
from fairfold.errors import FairfoldError

TOLD, INTERRUPTED, NO_READER, TERMINATED = 2, 130, 141, 143


class Terminated(KeyboardInterrupt):
    """The process was asked to end: everything unwinds as it does for Ctrl-C."""


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn errors raised on purpose, and those of the machine, into a message."""
    try:
        yield
    except KeyboardInterrupt as error:
        _say(Text("interrupted"))
        raise typer.Exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED) from None
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # else it is rich's way to say that the reader is gone
        _no_more_output()
        raise typer.Exit(NO_READER) from None
    except (FairfoldError, OSError, MemoryError, RuntimeError) as error:
        if not tell(error):
            raise
        raise typer.Exit(TOLD) from None


def tell(error: Exception) -> bool:
    """Say what is wrong, in one line; not of a defect, which keeps its traceback."""
    if isinstance(error, FairfoldError):
        words = str(error)
    elif _is_memory(error):
        reason = str(error).split("\n", 1)[0][:200]
        words = (
            f"out of memory{f' ({reason})' if reason else ''}; needed: more than this machine, or its limits, give. "
            "Ask for less (fewer users, items or factors, smaller blocks), or use a machine with more."
        )
    elif isinstance(error, OSError):  # the name of a stream is not known
        words = f"{error.filename or 'standard output'}: {error.strerror or error}"
    else:
        return False
    _say(Text.assemble(("error: ", "red"), words))
    return True


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out: torch says so in the words of a RuntimeError, or, of a GPU, in a class of its own."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "not enough memory", "out of memory")
    told = any(word in str(error).lower() for word in words)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or told


def _say(message: Text) -> None:
    with contextlib.suppress(OSError):  # where the error stream is gone as well, the status is all there is
        Console(stderr=True).print(message, soft_wrap=True)


def _no_more_output() -> None:
    """Send what is still buffered nowhere: the interpreter would try to write it once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            try:
                stream.flush()
            except OSError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _open_closed_streams() -> None:
    """Give standard streams that were closed a place to go: else the next file that is opened would take theirs."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process


class Guarded(TyperGroup):
    """The commands, every one of which ends in a result or in a message."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and make sure that what it printed has arrived."""
        _open_closed_streams()
        owner = os.getpid()

        def end(_number: int, _frame: FrameType | None) -> NoReturn:
            if os.getpid() != owner:  # a fork, which unwinds for nobody
                os._exit(TERMINATED)
            raise Terminated

        try:
            with _told_plainly(), on_signals(end, signal.SIGTERM):
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except typer.Exit:
            _no_more_output()
            raise
