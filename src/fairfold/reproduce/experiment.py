"""What an experiment is: tables of cells, read from a TOML file and checked whole before anything runs.

A table reads like the paper's: ``[rows]`` and ``[columns]`` name what each adds to the settings, ``[paper]`` holds the
published figures. A cell has the experiment's ``set``, then the table's, its row's, its column's and its own laid over
it (a table of settings that is given another kind starts anew); with ``--quick`` the experiment's and the table's
``quick`` come last.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.reproduce.kinds import KINDS
from fairfold.settings import merged
from fairfold.settings.base import Frozen

Values = dict[str, Any]
Figure = float | str
Tried = float | str

SUFFIX = ".toml"
GROUPS = {"all": "the paper's tables and figures", "ours": "what explains them, and what goes beyond the paper"}
"""Names that run several experiments."""

SMALLER_IS_BETTER = ("MSE", "slope")


class TableFile(Frozen):
    """One table of an experiment, as its file has it.

    Attributes:
        title: Heading.
        source: Where the paper has it.
        metric: What a cell measures, e.g. ``NDCG@20``, ``MSE``, ``accuracy``.
        value: The figure that counts: of the ``best`` evaluation, or of the ``last``.
        set: Settings of all cells.
        quick: Settings that make the quick version.
        quick_rows: The rows of the quick version; all if not given.
        quick_references: Whether the quick version has the references, which take minutes on large data.
        rows: What each row adds; ``columns = [...]`` in it leaves out all other columns.
        columns: What each column adds; ``rows = [...]`` in it leaves out all other rows; ``kind`` says what is run.
        cells: What a single cell adds, by row and column: a learning rate that a search chose for it.
        paper: The paper's figures, by row and column; text such as ``"N/A"`` stands for none.
        references: Methods without federation beside it, on the same data.
        curves: What runs along the x axis of the plot over time: ``rounds``, or ``loglog``.
        notes: Choices and differences, told under the table.
        seeds: Other seeds than the experiment's.
        rounds_of_best: The rounds at which the paper found its best values, by row and column.
    """

    title: str
    source: str = ""
    metric: str = "NDCG@20"
    value: Literal["best", "last"] = "best"
    set: Values = Field(default_factory=dict)
    quick: Values = Field(default_factory=dict)
    quick_rows: tuple[str, ...] | None = None
    quick_references: bool = True
    rows: dict[str, Values]
    columns: dict[str, Values]
    cells: dict[str, dict[str, Values]] = Field(default_factory=dict)
    paper: dict[str, dict[str, Figure]] = Field(default_factory=dict)
    rounds_of_best: dict[str, dict[str, Figure]] = Field(default_factory=dict)
    references: bool = False
    curves: Literal["rounds", "loglog"] = "rounds"
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None


class SearchFile(Frozen):
    """How single settings are chosen: every value tried in a short run on data held out of the training set.

    Attributes:
        set: Settings of the short runs, on top of a cell's own.
        values: What to try, by ``table.key``.
        more: What to try besides, by column, where a setting means something in some columns alone.
        cells: Which cells to try them in, ``[table, row, column]``.
        held_out: Share of each user's training data that judges.
        seed: Of the short runs; no seed of the tables.
    """

    set: Values = Field(default_factory=dict)
    values: dict[str, tuple[Tried, ...]]
    more: dict[str, dict[str, tuple[Tried, ...]]] = Field(default_factory=dict)
    cells: tuple[tuple[str, str, str], ...]
    held_out: float = Field(0.1, gt=0, lt=1)
    seed: int = 1000


class ExperimentFile(Frozen):
    """The content of an experiment's file; see :class:`TableFile`.

    Attributes:
        title: Heading.
        about: What it is.
        group: What it is run with: ``all``, the paper's tables; ``ours``, what explains them or goes beyond.
        like: Another experiment, whose ``set`` and ``quick`` come before this one's.
        set: Settings of all cells.
        quick: Settings that make the quick version.
        seeds: One run a cell for each.
        quick_seeds: The same for the quick version.
        notes: Choices and differences.
        tables: By name.
        search: How learning rates are chosen.
    """

    title: str
    about: str = ""
    group: Literal["all", "ours"] = "ours"
    like: str = ""
    set: Values = Field(default_factory=dict)
    quick: Values = Field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    quick_seeds: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()
    tables: dict[str, TableFile] = Field(min_length=1)
    search: SearchFile | None = None


@dataclass(frozen=True)
class Cell:
    """One figure of a table for one seed.

    Attributes:
        table: Name of its table.
        row: Label.
        column: Label.
        kind: What is run, a key of :data:`fairfold.reproduce.kinds.KINDS`.
        values: Its settings, without the seed.
        seed: Its seed.
        experiment: Name of its experiment.
    """

    table: str
    row: str
    column: str
    kind: str
    values: Values = field(hash=False)
    seed: int
    experiment: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return " ".join(part for part in (self.table, self.row, self.column, f"seed {self.seed}") if part)


@dataclass(frozen=True)
class Experiment:
    """An experiment ready to run: its file, and all cells."""

    name: str
    file: ExperimentFile
    quick: bool
    cells: tuple[Cell, ...]

    @property
    def folder(self) -> str:
        """Where its results go; the quick version has a place of its own."""
        return f"{self.name}-quick" if self.quick else self.name


def known_experiments() -> list[str]:
    """Names of the experiments that come with the package."""
    found = (entry.name for entry in resources.files("fairfold").joinpath("experiments").iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))


def named(name: str) -> list[str]:
    """The experiments that a name stands for: those of a group, or that one."""
    return [each for each in known_experiments() if _read(each)[0].group == name] if name in GROUPS else [name]


def read_experiment(name: str, *, quick: bool = False, seeds: int | None = None) -> Experiment:
    """An experiment by name, or by the path of one's own file.

    Args:
        name: One of :func:`known_experiments`, or a path that ends with ``.toml``.
        quick: The small version.
        seeds: How many seeds instead of those of the file, counted from 0.
    """
    file, short = _read(name)
    if file.like:
        other, _ = _read(file.like)
        file = file.model_copy(update={"set": merged(other.set, file.set), "quick": merged(other.quick, file.quick)})
    chosen = file.quick_seeds if quick else file.seeds
    if seeds is not None:
        if seeds < 1:
            raise InvalidSettings(f"--seeds {seeds}", "at least 1", "Ask for three or more to see the spread.")
        chosen = tuple(range(seeds))
    cells: list[Cell] = []
    for table, content in file.tables.items():
        own = content.seeds if seeds is None and not quick else None
        cells += _cells(short, file, table, content, quick, own or chosen)
    return Experiment(short, file, quick, tuple(cells))


def _read(name: str) -> tuple[ExperimentFile, str]:
    text, short = _text(name)
    try:
        return ExperimentFile.model_validate(tomllib.loads(text)), short
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings(f"{name}: {error}", "a TOML file", "Mend that line.") from None
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise InvalidSettings(f"{name}: {problems}", "the keys of an experiment", "See docs/reproduction.md.") from None


def _text(name: str) -> tuple[str, str]:
    path = Path(name)
    if name.endswith(SUFFIX):
        try:
            return path.read_text(encoding="utf-8"), path.stem
        except OSError as error:
            raise InvalidSettings(f"{path}: {error.strerror}", "a readable TOML file", "Check the path.") from None
    known = known_experiments()
    if name not in known:
        near = difflib.get_close_matches(name, [*known, *GROUPS], n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else "`fairfold reproduce --list` shows them."
        needed = f"one of {', '.join((*GROUPS, *known))}, or a .toml file"
        raise InvalidSettings(f"experiment {name!r}", needed, remedy)
    return resources.files("fairfold").joinpath("experiments", f"{name}{SUFFIX}").read_text(encoding="utf-8"), name


def _cells(
    name: str, file: ExperimentFile, table: str, content: TableFile, quick: bool, seeds: tuple[int, ...]
) -> list[Cell]:
    _refuse_unknown_labels(name, table, content)
    shared, small = merged(file.set, content.set), merged(file.quick, content.quick) if quick else {}
    cells: list[Cell] = []
    for row, of_row in content.rows.items():
        if quick and content.quick_rows is not None and row not in content.quick_rows:
            continue
        for column, of_column in content.columns.items():
            if column not in of_row.get("columns", [column]) or row not in of_column.get("rows", [row]):
                continue
            of_cell = content.cells.get(row, {}).get(column, {})
            values = reduce(merged, (of_row, of_column, of_cell, small), shared)
            for key in ("rows", "columns"):
                values.pop(key, None)
            kind = str(values.pop("kind", "federated"))
            _check(f"{name}, table {table!r}, row {row!r}, column {column!r}", kind, values)
            cells += [Cell(table, row, column, kind, values, seed, name) for seed in seeds]
    if content.references and (content.quick_references or not quick):
        # Once for each data set and metric; what needs no training has no seed.
        for values in _distinct([KINDS["references"].relevant(cell.values) for cell in cells]):
            cells.append(Cell(table, "references", str(values["data"].get("name", "")), "references", values, 0, name))
    return cells


def _distinct(many: list[Values]) -> list[Values]:
    found: list[Values] = []
    for values in many:
        if values not in found:
            found.append(values)
    return found


def _check(where: str, kind: str, values: Values) -> None:
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else "Check the spelling."
        raise InvalidSettings(f"{where}: kind {kind!r}", f"one of {', '.join(KINDS)}", remedy)
    try:
        KINDS[kind].check(values)
    except FairfoldError as error:
        raise InvalidSettings(f"{where}: {error.given}", error.needed, error.remedy) from None


def _refuse_unknown_labels(name: str, table: str, content: TableFile) -> None:
    """A figure of the paper that stands beside no cell, or a setting of none, would be lost without a word."""
    for row in content.quick_rows or ():
        if row not in content.rows:
            raise InvalidSettings(
                f"{name}, table {table!r}: quick_rows names {row!r}", f"one of {', '.join(content.rows)}", "Mend it."
            )
    named: dict[str, Mapping[str, Mapping[str, object]]] = {
        "cells": content.cells, "paper": content.paper, "rounds_of_best": content.rounds_of_best
    }  # fmt: skip
    for what, by_row in named.items():
        for row, of_row in by_row.items():
            for known, label in ((content.rows, row), *((content.columns, column) for column in of_row)):
                if label not in known:
                    raise InvalidSettings(
                        f"{name}, table {table!r}: {what} names {label!r}", f"one of {', '.join(known)}", "Mend it."
                    )


def _explain(problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{path}: {problem['msg']}"
    levels: dict[int, type[Frozen]] = {1: ExperimentFile, 3: TableFile}
    model = SearchFile if problem["loc"][0] == "search" else levels.get(len(problem["loc"]), TableFile)
    near = difflib.get_close_matches(str(problem["loc"][-1]), model.model_fields, n=1)
    return f"unknown key {path!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
