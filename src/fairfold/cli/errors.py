"""How errors reach a person at the terminal: one clear message, no traceback, exit status 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from fairfold.errors import FairfoldError


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn errors raised on purpose into a message; anything else is a defect and keeps its traceback."""
    try:
        yield
    except FairfoldError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
