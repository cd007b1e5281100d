"""What the pages say can be typed: commands parse, settings are accepted, imports work, files are there."""

import ast
import contextlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
import typer
from pydantic import TypeAdapter, ValidationError

from experiments.experiment import ExperimentFile
from fairfold.cli import app
from fairfold.cli.options import collect_changes, resolve_settings
from fairfold.config.fleet import SUBTABLES, FleetSettings
from fairfold.config.settings import TABLES, kinds_of, read_settings

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")], key=lambda path: str(path)
)
CHANGES = ROOT / "CHANGELOG.md"
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
KEYS: dict[str, list[Any]] = {table: list(kinds_of(table).values()) for table in TABLES}
KEYS |= {f"fleet.{name}": [type(FleetSettings.model_fields[name].default)] for name in SUBTABLES}
PLACES = [ROOT, ROOT / "docs", ROOT / "src" / "fairfold", ROOT / "benchmarks" / "results"]
FILE = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?")
ELSEWHERE = ("my_app/", "runs/", "keys/", "nodes/", "app/", "logs/", "run/", "checkpoints/", "tensorboard/", "train/",
             "test/", "downloads/", "v1/", "var/", "application/", "fleet/", "trial/")  # fmt: skip


def fenced(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def inline(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path) -> list[str]:
    lines = [line.strip() for body in fenced(page, "", "sh", "bash") for line in body.replace("\\\n", "").splitlines()]
    found = [line for line in lines if line.startswith("fairfold ")]
    if page != CHANGES:  # where commands that are gone are named
        found += [code for code in inline(page) if re.match(r"fairfold [a-z]", code)]
    found = [line for line in found if not re.search(r"[\[|…]|\.\.\.", line)]  # a synopsis is no command
    return [command for line in found for command in typed(line)]


def typed(line: str) -> list[str]:
    """What a shell makes of a line: commands whose output is handed over, then the line, but for where it goes."""
    inner = re.findall(r"\$\((.*?)\)", line)
    outer = re.sub(r" (&|> \w+)$", "", re.sub(r"\$\(.*?\)", "TOKEN", line))
    return [*(command for command in inner if command.startswith("fairfold ")), outer]


def refuse_unknown(line: str) -> None:
    """Parse a command line as the program does, and its settings as `train` and `federate` do; run nothing."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    while isinstance(command, click.Group) and words:
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    try:
        if "--plugin" in words:  # a file that the page makes up; tests/test_blocks.py types the command
            raise click.MissingParameter
        given = command.make_context(command.name, list(words)).params
    except click.MissingParameter:  # a command that is named, not shown
        parse_options = {option for one in command.params for option in one.opts}
        assert {word for word in words if word.startswith("-")} <= parse_options
        return
    if "change" in given:
        options = {
            name: given[name] for name in ("data", "model", "method", "capacities", "rounds", "seed") if name in given
        }
        changes = collect_changes(options, given["change"] or [])
        if given.get("resume") or given.get("file"):  # a run or a file that the page makes up
            assert all(known(key) for key in changes)
        else:
            resolve_settings(None, given["recipe"], changes)


def known(key: str) -> bool:
    table, _, name = key.rpartition(".")
    return any(name in kind.model_fields for kind in KEYS.get(table, []))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_typed(page: Path) -> None:
    for line in commands(page):
        try:
            refuse_unknown(line)
        except Exception as error:
            raise AssertionError(f"{page.name}: {line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_in_files_are_accepted(page: Path) -> None:
    for body in fenced(page, "toml"):
        values = tomllib.loads(body)
        if values.keys() <= set(TABLES):
            read_settings(values)
        elif "tables" in values:
            ExperimentFile.model_validate(values)
            read_settings(values["set"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_and_values_in_the_text_exist(page: Path) -> None:
    for code in inline(page):
        found = re.fullmatch(r"((?:data|model|algorithm|subspace|fleet|run)(?:\.[a-z_]+)+)(?: ?= ?(.+))?", code)
        if found is None or "(" in code or code in ("run.log", "model.safetensors") or page == CHANGES:
            continue
        if (ROOT / "src" / "fairfold" / (found[1].replace(".", "/") + ".py")).is_file():
            continue  # a module
        assert known(found[1]), f"{page.name}: no key {code}"
        if found[2]:
            table, _, name = found[1].rpartition(".")
            value = tomllib.loads(f"value = {found[2]}")["value"]
            assert any(accepts(kind, name, value) for kind in KEYS[table]), f"{page.name}: {code}"


def accepts(kind: Any, name: str, value: Any) -> bool:
    field = kind.model_fields.get(name)
    if field is None:
        return False
    wanted: Any = TypeAdapter(Annotated[field.annotation, "", *field.metadata])  # type: ignore[arg-type]
    for given in (value, None) if value == "none" else (value,):
        with contextlib.suppress(ValidationError):
            wanted.validate_python(given)
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_flat_key_is_left(page: Path) -> None:
    """Settings are `table.key` in the text, but on pages that say how they were; layers have arguments so named."""
    flat = r"(?:solver|method|model|capacities|clients_per_round|user_storage|mapping|popularity|step_per|rehash)"
    old = [code for code in inline(page) if re.fullmatch(rf"{flat} ?= ?.+", code)]
    assert page.name in ("settings.md", "modules.md", "CHANGELOG.md") or not old, f"{page.name}: {old}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_imports_what_there_is(page: Path) -> None:
    for body in fenced(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Import | ast.ImportFrom) and "fairfold" in ast.unparse(node):
                exec(ast.unparse(node), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
    for code in inline(page):
        path = re.sub(r"^(?:python )", "", code).split(" ")[0]
        if page == CHANGES or not FILE.fullmatch(path) or path.startswith(ELSEWHERE) or not re.search(r"[./]", path):
            continue
        if path.endswith(("/", ".md", ".py", ".c", ".h", ".toml", ".txt")) or "results" in path:
            assert any(list(place.glob(path.rstrip("/"))) for place in [*PLACES, page.parent]), f"{page.name}: {code}"
