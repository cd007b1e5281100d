"""Every command says what it does, in text that fits any width, and ends with what can be typed."""

from typing import Any

import click
import pytest
import typer

from fairfold.cli import app
from fairfold.cli.console import CommandWithExamples
from tests.support.commands import works
from tests.test_pages import refuse_unknown


def leaves(command: Any, *names: str) -> list[tuple[str, Any]]:
    if isinstance(command, click.Group):
        return [leaf for name, one in command.commands.items() for leaf in leaves(one, *names, name)]
    return [(" ".join(names), command)]


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_its_help_with_what_can_be_typed(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, CommandWithExamples)
    assert command.examples
    for line in command.examples:
        assert line.startswith(f"fairfold {name}")
        refuse_unknown(line)
    assert all(getattr(option, "help", None) for option in command.params if "--help" not in option.opts)


def test_the_help_that_is_shown_has_its_examples() -> None:
    shown = works("export", "--help")
    assert "fairfold export runs/first --capacity 16x" in " ".join(shown.split())
    assert "Examples:" in shown
