"""Where commands print."""

from rich.console import Console


def wide_console() -> Console:
    """The terminal as it is; a file or a pipe gets whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
