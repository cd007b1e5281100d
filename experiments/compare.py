"""Comparison with the paper: every cell of its tables beside ours, and whether the two agree, what differs first.

A cell *agrees* when its mean is within two of our spreads of the paper's figure (over seeds; of one seed, over users or
test images), or within the deviation that the paper states for its table. Where two spreads are more than a tenth of
the paper's figure, being within them says nothing: the cell is too uncertain to say. A cell that the paper could not
run agrees when it cannot be run here either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from experiments.combine import mean_over_seeds, standard_error
from experiments.tables import Entry, ResultTable

SPREADS = 2
WIDEST = 0.1  # of the paper's figure: what spreads may cover for a cell within them to agree
HEADING = ("table", "cell", "paper", "ours", "best at round (paper)", "verdict")
NOBODY = "agrees: cannot be run"
WORSE, BETTER, UNCERTAIN, AGREES, LACKING = range(5)  # the order on the page


@dataclass(frozen=True)
class Comparison:
    """One cell of the paper beside ours."""

    table: str
    entry: Entry
    rank: int  # WORSE, BETTER, UNCERTAIN, AGREES or LACKING
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


def two_spreads(entry: Entry) -> float:
    """How far chance may take a cell from the paper's figure."""
    spread = entry.spread
    if spread is None and entry.by_user and all(entry.by_user):
        spread = standard_error(mean_over_seeds(entry.by_user))
    return SPREADS * (spread or 0.0)


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
    distance, paper = abs(entry.difference), abs(float(entry.paper or 1))
    chance = two_spreads(entry)
    by = f"({entry.difference:+.4f})".replace("-", "−")
    if distance <= chance and chance > WIDEST * paper:
        return found(UNCERTAIN, f"too uncertain to say {by}", distance)
    if distance <= max(chance, result_table.file.deviation):
        return found(AGREES, f"agrees {by}", distance)
    better = (entry.difference < 0) == result_table.smaller_is_better
    why = result_table.file.why.get(entry.column) or result_table.file.why.get("")
    words = f"differs, {'better' if better else 'worse'} by {distance:.4f}" + (f": {why}" if why else "")
    return found(BETTER if better else WORSE, words, distance / paper)


def _ours(entry: Entry) -> str:
    if entry.mean is None:
        return entry.state if entry.state == "N/A" else "–"
    if len(entry.values) == 1:
        return f"{entry.mean:.4f} (one seed)"
    return f"{entry.mean:.4f} ± {entry.spread or 0:.4f}"


def _rounds(entry: Entry) -> str:
    paper = f" ({entry.paper_round:g})" if isinstance(entry.paper_round, float | int) else ""
    return f"{mean(entry.rounds):.0f}{paper}" if entry.rounds else ""
