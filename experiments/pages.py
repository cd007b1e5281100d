"""Figures in documentation pages: generated tables, and a check that every other figure is on record.

A page says by comments, which readers do not see, where its figures come from.

``<!-- made: fedrec/ml-1m [NDCG@10; bytes held] -->`` … ``<!-- end -->`` holds a table that :func:`made` writes: a line
per row, and of every column (or measure) its mean with its error. ``NDCG@10 − EASE, central`` is the difference to a
row (or column, or reference) user by user, ``best: own``, ``: held`` and ``: moved`` are what each size's own model
reaches (for all users, where that is known), what a device of it holds, and all bytes of a round, ``best: paper`` is
the paper's figure, ``fedrec-audit/first: AUC`` what another table has in the row of the same name; ``baselines``
stands for the references' own table.

``<!-- compared: ranking/goodreads, general/mnist -->`` … ``<!-- end -->`` holds a line for every cell of these tables
that the paper has, and whether ours agrees (:mod:`experiments.compare`).

``<!-- gathered: … -->`` is a table of several experiments (:mod:`experiments.gathered`).

``<!-- drawn: subspaces/mnist -->`` stands before a picture, ``subspaces-mnist.svg``: the curves of that table over
rounds.

``<!-- figures: beyond/ml-1m, benchmarks/results/private.csv -->`` begins a part, up to the next such comment or
heading of the second level, whose figures (numbers of three decimals or more) have to be among those that these records
hold. In a line of a table that begins with a row's name it is that row's figures alone. ``<!-- figures: none: why -->``
says that nothing of the part is on record, and why; ``<!-- apart: why -->`` … ``<!-- end apart -->`` says it of some
words within a part.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.compare import HEADING as COMPARISON_HEADING
from experiments.compare import compared_cells, comparison_lines
from experiments.execute import execute_all
from experiments.experiment import known_experiments, read_experiment
from experiments.gathered import GATHERED, gathered_cells
from experiments.output import paired_differences
from experiments.records import TRIALS, Records, outcome_from_record
from experiments.tables import Entry, ResultTable, result_tables, sizes
from fairfold.errors import InvalidData
from fairfold.runs.units import human_bytes, human_seconds

MADE = re.compile(
    r"(<!-- made: (?P<experiment>[\w-]+)/(?P<table>[\w-]+) \[(?P<columns>[^\]]*)\] -->\n).*?(<!-- end -->)", re.DOTALL
)
COMPARED = re.compile(r"(<!-- compared: (?P<tables>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
DRAWN = re.compile(r"<!-- drawn: (?P<experiment>[\w-]+)/(?P<table>[\w-]+) -->")
ELSEWHERE = re.compile(r"(?P<experiment>[\w-]+)/(?P<table>[\w-]+): (?P<column>.+)")
PART = re.compile(r"<!-- figures: (?P<sources>.*?) -->", re.DOTALL)
HEADING = re.compile(r"^## .*$", re.MULTILINE)
FIGURE = re.compile(
    r"(?<![\w.,])(?P<before>(?:by|within|about|costs?|gains?|up to|[+−±-])\s?)?(?P<figure>\d?\.\d{3,6})(?![\w%])"
)
APART = re.compile(r"<!-- apart: .*? -->.*?<!-- end apart -->", re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
NONE = "none"
SMALL = 0.1
"""In a sentence, what is smaller may be the difference of two figures; in a table it needs a sign."""


@dataclass
class RecordedFigures:
    """Figures of some records: all of them, by row, and differences between two of them."""

    everything: list[float] = field(default_factory=list)
    by_row: dict[str, list[float]] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)

    def has(self, text: str, row: str | None, difference: bool) -> bool:
        """Whether a figure, as it is written, is one of them after rounding."""
        digits, value = len(text.partition(".")[2]), float(text)
        values = self.by_row.get(row or "", self.everything)
        known = [*values, *self.differences] if difference else values
        return any(abs(abs(one) - value) <= 0.5001 * 10.0**-digits for one in known)


class Pages:
    """Records of a folder of results, as pages refer to them; other files are relative to ``root``."""

    def __init__(self, results: Path, root: Path) -> None:
        self._results, self._root = results, root
        self._grids: dict[str, dict[str, ResultTable]] = {}
        self._held: dict[str, RecordedFigures] = {}

    def result_table(self, experiment: str, table: str) -> ResultTable:
        """One table of an experiment, from stored records."""
        known = self.result_tables(experiment)
        if table not in known:
            raise InvalidData(f"{experiment}/{table}", f"one of {', '.join(known)}", "Correct the comment on the page.")
        return known[table]

    def result_tables(self, experiment: str) -> dict[str, ResultTable]:
        """All tables of an experiment; all experiments are read at once."""
        if not self._grids:
            read = [read_experiment(name) for name in known_experiments() if (self._results / name).is_dir()]
            for one, outcomes in zip(read, execute_all(read, self._results, run=False), strict=True):
                self._grids[one.name] = {
                    result_table.name: result_table for result_table in result_tables(one, outcomes)
                }
        if experiment not in self._grids:
            known = ", ".join(self._grids)
            raise InvalidData(f"{experiment} in {self._results}", f"one of {known}", "Correct the comment on the page.")
        return self._grids[experiment]

    # -- tables that are made ------------------------------------------------------------------------------------------

    def made(self, text: str) -> str:
        """Regenerate the tables of a page."""

        def table(found: re.Match[str]) -> str:
            result_table = self.result_table(found["experiment"], found["table"])
            columns = [column.strip() for column in found["columns"].split(";")]
            beside = {column: self._beside(column) for column in columns if ELSEWHERE.fullmatch(column)}
            return found[1] + "\n".join(_lines(result_table, columns, beside)) + "\n" + found[5]

        def compared(found: re.Match[str]) -> str:
            names = [name.strip() for name in found["tables"].split(",")]
            tables = [(name, self.result_table(*name.split("/", 1))) for name in names]
            lines = _markdown(list(COMPARISON_HEADING), list(map(list, comparison_lines(compared_cells(tables)))))
            return found[1] + "\n".join(lines) + "\n" + found[3]

        def gathered(found: re.Match[str]) -> str:
            heading, lines = gathered_cells(found["rows"], found["columns"], self.result_tables)
            return found[1] + "\n".join(_markdown(heading, lines)) + "\n" + found[4]

        return GATHERED.sub(gathered, COMPARED.sub(compared, MADE.sub(table, text)))

    def drawn(self, text: str) -> dict[str, bytes]:
        """Draw the pictures of a page, by the names of their files."""
        places = [(found["experiment"], found["table"]) for found in DRAWN.finditer(text)]
        return {f"{one}-{table}.svg": picture(self.result_table(one, table)) for one, table in places}

    def _beside(self, column: str) -> dict[str, Entry]:
        """A column of another table, by row."""
        found = ELSEWHERE.fullmatch(column)
        assert found is not None
        entries = self.result_table(found["experiment"], found["table"]).entries
        return {entry.row: entry for entry in entries if entry.column == found["column"]}

    # -- figures that are stated ---------------------------------------------------------------------------------------

    def unrecorded_figures(self, text: str) -> list[str]:
        """Figures of a page that its sources do not contain, or that have no source."""
        wrong = []
        for sources, part in parts(stated(text)):
            if sources is not None and sources.startswith(NONE):
                continue
            held = self.held(sources or "")
            for line in part.splitlines():
                cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
                row = cells[0] if line.lstrip().startswith("|") else None
                for found in FIGURE.finditer(line):
                    small = row is None and float(found["figure"]) < SMALL
                    if not held.has(found["figure"], row, small or bool(found["before"])):
                        wrong.append(f"{found['figure']} in: {line.strip()[:100]}")
        return wrong

    def held(self, sources: str) -> RecordedFigures:
        """Figures of the sources that a page names."""
        if sources in self._held:
            return self._held[sources]
        found = self._held[sources] = RecordedFigures()
        for source in filter(None, (word.strip() for word in sources.split(","))):
            if source.endswith(".csv"):
                self._of_csv(source, found)
                continue
            experiment, _, table = source.partition("/")
            for result_table in (
                [self.result_table(experiment, table)] if table else self.result_tables(experiment).values()
            ):
                _add_table_figures(result_table, found)
            self._of_search(experiment, found)
        return found

    def _of_csv(self, source: str, found: RecordedFigures) -> None:
        """Add the numbers of a CSV file, and means over folds if it has any."""
        with (self._root / source).open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        folds: dict[tuple[str, ...], list[float]] = {}
        for line in lines:
            for cell in line.values():
                found.everything += [float(word) for word in re.findall(r"(?<![\w.])\d*\.\d+", cell or "")]
            if "fold" in line:
                value = line.get("ndcg") or line.get("value") or "nan"
                folds.setdefault((line["data"], line["settings"]), []).append(float(value))
        found.everything += [mean(of) for of in folds.values()]

    def _of_search(self, experiment: str, found: RecordedFigures) -> None:
        """Add the figures of search trials, and numbers in settings."""
        for record in Records(self._results / experiment, TRIALS).by_label.values():
            outcome = outcome_from_record(record)
            found.everything += [value for value in (outcome.best, outcome.last) if value is not None]
        for cell in read_experiment(experiment).cells:
            found.everything += _numbers(cell.values)


def picture(result_table: ResultTable) -> bytes:
    """The curves of a table over rounds, as SVG."""
    from experiments.figures import figures
    from fairfold.runs.plots import render_figure

    return render_figure(figures(result_table)["curves"], "svg")


def stated(text: str) -> str:
    """A page without what is made from records, code, and what is set apart: its figures are to be checked."""
    for made in (COMPARED, MADE, GATHERED, CODE, APART):
        text = made.sub("", text)
    return text


def parts(text: str) -> Iterator[tuple[str | None, str]]:
    """Parts of a page, each with its sources; None where no source is given."""
    marks = sorted([*PART.finditer(text), *HEADING.finditer(text)], key=lambda mark: mark.start())
    sources, start = None, 0
    for mark in marks:
        yield sources, text[start : mark.start()]
        sources, start = (mark["sources"].replace("\n", " ") if mark.re is PART else None), mark.end()
    yield sources, text[start:]


def _numbers(value: Any) -> list[float]:
    """All numbers in nested settings."""
    if isinstance(value, dict | list | tuple):
        return [one for each in (value.values() if isinstance(value, dict) else value) for one in _numbers(each)]
    return [float(value)] if isinstance(value, float | int) and not isinstance(value, bool) else []


def _add_table_figures(result_table: ResultTable, found: RecordedFigures) -> None:
    """Add all figures of a table: means, spreads, seeds, curves, sizes, the paper's figures and baselines."""
    means: dict[tuple[str, str], float] = {}
    for entry in result_table.entries:
        mine = [*entry.values, *entry.ends, *(value for _, value in entry.curve)]
        mine += [value for value in (entry.mean, entry.spread) if value is not None]
        mine += [sum(entry.ends) / len(entry.ends)] if entry.ends else []
        mine += [float(figure) for figure in (entry.paper,) if isinstance(figure, float | int)]
        for size in sizes(entry):
            mine += [value for value in (size.quality, size.everybody) if value is not None]
        mine += _numbers(entry.facts.get("tried on held-out items", {}))
        for label in (entry.row, entry.column):
            found.by_row.setdefault(label, []).extend(mine)
        found.everything += mine
        if entry.mean is not None:
            means[entry.row, entry.column] = entry.mean
            if isinstance(entry.paper, float | int):
                found.differences.append(entry.mean - entry.paper)
    known = [value for value in result_table.baselines.values() if isinstance(value, float)]
    found.everything += known
    papers = {
        (entry.row, entry.column): float(entry.paper)
        for entry in result_table.entries
        if isinstance(entry.paper, float | int)
    }
    for figures in (means, papers):
        for one, other in combinations(figures, 2):
            if one[0] == other[0] or one[1] == other[1]:
                found.differences.append(figures[one] - figures[other])
    found.differences += [mine - value for mine in means.values() for value in known]
    found.differences += [one - other for one, other in combinations(known, 2)]
    for _, apart in paired_differences(result_table):
        for each in apart.values():
            found.differences += [each.mean, each.low, each.high]


# -- a table that is made ----------------------------------------------------------------------------------------------


def _lines(result_table: ResultTable, columns: list[str], beside: dict[str, dict[str, Entry]]) -> list[str]:
    if columns == ["baselines"]:
        known = [
            (name, _short(value) if isinstance(value, float) else value)
            for name, value in result_table.baselines.items()
        ]
        return _markdown(["", result_table.file.metric], [list(pair) for pair in known])
    apart, rows = dict(paired_differences(result_table)), list[list[str]]()
    for row in dict.fromkeys(entry.row for entry in result_table.entries):
        of_row = {entry.column: entry for entry in result_table.entries if entry.row == row}
        cells = []
        for column in columns:
            measure, _, other = column.partition(" − ")
            gap = apart.get(other, {}).get((row, measure))
            name, _, side = measure.partition(": ")
            if column in beside:
                cells.append(_cell(beside[column].get(row)))
            elif other:
                cells.append(str(gap) if gap else "")
            else:
                cells.append(SIDES[side](of_row.get(name)) if side in SIDES else _cell(of_row.get(measure)))
        if any(cells):
            rows.append([row, *cells])
    kept = [0, *(at for at in range(1, len(columns) + 1) if any(row[at] for row in rows))]  # users may not be known
    heading = ["", *(column.partition(": ")[2] if column in beside else column for column in columns)]
    whole = [[line[at] for at in kept] for line in (heading, *rows)]
    return _markdown(whole[0], whole[1:]) if rows else ["(Not run yet.)"]


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.mean is None:
        return "N/A" if entry is not None and entry.state == "N/A" else ""
    if entry.column.startswith("bytes"):
        return human_bytes(round(entry.mean))
    if entry.column == "rounds":
        return f"{entry.mean:.0f}"
    if entry.column == "seconds":
        return human_seconds(entry.mean)
    if len(entry.values) == 1 and "errors" not in entry.facts:
        return f"{_short(entry.mean)} (one seed)"
    return _short(entry.mean) + (f" ± {_short(entry.spread)}" if entry.spread else "")


def _own(entry: Entry | None) -> str:
    found = [] if entry is None else sizes(entry)
    known = [(size.name, size.quality if size.everybody is None else size.everybody) for size in found]
    return ", ".join(f"{name} {_short(value)}" for name, value in known if value is not None)


def _held(entry: Entry | None) -> str:
    found = {} if entry is None else {size.name: human_bytes(size.held) for size in sizes(entry)}
    alike = len(set(found.values())) == 1 < len(found)
    return (
        f"{next(iter(found.values()))} each" if alike else ", ".join(f"{name} {held}" for name, held in found.items())
    )


def _moved(entry: Entry | None) -> str:
    known = entry is not None and entry.facts.get("bytes a round")
    return human_bytes(round(known)) if known else ""


def _paper(entry: Entry | None) -> str:
    return "" if entry is None or entry.paper is None else str(entry.paper)


SIDES = {"own": _own, "held": _held, "moved": _moved, "paper": _paper}


def _short(value: float) -> str:
    return f"{value:.4f}"


def _markdown(heading: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return ["| " + " | ".join(line) + " |" if line[0] != "---" else "|" + "|".join(line) + "|" for line in lines]
