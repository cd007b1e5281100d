"""Federated tuning: candidates are validated on held-out parts of clients' histories, one per round.

A client holds out a tenth of its history when it first uploads. In a tuning round a sample of the clients, the same in
all rounds, receives a candidate model. Each ranks the catalogue by what it has uploaded, and reports how well this
finds the tenth: four numbers, an additive update.
First the splits of every size's budget are tried, then other solver settings in the default split. A candidate replaces
the default only where it is better by more than one or two standard errors over users.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from fairfold.algorithms.cooccurrence.cooccurrence import UNIT, num_supported, owners_of
from fairfold.algorithms.cooccurrence.parts import TuningSchedule
from fairfold.algorithms.cooccurrence.scorer import NEIGHBORS, PAIRS, ROWS, CoOccurrenceArchitecture, CoOccurrenceScorer
from fairfold.algorithms.cooccurrence.solver import SolverSettings
from fairfold.methods.truncated import BudgetSplit, TruncatedSizes, candidate_splits, fit_to_budget
from fairfold.subspace.packed import FACTORS
from fairfold.subspace.projection import LeadingBlock, Projection
from fairfold.typing import Weights

QUALITY = "quality"  # name of validation reports, and of their sums
HELD_OUT_SHARE, SHORTEST_HISTORY = 0.1, 2  # part of a history that is held out, and of how many items at least
EXACT_USERS = 256  # users whose numbers, multiples of 2⁻¹⁶ up to 1, single precision adds exactly
VALIDATION_USERS = 5_000  # mean number of users that report on a candidate, of however many
# Models that tuning sends to a client on the average, and the fewest clients that all candidates go to
PANEL_MODELS, MIN_PANEL = 1.0, 64
SOLVER_PANEL = 0.5  # part of these that get other solver settings, on which all sizes report together

REPORT_SIZE = 4
# Wire layout of a report: 1, the quality, its difference from the default's, and the square of that
REPORT_PROJECTION = LeadingBlock((REPORT_SIZE,), (REPORT_SIZE,))

# Standard errors over users by which another split, or other solver settings, which change all models, must be better
SPLIT_ERRORS, SOLVER_ERRORS = 1.5, 2.0
FEW_REPORTS = 30  # with so many twice the errors are asked for, as one of many is better by chance
FEW_USERS = 100  # with so many popularity weighs twice as much


class SolverScaling(NamedTuple):
    """Multiples of the solver settings: of λ, β, the weight of neighbors, support and the weight of popularity."""

    ridge: float = 1.0
    beta: float = 1.0
    neighbor_weight: float = 1.0
    support: float = 1.0
    popularity_weight: float = 1.0

    def apply(self, default: SolverSettings, counts: Tensor, support: int) -> SolverSettings:
        """The default scaled, for items with these counts."""
        items = num_supported(counts, self.support * support) if self.support > 1 else default.items
        return SolverSettings(
            self.ridge * default.ridge,
            default.columns,
            self.beta * default.beta,
            self.neighbor_weight * default.neighbor_weight,
            items,
            self.popularity_weight * default.popularity_weight,
        )


SOLVER_CANDIDATES = (
    SolverScaling(),
    SolverScaling(ridge=2.0),
    SolverScaling(ridge=0.5),
    SolverScaling(ridge=0.5, beta=0.0),
    SolverScaling(neighbor_weight=3.0),
    SolverScaling(support=3.0),
    SolverScaling(popularity_weight=8.0),
    SolverScaling(popularity_weight=0.0),
)
"""What is tried, the settings as they are first; some switch a part off. Neighbors are switched off by a split."""


def popularity_factor(users: int) -> float:
    """How much more popularity weighs where there are few users: what they share is all that is certain."""
    return 1 + FEW_USERS / max(users, 1)


@dataclass(frozen=True)
class TuningResult:
    """The chosen candidate, and by how much it is better than the default, with the standard error over users."""

    chosen: int
    better: float
    error: float
    users: int

    def description(self, candidates: int) -> str:
        """The result in a phrase."""
        if not self.users:
            return "the default, as nothing was held out"
        if not self.chosen:
            return f"the default ({self.users:,} users find no other of {candidates} surely better)"
        gain = f"{self.better:+.4f} ± {self.error:.4f} NDCG on held-out items of {self.users:,} users"
        return f"the best of {candidates} ({gain})"


def select_candidate(reports: Tensor, candidates: list[int], errors: float) -> TuningResult:
    """The best of some candidates by sums of reports, [candidates, 4]; the first unless one is clearly better."""
    best = TuningResult(0, 0.0, 0.0, int(reports[candidates[0], 0]))
    for place, candidate in enumerate(candidates[1:], 1):
        users, _, better, squares = reports[candidate].tolist()
        if users < 2:
            continue
        mean = better / users
        error = sqrt(max(squares / users - mean**2, 0.0) / (users - 1))
        if mean > max(errors * (1 + FEW_REPORTS / users) * error, best.better):
            best = TuningResult(place, mean, error, int(users))
    return best


@dataclass(frozen=True)
class Tuning:
    """Candidates of every size, and when they are tried."""

    budgets: list[int]  # bytes of every size
    splits: list[list[BudgetSplit]]  # of every size, the default first
    columns: int  # of the server's table
    schedule: TuningSchedule
    sizes: list[list[TruncatedSizes | None]]  # what clients hold under each split

    @classmethod
    def of(cls, budgets: list[int], model: CoOccurrenceArchitecture, rounds: int, parts: int = 1) -> "Tuning":
        """The candidates for a model in a run of some rounds, where an upload comes in some parts."""
        known = (model.head, model.columns, model.num_known_users, model.neighbors, model.whole, model.streamed)
        splits = [candidate_splits(budget, *known) for budget in budgets]
        listed = model.dense[PAIRS][0]

        def sizes_of(budget: int, split: BudgetSplit) -> TruncatedSizes | None:
            sizes = fit_to_budget(budget, model.head, model.columns, split)
            return sizes and replace(sizes, pairs=min(sizes.pairs, listed))

        sizes = [[sizes_of(budget, split) for split in of] for budget, of in zip(budgets, splits, strict=True)]
        schedule = TuningSchedule.of(rounds, max(map(len, splits)) + len(SOLVER_CANDIDATES) - 1, parts)
        return cls(budgets, splits, model.columns, schedule, sizes)

    @property
    def num_splits(self) -> int:
        """The first candidates: the default, and other splits."""
        return max(map(len, self.splits))

    @property
    def _num_candidates(self) -> int:
        return self.num_splits + len(SOLVER_CANDIDATES) - 1

    @property
    def _solver_candidates(self) -> list[int]:
        """Numbers of the candidates with other solver settings; that of the default is 0."""
        return [0, *range(self.num_splits, self._num_candidates)]

    def panel_share(self, round_number: int, rounds: int, least: float) -> float:
        """The share of clients that get a candidate: one model on the average over the rounds, or the least if more."""
        others, candidate = rounds - 2 * self.schedule.parts - self.num_splits, self.schedule.candidate(round_number)
        share = PANEL_MODELS / max(1, self.num_splits + SOLVER_PANEL * max(0, others))
        of_split = candidate is not None and candidate < self.num_splits
        return min(1.0, max(share * (1 if of_split else SOLVER_PANEL), least))

    def request(self, round_number: int, users: float) -> list[float]:
        """What clients are asked in a round: share of a history to upload, candidate, share of users that report.

        So many ``users`` take part in the round.
        """
        share = 1 - HELD_OUT_SHARE if round_number < self.schedule.first else 1.0
        return [share, self.schedule.candidate(round_number) or 0, min(1.0, VALIDATION_USERS / max(users, 1))]

    def add_report(self, reports: Weights, round_number: int, size: int, report: Tensor) -> None:
        """Add the sum of a round's reports to those of a size."""
        candidate = self.schedule.candidate(round_number)
        if candidate is not None:
            before = reports.get(str(size), torch.zeros(self._num_candidates * REPORT_SIZE, dtype=torch.float64))
            total = before.view(-1, REPORT_SIZE).clone()
            total[candidate] += report.double()
            reports[str(size)] = total.view(-1)

    def results(self, reports: Mapping[str, Tensor]) -> tuple[list[TuningResult], TuningResult]:
        """The split that was chosen for every size, and the solver settings for all."""
        totals = self._totals(reports)
        splits = [select_candidate(of, list(range(len(of))), SPLIT_ERRORS) for of in self._shared_totals(totals)]
        return splits, select_candidate(totals.sum(0), self._solver_candidates, SOLVER_ERRORS)

    def sources(self, reports: Mapping[str, Tensor]) -> list[int]:
        """The size whose split each size takes: its own, or that of the next smaller one, which surely ranks better."""
        shared, found = self._shared_totals(self._totals(reports)), list(range(len(self.budgets)))
        validated = [of[result.chosen].tolist() for of, result in zip(shared, self.results(reports)[0], strict=True)]
        smallest_first = sorted(found, key=self.budgets.__getitem__)
        for smaller, size in pairwise(smallest_first):
            (users, quality, *_), (others, theirs, *_) = validated[size], validated[found[smaller]]
            least = min(users, others)
            if least < 2 or self.budgets[smaller] == self.budgets[size]:
                continue
            mine, better = quality / users, theirs / others
            # Both sizes' users report, and of a number from 0 to 1 the variance is at most that of a coin.
            error = sqrt(mine * (1 - mine) / users + better * (1 - better) / others)
            if better - mine > SOLVER_ERRORS * (1 + FEW_REPORTS / least) * error:
                found[size] = found[smaller]
        return found

    def _totals(self, reports: Mapping[str, Tensor]) -> Tensor:
        totals = torch.zeros(len(self.splits), self._num_candidates, REPORT_SIZE, dtype=torch.float64)
        for size, report in reports.items():
            totals[int(size)] += report.view(-1, REPORT_SIZE)
        return totals

    def _shared_totals(self, totals: Tensor) -> list[Tensor]:
        return [self._shared_reports(totals, sizes) for sizes in self.sizes]

    def _shared_reports(self, totals: Tensor, mine: list[TruncatedSizes | None]) -> Tensor:
        """Pool the reports on some models over all sizes that have the same default and tried the same candidates."""
        shared = torch.zeros(len(mine), REPORT_SIZE, dtype=torch.float64)
        for reports, theirs in zip(totals, self.sizes, strict=True):
            for place, sizes in enumerate(theirs if theirs[0] == mine[0] else []):
                if sizes in mine:
                    shared[mine.index(sizes)] += reports[place]
        return shared

    def splits_in(self, round_number: int, reports: Mapping[str, Tensor]) -> dict[int, BudgetSplit]:
        """The split of every budget in a round: the candidate, or what was chosen."""
        if round_number >= self.schedule.end:
            places = [result.chosen for result in self.results(reports)[0]]
            chosen = [self.splits[size][places[size]] for size in self.sources(reports)]
        else:
            place = self.schedule.candidate(round_number) or 0
            chosen = [splits[place if place < len(splits) else 0] for splits in self.splits]
        return dict(zip(self.budgets, chosen, strict=True))

    def solver_in(self, round_number: int, reports: Mapping[str, Tensor]) -> tuple[SolverScaling, int]:
        """Solver settings and columns of the model of a round; without neighbors where no client holds any."""
        candidate, place = self.schedule.candidate(round_number), 0
        splits = [split for of in self.splits for split in of]
        if candidate in self._solver_candidates[1:]:
            place = self._solver_candidates.index(candidate)
            splits = [of[0] for of in self.splits]
        elif candidate is None and round_number >= self.schedule.end:
            place = self.results(reports)[1].chosen
            splits = list(self.splits_in(round_number, reports).values())
        scaling = SOLVER_CANDIDATES[place]
        if not any(split.neighbors for split in splits):
            scaling = scaling._replace(neighbor_weight=0.0)
        return scaling, min(self.columns, max(split.columns for split in splits))

    def notes(
        self,
        round_number: int,
        reports: Mapping[str, Tensor],
        solver: SolverSettings,
        names: list[str],
        held: Sequence[Mapping[str, Projection]],
    ) -> list[str]:
        """Sentences on what was chosen, once tuning has ended; or on why nothing can be."""
        if held[0][ROWS].shape[0] < 2:
            return ["No two items have enough support to be related: everybody is served in the order of popularity."]
        if round_number < self.schedule.end or not self.schedule.num_candidates:
            return []
        of_splits, of_solver = self.results(reports)
        notes = [f"{solver.description()}: {of_solver.description(len(SOLVER_CANDIDATES))}."]
        for size, source in enumerate(self.sources(reports)):
            why = of_splits[size].description(len(self.splits[size]))
            why = why if source == size else f"the split of {names[source]}, which ranks better than its own"
            notes.append(f"{names[size]}: {_description(held[size])}, {why}.")
        return notes


def _description(held: Mapping[str, Projection]) -> str:
    facts = held[ROWS].description()
    rows, columns = facts["kept"][0], facts["kept"][1] - FACTORS
    phrase = f"{rows:,} of {held[ROWS].shape[0]:,} rows, "
    phrase += f"{columns} columns of {facts['bits']} bits" if columns else "no columns"
    for tensor, name in ((PAIRS, "pairs"), (NEIGHBORS, "neighbours")):
        count = held[tensor].description()["kept"][0] if tensor in held else 0
        phrase += f", {count:,} {name}" if count else ""
    return phrase


def problem(report: Tensor, users: float) -> str | None:
    """Why so many users cannot have sent a sum of reports, or None: each counts once, with numbers of at most 1."""
    (count, quality, better, squares), room = report.tolist(), users / UNIT  # what rounding may add
    possible = max(abs(better) - room, 0) ** 2 <= count * (squares + room)
    good = 0 <= count <= users and 0 <= quality <= count + room and 0 <= squares <= count + room and possible
    return None if good else "reports that no users have"


def scatter(values: Tensor) -> Tensor:
    """A hash of integers to 32 bits."""
    found = values & 0xFFFFFFFF
    for _ in range(2):
        found = ((found >> 16 ^ found) * 0x45D9F3B) & 0xFFFFFFFF
    return found >> 16 ^ found


def _item_sums(items: Tensor, lengths: Tensor) -> Tensor:
    return torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, owners_of(lengths), items)


def training_mask(items: Tensor, lengths: Tensor) -> Tensor:
    """Which items of concatenated histories are not held out. It follows from the history alone, by a hash."""
    user = owners_of(lengths)
    chance = scatter(items * 2_654_435_761 + scatter(_item_sums(items, lengths))[user])
    order = (user * 2**32 + chance).argsort(stable=True)
    rank = torch.arange(len(items)) - (lengths.cumsum(0) - lengths)[user]
    held_out = torch.where(lengths >= SHORTEST_HISTORY, (lengths * HELD_OUT_SHARE).round().clamp(min=1), 0)
    mask = torch.ones(len(items), dtype=torch.bool)
    mask[order] = rank >= held_out[user]
    return mask


def validate(
    model: CoOccurrenceScorer,
    items: Tensor,
    lengths: Tensor,
    uploaded: Tensor,
    default_quality: Tensor,
    *,
    is_default: bool,
    share: float,
    catalogue: int,
    top: int,
) -> tuple[Tensor, Tensor]:
    """The sum of some users' reports on a candidate, and their new local state: 1 + the default's quality.

    ``uploaded`` says which items of the concatenated histories the server's sum holds; ``default_quality`` is the local
    state, [users, 1]; which ``share`` of the users reports follows from their histories.
    """
    user = owners_of(lengths)
    counts = torch.bincount(user[uploaded], minlength=len(lengths))
    reporting = (counts > 0) & (counts < lengths) & (scatter(_item_sums(items, lengths) * 7 + lengths) < share * 2**32)
    if not is_default:
        reporting &= default_quality[:, 0] > 0
    after = default_quality.clone()
    if not bool(reporting.any()):
        return torch.zeros(REPORT_SIZE, dtype=torch.float64), after
    mine = reporting[user]
    given = torch.split(items[mine & uploaded], counts[reporting].tolist())
    held_out = torch.split(items[mine & ~uploaded], (lengths - counts)[reporting].tolist())
    quality = model.held_out_ndcg(list(given), list(held_out), catalogue, top)
    if is_default:
        after[reporting, 0] = 1 + quality.to(after.dtype)
        better = torch.zeros_like(quality)
    else:
        better = quality - (default_quality[reporting, 0].double() - 1)
    reports = torch.stack([torch.ones_like(quality), quality, better, better**2])
    return (reports * UNIT).round().sum(1) / UNIT, after  # in fixed point, so that sums are exact
