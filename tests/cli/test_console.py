"""What a terminal would obey does not reach it from names of items."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from fairfold.cli.console import Terminal, print_error
from fairfold.errors import InvalidData, printable

HOSTILE = "a\x1b[2Jb\u202ec\x9bd\x07"


def test_names_with_control_characters_are_escaped_and_others_are_not() -> None:
    assert printable(HOSTILE) == r"a\x1b[2Jb\u202ec\x9bd\x07"
    for plain in ("Amélie – 天使 (1999)\n", "naïve\u00a0café", ""):
        assert printable(plain) == plain


def test_tables_and_lines_of_the_terminal_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console = Terminal()
    table = Table("item")
    table.add_row(HOSTILE)
    console.print(table)
    console.echo(HOSTILE)
    console.print(Text(HOSTILE, "bold"))
    print_error(InvalidData(f"item {HOSTILE}", "another", "Check it."))
    out, err = capsys.readouterr()
    for stream in (out, err):
        assert r"\x1b" in stream
        assert not set("\x1b\u202e\x9b\x07") & set(stream)


def test_styles_of_the_terminal_s_own_stay() -> None:
    console = Terminal()
    console.file, console._force_terminal, console._color_system = io.StringIO(), True, None
    colored = Terminal()
    colored.file = io.StringIO()
    colored._force_terminal, colored.no_color = True, False
    from rich.color import ColorSystem

    colored._color_system = ColorSystem.STANDARD
    colored.print(Text("x", "red"))
    assert "\x1b[31mx" in colored.file.getvalue()
