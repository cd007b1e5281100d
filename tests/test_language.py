"""The project speaks the field's language: retired words do not come back, and every docstring can be read alone.

``docs/concepts.md`` is the glossary. A word of the lists below is refused as a part of an identifier, as a settings key
and as a term in ``code`` of a page. Some are too ordinary to refuse: *word* (of 32 bits in kernels), *clock*, *pace*,
*turn*, *open*, *head*, *near*, *made*, *served*, *chosen*, *sent*, *order*, *cohort*, *trial* (of a search), *grid*
(Flower's), *layout*, *leading*, *idle*, *sealed* (encrypted) and *loop*. As whole names or as settings keys many of
these are refused all the same.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fairfold.config.settings import TABLES

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "experiments", "examples", "benchmarks", "tests")

PARTS = {
    "said": "update, or uploaded",
    "saying": "sending, or writing",
    "says": "sends, or describes",
    "spoken": "uploaded",
    "speak": "upload",
    "speaks": "can_update",
    "speaker": "participant",
    "speakers": "num_updates",
    "hear": "receive",
    "heard": "received, or completed",
    "hearing": "aggregator",
    "overheard": "observed",
    "told": "notes",
    "tells": "reports",
    "summand": "update (additive)",
    "summands": "updates (additive)",
    "survey": "statistics",
    "surveys": "statistics",
    "surveyed": "statistics",
    "people": "clients",
    "visit": "scheduled task",
    "visits": "scheduled tasks",
    "crowd": "min_item_users",
    "making": "solver settings",
    "makings": "solver candidates",
    "judged": "validated, or evaluated",
    "judge": "evaluator",
    "verdict": "tuning result",
    "rival": "baseline",
    "rivals": "baselines",
    "reception": "enrolment",
    "beats": "heartbeats",
    "gate": "gateway",
    "optimiser": "optimizer",
    "optimisers": "optimizers",
    "regulariser": "l2",
    "neighbour": "neighbor",
    "neighbours": "neighbors",
    "colour": "color",
    "colours": "colors",
    "usually": "expected, or default",
    "answer": "update, reply, or response (HTTP)",
    "answers": "updates, or replies",
    "settled": "resolved",
    "keeps": "what it does: remembers, stores",
    "follows": "what it does: depends on, derives",
    "ages": "staleness",
    "shows": "disclosure",
    "prior": "popularity_weight",
}
"""Words that may not be a part of an identifier, and what is used in their place."""

NAMES = {
    "Word": "ClientUpdate",
    "Sent": "ClientTask",
    "Totals": "Aggregate",
    "Visit": "ScheduledTask",
    "People": "Clients",
    "World": "Federation",
    "OpenRun": "LoadedRun",
    "open_run": "load_run",
    "Turn": "RoundSchedule",
    "in_turn": "sequential",
    "Open": "LoadedRun, or a task in flight",
    "by_rows": "row_scores, or row_sums",
    "pair_architecture": "CoOccurrenceArchitecture",
    "problem_with": "incompatibility",
    "largest_change": "max_change",
    "smallest_cohort": "min_cohort",
    "local_step": "local_lr",
    "server_step": "server_lr",
    "PaceSettings": "AsynchronousSettings",
    "ClockSettings": "LatencySettings",
    "Frozen": "FrozenSettings",
    "NEEDS": "ACTIVE_WHEN",
    "Correlations": "CoOccurrence",
    "Leading": "Truncated",
    "Books": "NetworkState",
    "open_books": "collect_statistics",
    "sealed_values": "with_checksum",
    "write_sealed": "write_checked_tensors",
}
"""Identifiers that were renamed, and what to."""

KEYS = {
    "near", "crowd", "prior", "choose", "head", "local_step", "server_step", "local_optimiser", "server_optimiser",
    "regulariser", "negatives", "largest_change", "smallest_cohort", "bound", "empty_rounds", "answers", "staleness",
    "references", "pace", "clock", "alike", "ask_timeout", "group_draw", "fleet.patience",
}  # fmt: skip
"""Settings keys that were renamed; with a table where another table has such a key."""

PROSE = re.compile(
    r"\b(told|tells?|hears?|heard|spoken|speaks?|surveys?|summands?|rivals?|visits|whoever|riddles?|answers used)\b",
    re.IGNORECASE,
)
"""Words of the former language, which comments, docstrings, messages and pages do without."""

RIDDLES = (
    "See the base class",
    "The same for",
    "The same,",
    "The same as",
    "Of a ",
    "Whoever ",
    "Whose ",
    "Who ",
    "That of ",
    "Those of ",
    "What :",
)
"""How a first line may not begin: it has to be read alone."""


def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]


def parts_of(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


@cache
def defined(path: Path) -> tuple[tuple[int, str], ...]:
    """The names that a file defines: classes, functions, parameters, assigned variables and attributes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.append((node.lineno, node.name))
            case ast.arg():
                found.append((node.lineno, node.arg))
            case ast.Name(ctx=ast.Store()):
                found.append((node.lineno, node.id))
            case ast.Attribute(ctx=ast.Store()):
                found.append((node.lineno, node.attr))
            case _:
                pass
    return tuple(found)


def retired_in(path: Path) -> list[str]:
    where = path.relative_to(ROOT)
    is_test = where.parts[0] == "tests"
    found = []
    for line, name in defined(path):
        if name in NAMES:
            found.append(f"{where}:{line} {name}: {NAMES[name]}")
        if (is_test and name.startswith("test_")) or name.startswith("visit_"):
            continue  # a test's name is a sentence; visit_ is of ast.NodeVisitor
        found += [f"{where}:{line} {name}: {PARTS[part]}" for part in parts_of(name) if part in PARTS]
    return found


def test_no_retired_word_is_an_identifier() -> None:
    found = [line for path in python_files() for line in retired_in(path)]
    assert not found, "\n".join(found)


def settings_keys(table: str, kind: type[BaseModel]) -> Iterator[str]:
    """All keys of a table as ``table.key``, those of tables inside it as well."""
    for key, field in kind.model_fields.items():
        yield f"{table}.{key}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_keys(f"{table}.{key}", field.annotation)


def test_no_retired_word_is_a_setting() -> None:
    from fairfold.config.fleet import PRIVACY, FleetSettings
    from fairfold.config.settings import algorithms, methods
    from fairfold.config.tables import DATA, ModelSettings, RunSettings

    tables: dict[str, list[Any]] = {
        "data": [*DATA.values()], "model": [ModelSettings], "algorithm": [*algorithms().values()],
        "subspace": [*methods().values()], "fleet": [FleetSettings], "run": [RunSettings],
        "privacy": [*PRIVACY.values()],
    }  # fmt: skip
    assert tables.keys() == set(TABLES)
    keys = {key for table, kinds in tables.items() for kind in kinds for key in settings_keys(table, kind)}
    assert {"fleet.asynchronous.buffer_size", "run.patience", "privacy.min_cohort"} <= keys
    assert not keys & KEYS
    assert not {key.rsplit(".", 1)[1] for key in keys} & KEYS


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_retired_word_is_a_term_of_a_page(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    terms = {term for code in re.findall(r"`([^`\n]+)`", text) for term in re.findall(r"[A-Za-z_]\w*", code)}
    assert not terms & (NAMES.keys() | {"summand", "survey", "people", "hearing", "spoken"})
    assert not {word[0] for word in PROSE.finditer(re.sub(r"`[^`\n]+`", "", text))}
    assert not (KEYS | {f"{table}.{key}" for table in TABLES for key in KEYS}) & set(
        re.findall(r"[a-z_]+\.[a-z_]+", text)
    )


def documented(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef, bool]]:
    """Public functions, classes and methods of a file; whether each may inherit its docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, False
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node, False
            bases = bool([base for base in node.bases if ast.unparse(base) not in {"ABC", "NamedTuple", "Exception"}])
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner, bases


def library() -> list[Path]:
    return [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "experiments").rglob("*.py"))]


def test_every_first_line_can_be_read_alone() -> None:
    found = []
    for path in library():
        for name, node, inherits in documented(path):
            text = ast.get_docstring(node)
            where = f"{path.relative_to(ROOT)}:{node.lineno} {name}"
            if text is None:
                if not inherits:
                    found.append(f"{where}: no docstring")
            elif text.startswith(RIDDLES) or len(text.splitlines()[0].split()) < 2:
                found.append(f"{where}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_comments_and_messages_are_in_the_same_language() -> None:
    found = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline) if PROSE.search(text) else ():
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                words = [word[0] for word in PROSE.finditer(token.string)]
                found += [f"{path.relative_to(ROOT)}:{token.start[0]} {word}" for word in words]
    assert not found, "\n".join(found)


OTHER_FILES = (
    "Makefile",
    "SECURITY.md",
    "*.c",
    "*.h",
    "*.inc",
    "*.ts",
    "*.mjs",
    "*.css",
    "*.html",
    "*.toml",
    "*.ipynb",
)
COMMENTS_AND_TEXTS = re.compile(r"""//[^\n]*|/\*.*?\*/|`[^`]*`|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)


def other_files() -> list[Path]:
    """Sources and texts that are not Python; what is built or recorded is left out."""
    folders = (*FOLDERS, "native", "browser/src", "deploy", "docs")
    found = [path for folder in folders for kind in OTHER_FILES for path in sorted((ROOT / folder).rglob(kind))]
    return [ROOT / "Makefile", ROOT / "SECURITY.md", *(path for path in found if "results" not in path.parts)]


def test_other_languages_have_the_same_words() -> None:
    paths = other_files()
    assert {".c", ".h", ".ts", ".mjs", ".toml", ".ipynb", ".html"} <= {path.suffix for path in paths}
    found = []
    for path in paths:
        text, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        found += [f"{where}: {word[0]}" for word in PROSE.finditer(text)]
        if path.suffix in (".c", ".h", ".inc", ".ts", ".mjs"):
            names = set(re.findall(r"[A-Za-z_]\w*", COMMENTS_AND_TEXTS.sub("", text)))
            found += [f"{where}: {name}" for name in names if name in NAMES or set(parts_of(name)) & PARTS.keys()]
    assert not found, "\n".join(found)


def trees(folders: Sequence[str]) -> Iterator[tuple[Path, ast.AST]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_every_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in trees(["src"]):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def kind_of(value: ast.expr) -> str:
    """Kind of an assigned value: plain (a name, an attribute, a constant), a call of a function, or its syntax."""
    match value:
        case ast.Name() | ast.Attribute() | ast.Constant() | ast.UnaryOp():
            return "plain"
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return "plain"
        case ast.BinOp(left=left, right=right) if isinstance(right, ast.Constant):
            return kind_of(left) if isinstance(left, ast.Constant | ast.BinOp) else "operation"
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) | ast.Call(func=ast.Name(id=name)):
            return f"{name}()"
        case ast.Call(func=ast.Attribute(attr=name)):
            return f".{name}()"
        case _:
            return type(value).__name__


def test_no_assignment_sets_three_names_to_unlike_values() -> None:
    found = []
    for path, tree in trees(["src", "experiments"]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2:
                names = isinstance(node.targets[0], ast.Tuple)
                unlike = len({kind_of(value) for value in node.value.elts}) > 1
                found += [f"{path}:{node.lineno}"] if names and unlike else []
    assert not found, "\n".join(found)


def table_ends(tree: ast.AST) -> set[int]:
    """Last lines of assigned and returned dicts, lists, sets and tuples, as such or as the one argument of a call."""
    found = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) else None
        if isinstance(value, ast.Call) and len(value.args) + len(value.keywords) == 1:
            value = value.args[0] if value.args else None
        if isinstance(value, ast.Dict | ast.List | ast.Set | ast.Tuple):
            found.add(getattr(node, "end_lineno", 0))
    return found


def test_only_tables_are_left_unformatted() -> None:
    """``# fmt: skip`` is for tables; kernels of Triton, whose parameters are tables, stand in rows as well."""
    found = []
    for path, tree in trees(["src"]):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        marked = {number for number, line in enumerate(lines, 1) if "# fmt: skip" in line}
        found += [f"{path}:{number}" for number in sorted(marked - table_ends(tree)) if "gpu" not in path.parts]
    assert not found, "\n".join(found)


def test_files_stay_small() -> None:
    limits = {"src": 350, "experiments": 350, "tests": 500}
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for folder, limit in limits.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > limit
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("name", ["usually_said", "SecureHearing", "said_first", "survey_grids", "peopleOf"])
def test_the_check_sees_retired_words_inside_identifiers(name: str) -> None:
    assert any(part in PARTS for part in parts_of(name))
