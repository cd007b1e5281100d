"""Tables of results: mean and spread over seeds beside the paper's figures, and costs by size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any, NamedTuple, cast

from experiments.combine import SEED, combine_splits, mean_over_seeds, split_by_size, standard_error, with_seed
from experiments.experiment import SMALLER_IS_BETTER, Cell, Experiment, Figure, TableFile
from experiments.records import Outcome
from fairfold.runs.units import human_bytes, human_seconds
from fairfold.typing import FLOAT_BYTES

PEAK, PEAK_SPREAD = "measured peak bytes", "spread of the peak"

BySeed = dict[int, str]
"""Packed values by user, for each seed."""


@dataclass(frozen=True)
class Entry:
    """One cell over all its seeds."""

    row: str
    column: str
    paper: Figure | None  # the paper's figure, or what stands in its place
    values: tuple[float, ...] = ()  # ours, one per seed
    rounds: tuple[float, ...] = ()  # of the value that counts, one per seed
    ends: tuple[float, ...] = ()  # the value after the last round, one per seed
    paper_round: Figure | None = None
    seconds: tuple[float, ...] = ()  # one per seed
    curve: tuple[tuple[float, float], ...] = ()  # mean over the seeds at every point all of them have, x and y
    state: str = "not run"  # or done, N/A, no data
    reason: str = ""  # why it is not done
    facts: dict[str, Any] = field(default_factory=dict)  # see _mean_facts
    by_user: tuple[str, ...] = ()  # what each user got, packed, one per seed; "" where one does not say; () if none
    seeds: tuple[int, ...] = ()  # whose values these are

    @property
    def mean(self) -> float | None:
        """Mean over the seeds."""
        return mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard error over users where that was measured; else the standard deviation over the seeds, if several."""
        if "errors" in self.facts:
            error: float | None = self.facts["errors"].get(self.column)
            return (
                error
                if len(self.by_user) < 2 or not all(self.by_user)
                else standard_error(mean_over_seeds(self.by_user))
            )
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's figure."""
        return None if self.mean is None or not isinstance(self.paper, float | int) else self.mean - self.paper


@dataclass(frozen=True)
class ResultTable:
    """One table of results."""

    name: str
    file: TableFile
    entries: tuple[Entry, ...]  # in the order of rows and columns
    baselines: dict[str, float | str]  # value (or why there is none) of what needs no training
    machines: tuple[str, ...]
    data: tuple[str, ...]  # what was trained on, in words
    baselines_by_user: dict[str, BySeed] = field(default_factory=dict)  # by split
    others: dict[str, dict[tuple[str, str], BySeed]] = field(default_factory=dict)  # of the experiment's other tables

    @property
    def by_user(self) -> dict[tuple[str, str], BySeed]:
        """Packed values by user, by row, column and seed, where known."""
        return {
            (entry.row, entry.column): {seed: of for seed, of in zip(entry.seeds, entry.by_user, strict=True) if of}
            for entry in self.entries
            if entry.by_user
        }

    @property
    def smaller_is_better(self) -> bool:
        """Whether the metric is an error."""
        return self.file.metric in SMALLER_IS_BETTER


def result_tables(experiment: Experiment, outcomes: dict[Cell, Outcome]) -> list[ResultTable]:
    """Build the tables of an experiment; a quick version may leave one out."""
    known = {cell.table for cell in experiment.cells}
    tables = experiment.file.tables.items()
    found = [_result_table(name, file, experiment, outcomes) for name, file in tables if name in known]
    each = {result_table.name: result_table.by_user for result_table in found}
    return [
        replace(result_table, others={name: each[name] for name in each if name != result_table.name})
        for result_table in found
    ]


def _result_table(name: str, file: TableFile, experiment: Experiment, outcomes: dict[Cell, Outcome]) -> ResultTable:
    cells = [cell for cell in experiment.cells if cell.table == name and not cell.is_trial]
    by_place: dict[tuple[str, str], list[Outcome]] = {}
    beside: list[Outcome] = []
    for cell in cells:
        known = [with_seed(outcomes[cell], cell.seed)] if cell in outcomes else []
        if cell.kind != "baselines":
            by_place.setdefault((cell.row, cell.column), []).extend(known)
        else:
            beside += known
    found = [outcomes[cell] for cell in cells if cell in outcomes]
    data = dict.fromkeys(_described(outcome.data) for outcome in found if outcome.data)
    machines = dict.fromkeys(str(outcome.facts["machine"]) for outcome in found if "machine" in outcome.facts)
    places = [(row, column, known) for (row, column), known in by_place.items()]
    if file.measures:  # a column each
        places = [(row, measure, known) for row, _, known in places for measure in file.measures]
    if file.by_size:  # a row each
        places = [place for row, column, known in places for place in split_by_size(row, column, known)]
    entries = tuple(_entry(file, row, column, known) for row, column, known in places)
    baselines, by_user = combine_splits(beside, file.splits)
    return ResultTable(name, file, entries, baselines, tuple(machines), tuple(data), by_user)


def _described(data: dict[str, Any]) -> str:
    counts = ", ".join(f"{data[key]:,} {key}" for key in ("users", "items", "images", "interactions") if key in data)
    return f"{data.get('name', 'data')}: {counts} (sha256 {str(data.get('sha256', ''))[:12]})"


def _entry(file: TableFile, row: str, column: str, known: list[Outcome]) -> Entry:
    paper = file.paper.get(row, {}).get(column)
    done = [outcome for outcome in known if outcome.state == "done"]
    if not done:
        state, reason = (known[0].state, known[0].reason) if known else ("not run", "not run")
        return Entry(row, column, paper, state=state, reason=reason)
    best = file.value == "best"
    if _measure(done[0], column, best) is None:
        return Entry(row, column, paper, state="–", reason="not measured of this row")
    return Entry(
        row,
        column,
        paper,
        tuple(cast(float, _measure(outcome, column, best)) for outcome in done),
        tuple(cast(float, outcome.best_round if best else outcome.last_round) for outcome in done),
        tuple(cast(float, outcome.last) for outcome in done),
        file.rounds_of_best.get(row, {}).get(column),
        tuple(outcome.seconds for outcome in done),
        _mean_curve(done),
        "done",
        facts=_mean_facts(done),
        by_user=_by_user(done, column if file.measures else file.value),
        seeds=tuple(outcome.facts[SEED] for outcome in done),
    )


def _by_user(done: list[Outcome], measure: str) -> tuple[str, ...]:
    known = tuple(outcome.by_user.get(measure, "") for outcome in done)
    return known if any(known) else ()


def _measure(outcome: Outcome, column: str, best: bool) -> float | None:
    """The value of a cell; if it has several measures, that of its column."""
    several: dict[str, float] | None = outcome.facts.get("measures")
    if several is not None:
        return several.get(column)
    return outcome.best if best else outcome.last


def _mean_facts(done: list[Outcome]) -> dict[str, Any]:
    """Facts of the first seed, with means over the seeds for devices and traffic, and the fastest round."""
    facts = dict(done[0].facts)
    if "devices" in facts:
        facts["devices"] = {
            size: of_size | _over_seeds([outcome.facts["devices"].get(size, {}) for outcome in done])
            for size, of_size in facts["devices"].items()
        }
    if "seconds a round" in facts:  # whatever else a machine does makes a round slower, never faster
        facts["seconds a round"] = min(outcome.facts["seconds a round"] for outcome in done)
    if "bytes a round" in facts:  # who is drawn differs
        facts["bytes a round"] = mean(outcome.facts["bytes a round"] for outcome in done)
    return facts


def _over_seeds(by_seed: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds of a size's quality, for its users and for all, and of its measured memory peak."""
    found: dict[str, float] = {}
    for key in ("quality", "everybody", PEAK):
        values = [one[key] for one in by_seed if one.get(key) is not None]
        found |= {key: mean(values)} if values else {}
        if key == PEAK and len(values) > 1:
            found[PEAK_SPREAD] = stdev(values)
    return found


def _mean_curve(done: list[Outcome]) -> tuple[tuple[float, float], ...]:
    curves = [dict(outcome.curve) for outcome in done]
    shared = [x for x in curves[0] if all(x in curve for curve in curves)]
    return tuple((x, mean(curve[x] for curve in curves)) for x in shared)


# -- as text -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "row", "column", "paper", "ours", "spread", "difference", "seeds", "round", "at the end", "seconds",
    "seconds per round", "bytes per round", "note",
)  # fmt: skip


def format_figure(value: float | str | None, signed: bool = False) -> str:
    """A figure as tables show it."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 1000 or (abs(value) >= 2 and float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:+.4f}" if signed else f"{value:.4f}"


def detail_row(entry: Entry) -> tuple[str, ...]:
    """One line about a cell, as text, in the order of :data:`COLUMNS`."""
    if entry.state != "done":
        # Some reasons name folders of this machine: for the terminal, not for files that travel.
        reason = "the command says more" if entry.state in ("no data", "broken") else entry.reason
        return (entry.row, entry.column, format_figure(entry.paper), entry.state, *[""] * (len(COLUMNS) - 5), reason)
    rounds = f"{mean(entry.rounds):.0f}"
    if isinstance(entry.paper_round, float | int):
        rounds += f" (paper {entry.paper_round:g})"

    def fact(name: str, form: str) -> str:
        return format(entry.facts[name], form) if name in entry.facts else ""

    return (
        entry.row, entry.column, format_figure(entry.paper), format_figure(entry.mean), format_figure(entry.spread),
        format_figure(entry.difference, signed=True), str(len(entry.values)), rounds, format_figure(mean(entry.ends)),
        f"{mean(entry.seconds):.1f}", fact("seconds a round", ".4f"), fact("bytes a round", ".0f"), _note(entry),
    )  # fmt: skip


def _note(entry: Entry) -> str:
    """Notes on a cell: memory by device size, rejected replies."""
    words = []
    for size, facts in entry.facts.get("devices", {}).items():
        if PEAK in facts:
            peak = human_bytes(max(0, facts[PEAK]))  # a difference of two processes: below 0 where it is nothing
            spread = f" ± {human_bytes(facts[PEAK_SPREAD])}" if PEAK_SPREAD in facts else ""
            words.append(f"{size}: {facts['numbers held']:,} numbers, peak {peak}{spread}")
    for reason, count in entry.facts.get("rejections", {}).items():
        words.append(f"{count} replies left out: {reason}")
    return "; ".join(words)


def _with_paper_figure(entry: Entry) -> str:
    ours = format_figure(entry.mean) if entry.state == "done" else entry.state
    if entry.spread:  # what is asked and not drawn, a method's limit, has none
        ours += f" ± {entry.spread:.4f}"
    return ours if entry.paper is None else f"{ours} ({format_figure(entry.paper)})"


def cross_table(
    result_table: ResultTable, text: Callable[[Entry], str] = _with_paper_figure
) -> tuple[list[str], list[list[str]]]:
    """Cross table of rows and columns: a heading, and a line per row."""
    columns = list(dict.fromkeys(entry.column for entry in result_table.entries))
    cells = {(entry.row, entry.column): text(entry) for entry in result_table.entries}
    rows = dict.fromkeys(entry.row for entry in result_table.entries)
    return ["", *columns], [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]


# -- beside the quality ------------------------------------------------------------------------------------------------

SIZE_COLUMNS = ("row", "column", "size", "users", "holds", "receives", "sends", "own model", "for all users")


class Size(NamedTuple):
    """Devices of one capacity in one cell; None where something is not known."""

    name: str
    users: int
    held: int  # bytes, as those received and sent a round
    down: int | None
    up: int | None
    quality: float | None  # of their own model, for the users who hold it
    everybody: float | None  # for all users


class View(NamedTuple):
    """A further cross table of a result table, e.g. its costs."""

    about: str
    heading: list[str]
    rows: list[list[str]]


def sizes(entry: Entry) -> list[Size]:
    """The device sizes of a cell; empty if it is not about devices."""
    keys = ("bytes down", "bytes up", "quality", "everybody")
    return [
        Size(name, facts["users"], facts.get("bytes held", FLOAT_BYTES * facts["numbers held"]), *map(facts.get, keys))
        for name, facts in entry.facts.get("devices", {}).items()
        if "users" in facts
    ]


def views(result_table: ResultTable) -> list[View]:
    """Cross tables beside the quality: costs, and the quality of each size's own model."""
    sides: list[tuple[str, Callable[[Entry], str]]] = [
        ("Seconds per round (the fastest seed's), bytes per round of all devices, both ways, bytes per device", _cost),
        ("Each size's own model, lowest to highest, for the users who hold it; in brackets for all users alike", _own),
    ]
    found = [View(about, *cross_table(result_table, text)) for about, text in sides]
    return [view for view in found if any(any(row[1:]) for row in view.rows)]


def _cost(entry: Entry) -> str:
    if "seconds a round" not in entry.facts:
        return ""
    words = [human_seconds(entry.facts["seconds a round"]), human_bytes(entry.facts["bytes a round"])]
    return ", ".join(filter(None, [*words, _span([size.held for size in sizes(entry)], human_bytes)]))


def _own(entry: Entry) -> str:
    own = _span([size.quality for size in sizes(entry)], "{:.3f}".format)
    everybody = _span([size.everybody for size in sizes(entry)], "{:.3f}".format)
    return f"{own} ({everybody})" if own and everybody else own


def _span(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Lowest and highest known value as text."""
    known = [value for value in values if value is not None]
    return "–".join(dict.fromkeys(text(end) for end in (min(known), max(known)))) if known else ""


def size_rows(result_table: ResultTable) -> list[tuple[str, ...]]:
    """One line per cell and size, as text, in the order of :data:`SIZE_COLUMNS`."""
    return [
        (
            entry.row, entry.column, size.name, f"{size.users:,}",
            *("–" if count is None else human_bytes(count) for count in (size.held, size.down, size.up)),
            format_figure(size.quality), format_figure(size.everybody),
        )
        for entry in result_table.entries
        for size in sizes(entry)
    ]  # fmt: skip
