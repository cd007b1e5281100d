"""The help of a command is its docstring: paragraphs as text, and last what can be typed."""

import inspect
from typing import Any

from typer.core import TyperCommand

EXAMPLES = "\n\nExamples:\n"


class Explained(TyperCommand):
    """A command whose docstring ends with ``Examples:``, a line each; they are shown below its options."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:  # noqa: A002 - click's name
        text, _, examples = inspect.cleandoc(help or "").partition(EXAMPLES)
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        self.examples = [line.strip() for line in examples.splitlines() if line.strip()]
        shown = ["Examples:", *self.examples] if self.examples else []
        super().__init__(*args, **settings | {"help": "\n\n".join(paragraphs), "epilog": "\n\n".join(shown)})
