"""What serves devices best, found by trials: each of some models is tried on what devices have held back.

A device holds back a tenth of its history when it is first asked. In a round of trial it gets one model more, of no
more bytes than it may hold, ranks the catalogue by what it has said, and answers how well that finds the tenth: four
numbers, a summand like any other. Whatever was tried takes the place of the default only where it is better by more
than an error or two over users; so few users, whose trials say little, are served by the default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from fairfold.algorithms.making import MAKINGS, Making
from fairfold.algorithms.pair_architecture import LISTED, NEAR, ROWS, PairArchitecture
from fairfold.algorithms.pairs import UNIT
from fairfold.algorithms.served import Served
from fairfold.methods.base import Shape
from fairfold.methods.leading import Cut, cut_to, shapes_for
from fairfold.projections import LeadingBlock, Projection
from fairfold.projections.coded import FACTORS
from fairfold.values import Weights

Held = Mapping[str, Projection]
"""What a device holds of every tensor."""

QUALITY = "quality"
"""Name of judgements, and of their sums."""

HELD_BACK = 0.1
"""Of a history."""

SHORTEST = 3
"""Items of a history of which one is held back."""

EXACT = 256
"""Users whose numbers, multiples of 2⁻¹⁶ up to 1, single precision adds exactly."""

JUDGES = 5_000
"""Users whose judgement is asked for, on the average, of however many."""

TOLD = 4
"""Numbers of a judgement: 1, the quality, what it is better than the default's, and the square of that."""


SURE, SURER = 1.5, 2.0
"""Standard errors over users that another shape has to be better by, and another making: that is tried in one shape
alone, and changes the models of all."""

DOUBT = 100
"""Users of whom twice as many errors are asked for: with five candidates, some of few users are better by chance."""

JUDGEMENT = LeadingBlock((TOLD,), (TOLD,))
"""How one is told."""


@dataclass(frozen=True)
class Schedule:
    """Which rounds ask for nine tenths of the histories, which try something, and which ask for all.

    Attributes:
        first: Rounds before the trials.
        trials: How many.
    """

    first: int
    trials: int

    @classmethod
    def of(cls, rounds: int, wanted: int) -> "Schedule":
        """As many trials as leave a round before them and one after; half of what is left comes before."""
        trials = max(0, min(wanted, rounds - 2))
        return cls((rounds - trials) // 2 if trials else 0, trials)

    def trial(self, round_number: int) -> int | None:
        """What is tried in a round; None in others."""
        return round_number - self.first if self.first <= round_number < self.end else None

    @property
    def end(self) -> int:
        """The first round after the trials."""
        return self.first + self.trials


@dataclass(frozen=True)
class Verdict:
    """What was chosen of some candidates: its number, and what it is better than the first by, with its error."""

    chosen: int
    better: float
    error: float
    users: int

    def words(self, candidates: int) -> str:
        """The same for a reader."""
        if not self.users:
            return "the default, as nobody holds anything back"
        if not self.chosen:
            return f"the default ({self.users:,} users find no other of {candidates} surely better)"
        by = f"{self.better:+.4f} ± {self.error:.4f} NDCG on what {self.users:,} users hold back"
        return f"the best of {candidates} ({by})"


def verdict(tally: Tensor, candidates: list[int], errors: float) -> Verdict:
    """By sums of judgements, [trials, 4]; the first candidate where no other is better by some errors and more."""
    best = Verdict(0, 0.0, 0.0, int(tally[candidates[0], 0]))
    for place, trial in enumerate(candidates[1:], 1):
        users, _, better, squares = tally[trial].tolist()
        if users < 2:
            continue
        mean = better / users
        error = sqrt(max(squares / users - mean**2, 0.0) / (users - 1))
        if mean > max(errors * (1 + DOUBT / users) * error, best.better):
            best = Verdict(place, mean, error, int(users))
    return best


@dataclass(frozen=True)
class Trials:
    """What is tried for every size, and when: shapes first, made as settings say, then makings of the default shape.

    Attributes:
        budgets: Bytes of every size.
        shapes: For every size, the default first.
        columns: Of the server's table.
        schedule: Of the rounds.
        cuts: What devices hold in every shape: sizes that hold the same judge the same.
    """

    budgets: list[int]
    shapes: list[list[Shape]]
    columns: int
    schedule: Schedule
    cuts: list[list[Cut | None]]

    @classmethod
    def of(cls, budgets: list[int], held: PairArchitecture, rounds: int) -> "Trials":
        """For the tables of a model."""
        known = held.head, held.columns, held.known_users, held.neighbours, held.whole
        shapes = [shapes_for(budget, *known) for budget in budgets]
        schedule, listed = Schedule.of(rounds, max(map(len, shapes)) + len(MAKINGS) - 1), held.dense[LISTED][0]

        def held_of(budget: int, shape: Shape) -> Cut | None:
            cut = cut_to(budget, held.head, held.columns, shape)
            return cut and replace(cut, pairs=min(cut.pairs, listed))

        cuts = [[held_of(budget, one) for one in tried] for budget, tried in zip(budgets, shapes, strict=True)]
        return cls(budgets, shapes, held.columns, schedule, cuts)

    @property
    def _makings(self) -> list[int]:
        """The trials of makings; of the settings' own that is the first of all."""
        first = max(map(len, self.shapes))
        return [0, *range(first, first + len(MAKINGS) - 1)]

    @property
    def _many(self) -> int:
        """All that could be tried, however many rounds there are for it."""
        return max(map(len, self.shapes)) + len(MAKINGS) - 1

    def asked(self, round_number: int, users: int) -> Tensor:
        """What devices are asked in a round: which share of a history to say, which trial, and which share judges."""
        part = 1 - HELD_BACK if round_number < self.schedule.first else 1.0
        return torch.tensor([part, self.schedule.trial(round_number) or 0, min(1.0, JUDGES / max(users, 1))])

    def note(self, tallies: Weights, round_number: int, size: int, told: Tensor) -> None:
        """Add what was told in a round to the sums of a size."""
        trial = self.schedule.trial(round_number)
        if trial is not None:
            before = tallies.get(str(size), torch.zeros(self._many * TOLD, dtype=torch.float64))
            tally = before.view(-1, TOLD).clone()
            tally[trial] += told.double()
            tallies[str(size)] = tally.view(-1)

    def verdicts(self, tallies: Mapping[str, Tensor]) -> tuple[list[Verdict], Verdict]:
        """Which shape serves every size best, and which making all of them."""
        found = torch.zeros(len(self.shapes), self._many, TOLD, dtype=torch.float64)
        for size, tally in tallies.items():
            found[int(size)] += tally.view(-1, TOLD)
        shapes = [verdict(self._alike(found, mine), list(range(len(mine))), SURE) for mine in self.cuts]
        return shapes, verdict(found.sum(0), self._makings, SURER)

    def _alike(self, found: Tensor, mine: list[Cut | None]) -> Tensor:
        """What was told of some models, by all sizes that hold the same one first, and the same one on trial."""
        sums = torch.zeros(len(mine), TOLD, dtype=torch.float64)
        for told, cuts in zip(found, self.cuts, strict=True):
            for place, cut in enumerate(cuts if cuts[0] == mine[0] else []):
                if cut in mine:
                    sums[mine.index(cut)] += told[place]
        return sums

    def settled(self, round_number: int, tallies: Mapping[str, Tensor]) -> dict[int, Shape]:
        """What devices of every budget hold in a round: what is on trial, or was chosen."""
        places = [self.schedule.trial(round_number) or 0] * len(self.shapes)
        if round_number >= self.schedule.end:
            places = [found.chosen for found in self.verdicts(tallies)[0]]
        found = zip(self.budgets, self.shapes, places, strict=True)
        return {budget: tried[place if place < len(tried) else 0] for budget, tried, place in found}

    def wanted(self, round_number: int, tallies: Mapping[str, Tensor]) -> tuple[Making, int]:
        """How the model is made that a round is about, and its columns; without neighbours where nobody holds any."""
        trial, place, shapes = self.schedule.trial(round_number), 0, [one for tried in self.shapes for one in tried]
        if trial in self._makings[1:]:  # in the default shape alone
            place, shapes = self._makings.index(trial), [tried[0] for tried in self.shapes]
        elif trial is None and round_number >= self.schedule.end:
            place, shapes = self.verdicts(tallies)[1].chosen, list(self.settled(round_number, tallies).values())
        making = MAKINGS[place] if any(shape.near for shape in shapes) else MAKINGS[place]._replace(near=0.0)
        return making, min(self.columns, max(shape.columns for shape in shapes))

    def words(
        self, round_number: int, tallies: Mapping[str, Tensor], made: str, names: list[str], held: Sequence[Held]
    ) -> list[str]:
        """What was chosen, for a reader; nothing before the end of the trials. Where nothing can be: that."""
        if held[0][ROWS].shape[0] < 2:
            return [
                "No two items have enough support to be correlated: everybody is served in the order of popularity."
            ]
        if round_number < self.schedule.end or not self.schedule.trials:
            return []
        shapes, found = self.verdicts(tallies)
        told = [f"{made}: {found.words(len(MAKINGS))}."]
        for name, mine, tried, one in zip(names, held, self.shapes, shapes, strict=True):
            rows, lists = mine[ROWS].facts(), {LISTED: "pairs", NEAR: "neighbours"}
            beside = [(mine[of].facts()["kept"][0], word) for of, word in lists.items() if of in mine]
            many, wide = rows["kept"][0], rows["kept"][1] - FACTORS
            what = f"{many:,} of {mine[ROWS].shape[0]:,} rows, "
            what += f"{wide} columns of {rows['bits']} bits" if wide else "no columns"
            what += "".join(f", {many:,} {word}" for many, word in beside if many)
            told.append(f"{name}: {what}, {one.words(len(tried))}.")
        return told


def within(told: Tensor, most: float) -> bool:
    """Whether so many users can have told that."""
    users, quality, better, squares = told.tolist()
    return bool(0 <= users <= most and 0 <= quality <= most and abs(better) <= most and 0 <= squares <= most)


def mixed(values: Tensor) -> Tensor:
    """Whole numbers scattered over 32 bits."""
    found = values & 0xFFFFFFFF
    for _ in range(2):
        found = ((found >> 16 ^ found) * 0x45D9F3B) & 0xFFFFFFFF
    return found >> 16 ^ found


def said_first(items: Tensor, lengths: Tensor) -> Tensor:
    """Which items of some histories, one after another, are said before the trials: all but those held back.

    Which ones these are follows from the history alone, so that it need not be remembered.
    """
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, user, items)
    chance = mixed(items * 2_654_435_761 + mixed(sums)[user])
    order = (user * 2**32 + chance).argsort(stable=True)
    nth = torch.arange(len(items)) - (lengths.cumsum(0) - lengths)[user]
    wanted = torch.where(lengths >= SHORTEST, (lengths * HELD_BACK).round().clamp(min=1), 0)
    first = torch.ones(len(items), dtype=torch.bool)
    first[order] = nth >= wanted[user]
    return first


def judged(
    served: Served,
    items: Tensor,
    lengths: Tensor,
    said: Tensor,
    before: Tensor,
    *,
    first: bool,
    share: float,
    asked: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The sum of what some users tell of a model, and what they keep: 1 + their quality under the first one.

    Args:
        served: The model.
        items: Of all users' histories, one after another.
        lengths: Of the histories.
        said: Which of the items the sum of pairs holds.
        before: What users kept, [users, 1]; 0 of who has not tried the first, and has nothing to compare with.
        first: Whether this is the first model.
        share: Of the users that judge; which ones follows from their histories.
        asked: The size of the catalogue, and how many ranks count.
    """
    user = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, user, items)
    many = torch.bincount(user[said], minlength=len(lengths))
    able = (many > 0) & (many < lengths) & (mixed(sums * 7 + lengths) < share * 2**32)
    if not first:
        able &= before[:, 0] > 0
    after, mine = before.clone(), able[user]
    if not bool(able.any()):
        return torch.zeros(TOLD, dtype=torch.float64), after
    given = torch.split(items[mine & said], many[able].tolist())
    held = torch.split(items[mine & ~said], (lengths - many)[able].tolist())
    quality = served.judged(list(given), list(held), *asked)
    if first:
        after[able, 0] = 1 + quality.to(after.dtype)
    better = torch.zeros_like(quality) if first else quality - (before[able, 0].double() - 1)
    told = torch.stack([torch.ones_like(quality), quality, better, better**2])
    return (told * UNIT).round().sum(1) / UNIT, after  # on the grid of the pairs, so that sums are exact
