"""Where commands print."""

from rich.console import Console


class Terminal(Console):
    """The terminal as it is; a file or a pipe gets whole lines."""

    def __init__(self) -> None:
        super().__init__()
        if not self.is_terminal:
            self.width = 140

    def say(self, text: str) -> None:
        """Print a line as it is, however long."""
        self.print(text, soft_wrap=True, highlight=False, markup=False)
