"""Comparison with the paper: every cell of its tables beside ours, and whether the two agree, what differs first.

A cell *agrees* when its mean is within two of our spreads of the paper's figure (over seeds; of one seed, over users or
test images), or within the deviation that the paper states for its table. A cell that the paper could not run agrees
when it cannot be run here either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from experiments.combine import mean_over_seeds, standard_error
from experiments.tables import Entry, ResultTable

SPREADS = 2
HEADING = ("table", "cell", "paper", "ours", "best at round (paper)", "verdict")
NOBODY = "agrees: cannot be run"
WORSE, BETTER, AGREES, LACKING = range(4)  # the order on the page


@dataclass(frozen=True)
class Comparison:
    """One cell of the paper beside ours."""

    table: str
    entry: Entry
    rank: int  # WORSE, BETTER, AGREES or LACKING
    size: float  # by how much of the paper's figure ours differs
    words: str

    @property
    def line(self) -> tuple[str, ...]:
        """Texts in the order of :data:`HEADING`."""
        entry = self.entry
        cell = f"{entry.row} {entry.column}"
        return (self.table, cell, str(entry.paper), _ours(entry), _rounds(entry), self.words)


def comparison_lines(comparisons: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """A line per cell; one for all cells of a column that nobody can run, as nothing else can be said of them."""
    lines = dict[tuple[str, ...], tuple[str, ...]]()
    for one in comparisons:
        table, cell, *rest = one.line
        key = (table, one.entry.column) if one.words == NOBODY else (table, cell)
        rows = f"{lines[key][1].removesuffix(one.entry.column).rstrip()}, " if key in lines else ""
        lines[key] = (table, rows + cell, *rest)
    return list(lines.values())


def compared_cells(named: Iterable[tuple[str, ResultTable]]) -> list[Comparison]:
    """Compare all cells that the paper has: worse ones first, by how much, then better ones, then the rest."""
    found = [
        _compare(name, result_table, entry)
        for name, result_table in named
        for entry in result_table.entries
        if entry.paper is not None
    ]
    return sorted(found, key=lambda one: (one.rank, -one.size))


def tolerance(result_table: ResultTable, entry: Entry) -> float:
    """How far a cell may be from the paper's figure and still agree."""
    spread = entry.spread
    if spread is None and entry.by_user and all(entry.by_user):
        spread = standard_error(mean_over_seeds(entry.by_user))
    return max(SPREADS * (spread or 0.0), result_table.file.deviation)


def _compare(name: str, result_table: ResultTable, entry: Entry) -> Comparison:
    def found(rank: int, words: str, size: float = 0.0) -> Comparison:
        return Comparison(name, entry, rank, size, words)

    if entry.state == "N/A":
        alike = entry.paper == "N/A"
        return found(AGREES, NOBODY) if alike else found(WORSE, "differs: cannot be run here", 1.0)
    if entry.mean is None:
        return found(LACKING, "not run")
    if entry.difference is None:
        return found(BETTER, "differs: the paper could not run it")
    if abs(entry.difference) <= tolerance(result_table, entry):
        return found(AGREES, f"agrees ({entry.difference:+.4f})".replace("-", "−"), abs(entry.difference))
    better = (entry.difference < 0) == result_table.smaller_is_better
    why = result_table.file.why.get(entry.column) or result_table.file.why.get("")
    words = f"differs, {'better' if better else 'worse'} by {abs(entry.difference):.4f}" + (f": {why}" if why else "")
    return found(BETTER if better else WORSE, words, abs(entry.difference) / abs(float(entry.paper or 1)))


def _ours(entry: Entry) -> str:
    if entry.mean is None:
        return entry.state if entry.state == "N/A" else "–"
    if len(entry.values) == 1:
        return f"{entry.mean:.4f} (one seed)"
    return f"{entry.mean:.4f} ± {entry.spread or 0:.4f}"


def _rounds(entry: Entry) -> str:
    paper = f" ({entry.paper_round:g})" if isinstance(entry.paper_round, float | int) else ""
    return f"{mean(entry.rounds):.0f}{paper}" if entry.rounds else ""
