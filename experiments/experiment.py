"""Experiments: tables of cells, read from a TOML file and validated as a whole before anything runs.

A table reads like the paper's: ``[rows]`` and ``[columns]`` name what each adds to the settings, ``[paper]`` holds the
published figures. A cell has the experiment's ``set``, then the table's, its row's, its column's and its own laid over
it (a table of settings that is given another kind starts anew); with ``--quick`` the experiment's, the table's and the
row's ``quick`` come last.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from experiments.kinds import KINDS
from fairfold.config import merge_tables
from fairfold.config.files import read_toml
from fairfold.config.tables import FrozenSettings
from fairfold.errors import FairfoldError, InvalidSettings, did_you_mean

Values = dict[str, Any]
Figure = float | str
Tried = float | str

SUFFIX = ".toml"
DEFINITIONS = Path(__file__).parent / "definitions"
GROUPS = {"all": "the paper's tables and figures", "ours": "what explains them, and what goes beyond the paper"}
"""Names that run several experiments."""

SMALLER_IS_BETTER = ("MSE", "slope")


class TableFile(FrozenSettings):
    """One table of an experiment, as its file has it."""

    title: str
    source: str = ""  # where the paper has it
    metric: str = "NDCG@20"  # what a cell measures: or MSE, accuracy, slope, compression
    value: Literal["best", "last"] = "best"  # the figure that counts: of the best evaluation, or of the last
    set: Values = Field(default_factory=dict)  # settings of all cells
    quick: Values = Field(default_factory=dict)  # settings that make the quick version
    quick_rows: tuple[str, ...] | None = None  # the rows of the quick version; all if not given
    quick_baselines: bool = True  # whether the quick version has them: they take minutes on large data
    like: str = ""  # another table of the experiment, which has the rows and columns that are not given
    rows: dict[str, Values] = Field(default_factory=dict)  # what each adds; `columns = [...]` leaves out all others,
    # and `quick` is what it adds to the quick version
    columns: dict[str, Values] = Field(default_factory=dict)  # the same with `rows = [...]`; `kind` says what is run
    measures: tuple[str, ...] = ()  # where a row is one cell that measures several things: these are its columns
    against: tuple[str, ...] = ()  # rows that all others are compared with, user by user
    cells: dict[str, dict[str, Values]] = Field(default_factory=dict)  # what single ones add, by row and column
    paper: dict[str, dict[str, Figure]] = Field(default_factory=dict)  # its figures; text such as "N/A" for none
    rounds_of_best: dict[str, dict[str, Figure]] = Field(default_factory=dict)  # at which the paper found its best
    deviation: float = 0.0  # that the paper states: figures closer than this agree
    why: dict[str, str] = Field(default_factory=dict)  # why figures differ, by column; "" for all others
    baselines: bool | Literal["strong"] = False  # methods without federation beside it, on the same data: those of the
    # paper's tables, or the strong ones of reports, which are tuned among all items
    splits: bool = False  # whether every seed has a split of its own (data.split_seed), references too
    by_size: bool = False  # whether a row is what devices of a size hold, for all users, in place of the server's model
    curves: Literal["rounds", "loglog"] = "rounds"  # what runs along the x axis of the plot over time
    notes: tuple[str, ...] = ()  # choices and differences, shown under the table
    seeds: tuple[int, ...] | None = None  # other ones than the experiment's
    on_request: bool = False  # run only where `--only` names its cells: what takes long and is beside the point


class SearchFile(FrozenSettings):
    """How single settings are chosen: every value tried in a short run on data held out of the training set."""

    set: Values = Field(default_factory=dict)  # settings of the short runs, on top of a cell's own
    values: dict[str, tuple[Tried, ...]]  # what to try, by `table.key`
    more: dict[str, dict[str, tuple[Tried, ...]]] = Field(default_factory=dict)  # besides, in some columns alone
    cells: tuple[tuple[str, str, str], ...]  # which cells to try them in: table, row, column
    held_out: float = Field(0.1, gt=0, lt=1)  # share of each user's training data that judges
    seed: int = 1000  # of the short runs; no seed of the tables


class ExperimentFile(FrozenSettings):
    """The content of an experiment's file; see :class:`TableFile`."""

    title: str
    about: str = ""
    group: Literal["all", "ours"] = "ours"  # what it is run with
    like: str = ""  # another experiment, whose `set` and `quick` come before this one's
    set: Values = Field(default_factory=dict)
    quick: Values = Field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)  # one run per cell for each
    quick_seeds: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()
    tables: dict[str, TableFile] = Field(min_length=1)
    search: SearchFile | None = None


@dataclass(frozen=True)
class Cell:
    """One figure of a table for one seed."""

    table: str
    row: str
    column: str
    kind: str  # a key of KINDS
    values: Values = field(hash=False)  # its settings, without the seed
    seed: int
    experiment: str = ""
    trials: tuple["Cell", ...] = field(default=(), hash=False, compare=False)  # run before it, to choose settings

    @property
    def is_trial(self) -> bool:
        """Whether the cell only serves to choose settings of another."""
        return self.kind.endswith("-trial")

    @property
    def label(self) -> str:
        """Readable name, unique within the experiment."""
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
        """Name of the folder of its results; the quick version has its own."""
        return f"{self.name}-quick" if self.quick else self.name


def known_experiments() -> list[str]:
    """Names of the experiments in ``definitions``."""
    return sorted(path.stem for path in DEFINITIONS.glob("*.toml"))


def named(name: str) -> list[str]:
    """Names of the experiments of a group, or the given one."""
    return [each for each in known_experiments() if _read(each)[0].group == name] if name in GROUPS else [name]


def read_experiment(name: str, *, quick: bool = False, seeds: int | None = None) -> Experiment:
    """An experiment by name, or by the path of one's own ``.toml`` file; ``seeds`` are counted from 0."""
    file, short = _read(name)
    if file.like:
        other, _ = _read(file.like)
        file = file.model_copy(
            update={"set": merge_tables(other.set, file.set), "quick": merge_tables(other.quick, file.quick)}
        )
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
    """Parse an experiment's file; also returns its short name."""
    known = {path.stem: path for path in sorted(DEFINITIONS.glob("*.toml"))}
    if not name.endswith(SUFFIX) and name not in known:
        needed = f"one of {', '.join((*GROUPS, *known))}, or a .toml file"
        given = f"experiment {name!r}{did_you_mean(name, [*known, *GROUPS])}"
        raise InvalidSettings(given, needed, "`python -m experiments --list` shows them.")
    try:
        file = ExperimentFile.model_validate(read_toml(known.get(name, Path(name))))
        return file.model_copy(update={"tables": _completed(name, file.tables)}), Path(name).stem
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise InvalidSettings(f"{name}: {problems}", "the keys of an experiment", "See docs/experiments.md.") from None


def _completed(name: str, tables: dict[str, TableFile]) -> dict[str, TableFile]:
    """Fill in rows and columns of tables that are ``like`` others."""
    found = dict(tables)
    for table, content in tables.items():
        if content.like:
            if content.like not in tables:
                given = f"{name}, table {table!r}: like {content.like!r}{did_you_mean(content.like, tables)}"
                raise InvalidSettings(given, f"one of {', '.join(tables)}", "Correct it in the file.")
            other = found[content.like]
            parts = ("rows", "columns", "measures", "against")
            both = {part: getattr(content, part) or getattr(other, part) for part in parts}
            found[table] = content.model_copy(update=both)
        if found[table].measures and not found[table].columns:
            found[table] = found[table].model_copy(update={"columns": {"": {}}})
        if not (found[table].rows and found[table].columns):
            raise InvalidSettings(f"{name}, table {table!r} without rows or columns", "both", "Name them, or `like`.")
    return found


def _cells(
    name: str, file: ExperimentFile, table: str, content: TableFile, quick: bool, seeds: tuple[int, ...]
) -> list[Cell]:
    _refuse_unknown_labels(name, table, content, file.tables)
    shared, small = merge_tables(file.set, content.set), merge_tables(file.quick, content.quick) if quick else {}
    cells: list[Cell] = []
    for row, of_row in content.rows.items():
        if quick and content.quick_rows is not None and row not in content.quick_rows:
            continue
        for column, of_column in content.columns.items():
            if column not in of_row.get("columns", [column]) or row not in of_column.get("rows", [row]):
                continue
            of_cell = content.cells.get(row, {}).get(column, {})
            smallest = merge_tables(small, of_row.get("quick", {})) if quick else small
            values = reduce(merge_tables, (of_row, of_column, of_cell, smallest), shared)
            for key in ("rows", "columns", "quick"):
                values.pop(key, None)
            kind = str(values.pop("kind", "federated"))
            _check(f"{name}, table {table!r}, row {row!r}, column {column!r}", kind, values)
            tries = tuple(
                Cell(table, row, tried, of_trial, trial, 0, name)
                for tried, (of_trial, trial) in KINDS[kind].trials(values).items()
            )
            cells += tries
            cells += [
                Cell(table, row, column, kind, _split(content, values, seed), seed, name, tries) for seed in seeds
            ]
    if content.baselines and (content.quick_baselines or not quick):
        # Once for each data set, split and metric; what needs no training has no seed but that of its split.
        distinct: list[Values] = []
        for seed, values in [(cell.seed, KINDS[cell.kind].data_settings(cell.values)) for cell in cells]:
            if values not in distinct:
                distinct.append(values)
                label = str(values["data"].get("name", ""))
                asked = values if content.baselines is True else values | {"baselines": content.baselines}
                cells.append(Cell(table, "baselines", label, "baselines", asked, seed * content.splits, name))
    return cells


def _split(content: TableFile, values: Values, seed: int) -> Values:
    return merge_tables(values, {"data": {"split_seed": seed}}) if content.splits else values


def _check(where: str, kind: str, values: Values) -> None:
    if kind not in KINDS:
        given = f"{where}: kind {kind!r}{did_you_mean(kind, KINDS)}"
        raise InvalidSettings(given, f"one of {', '.join(KINDS)}", "Check the spelling.")
    try:
        KINDS[kind].settings(values)
    except FairfoldError as error:
        raise InvalidSettings(f"{where}: {error.given}", error.needed, error.remedy) from None


def _refuse_unknown_labels(name: str, table: str, content: TableFile, tables: Mapping[str, TableFile]) -> None:
    """Refuse figures, settings and comparisons of cells that do not exist."""
    named: dict[str, Mapping[str, Mapping[str, object]]] = {
        "quick_rows": {row: {} for row in content.quick_rows or ()},
        "cells": content.cells, "paper": content.paper, "rounds_of_best": content.rounds_of_best,
    }  # fmt: skip
    labels: list[tuple[str, Collection[str], str]] = [
        (what, known, label)
        for what, by_row in named.items()
        for row, of_row in by_row.items()
        for known, label in ((content.rows, row), *((content.columns, column) for column in of_row))
    ]
    for one in content.against:
        other, *there = one.split("/")  # a name without a stroke may be a reference's, known when it is made
        if there and one not in content.rows and one not in content.columns:
            of_other = tables.get(other, content)
            places = (tables, ("*", *of_other.rows), (*of_other.columns, *of_other.measures))
            labels += [("against", known, label) for known, label in zip(places, (other, *there), strict=False)]
    for what, known, label in labels:
        if label not in known:
            given = f"{name}, table {table!r}: {what} names {label!r}{did_you_mean(label, known)}"
            raise InvalidSettings(given, f"one of {', '.join(known)}", "Correct it in the file.")


def _explain(problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{path}: {problem['msg']}"
    parts: dict[str, type[FrozenSettings]] = {"search": SearchFile, "tables": TableFile}
    known = parts.get(problem["loc"][0], ExperimentFile).model_fields
    return f"unknown key {path!r}{did_you_mean(str(problem['loc'][-1]), known)}"
