"""The rows behind :mod:`fairfold.algorithms.ratings`: users solved from their ratings, windows, what devices say."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fairfold.algorithms.remembering import rows_of
from fairfold.methods import Tensors
from fairfold.protocol.architecture import SPREAD, Architecture
from fairfold.protocol.storage import Storage
from fairfold.subspace import Subspace
from fairfold.values import Weights

ROWS = "item.weight"
"""Name of the table, with rows (bᵢ, vᵢ, n)."""
USERS = "users"
"""Name of the sums over users, and of what a device last said there."""
NOISE, BIAS = 0.75, 0.2
"""Variances before anybody spoke; those of items' tastes are as they are drawn, of users' tastes always 1."""

BLOCK_RATINGS = 1 << 16
"""Ratings whose outer products are in memory at a time."""
STEADY = 0.5
"""Of the sum of squared codes: with so much of it for a matrix, no item's step is ever too long."""
HASTE = 0.2
"""How much of its quick way the variance of a taste goes."""
WITHIN = (1e-3, 1.0)
"""Of items' variances, where that of all ratings and of users' tastes is 1: none explains more than there is, and a
taste that is next to nothing may still grow."""
LEAST = 1e-6
"""No other variance is smaller."""


class Window:
    """The rows that devices of a size speak of in a round: of the largest devices' table, or of the server's.

    Attributes:
        size: How many rows these are.
    """

    def __init__(self, largest: Subspace, subspace: Subspace, round_number: int, factors: int) -> None:
        self._largest, self._factors = largest, factors
        self._all, self.size = largest.size // factors, subspace.size // factors
        self._start = round_number * self.size % self._all

    @property
    def rows(self) -> Tensor:
        """Which rows these are, in the order in which they are sent."""
        return (self._start + torch.arange(self.size)) % self._all

    def places(self, items: Tensor) -> Tensor:
        """Where in the window each item's row is; −1 outside."""
        place = (rows_of(self._largest, items, self._factors) - self._start) % self._all
        return torch.where(place < self.size, place, -1)

    def sums(self, place: Tensor, said: Tensor) -> Tensor:
        """What is said of the window's rows, flat."""
        inside = place >= 0
        total = torch.zeros(self.size, self._factors, dtype=said.dtype)
        return total.index_add_(0, place[inside], said[inside]).view(-1)


@dataclass(frozen=True)
class Beliefs:
    """What all know beside the rows, with d = 1 + tastes.

    Attributes:
        centre: Mean and spread of all ratings, and σ², the noise of a rating in units of the spread.
        metric: K, the mean of c·cᵀ over all ratings, [d, d].
        spreads: Variances of users' and of items' rows around what is expected of them, [2, d].
        leaning: A, what is expected of a user by their facts, [d, d + 2].
    """

    centre: Tensor
    metric: Tensor
    spreads: Tensor
    leaning: Tensor

    @classmethod
    def of(cls, vectors: Weights) -> "Beliefs":
        """From vectors, flat, under the names of the fields."""
        size = vectors["spreads"].numel() // 2
        shapes = {"centre": (3,), "metric": (size, size), "spreads": (2, size), "leaning": (size, size + 2)}
        return cls(**{name: vectors[name].view(shape) for name, shape in shapes.items()})

    def flat(self, dtype: torch.dtype) -> Weights:
        """The same the other way round."""
        return {name: of.to(dtype).reshape(-1) for name, of in vars(self).items()}

    @property
    def pull(self) -> Tensor:
        """What draws users and items to what is expected of them, in ratings, [2, d]."""
        return self.centre[2] / self.spreads

    @property
    def axes(self) -> tuple[Tensor, Tensor]:
        """T and λ, by which the doubt about an item of n ratings, σ²(nK + pull)⁻¹, is T diag(1/(nλ + 1)) Tᵀ."""
        root = self.spreads[1].double().sqrt()
        values, vectors = torch.linalg.eigh(root[:, None] * self.metric.double() * root / self.centre[2].double())
        return root[:, None] * vectors, values.clamp(min=0)

    def centred(self, ratings: Tensor) -> Tensor:
        """Ratings less their mean over everybody, in units of their spread."""
        return (ratings.to(self.centre.dtype) - self.centre[0]) / self.centre[1]

    def predicted(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """Ratings from the rows of users and of items: bᵤ + bᵢ + u·vᵢ, and the mean of all."""
        scores = mine[..., 0] + (code_of(mine) * theirs[..., : mine.shape[-1]]).sum(-1)
        return self.centre[0] + self.centre[1] * scores


class RatingArchitecture(Architecture):
    """A table of items, what all believe beside it, and of a user what was last said."""

    def __init__(self, items: int, users: int, factors: int) -> None:
        self.items, self.users, size = items, users, factors - 1
        self.tables = {ROWS: (items, factors)}
        self.dense = {"centre": (3,), "metric": (size, size), "spreads": (2, size), "leaning": (size, size + 2)}
        self.user_tables, self.own = {}, {USERS: sums_size(size)}

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Tastes by chance, no biases, and what is believed without any data."""
        size = self.tables[ROWS][1] - 1
        rows = SPREAD * torch.randn(self.tables[ROWS], generator=generator)
        rows[:, 0] = rows[:, -1] = 0
        spreads = torch.tensor([1.0, SPREAD**2])[:, None].repeat(1, size)
        spreads[:, 0] = BIAS
        known = Beliefs(torch.tensor([0.0, 1.0, NOISE]), torch.eye(size), spreads, torch.zeros(size, size + 2))
        return {ROWS: rows.view(-1)} | known.flat(rows.dtype), {USERS: torch.zeros(self.users, self.own[USERS])}

    @property
    def tensors(self) -> Tensors:
        """See the base class."""
        return Tensors(self.tables, self.dense, whole_rows=True)


@dataclass(frozen=True)
class Raters:
    """What some users' own ratings say of them.

    Attributes:
        rows: (bᵤ, u), [users, d].
        doubts: Their covariances, [users, d, d].
        facts: What their rows are expected from: 1, log of how many ratings, the mean row of their items.
        items: Sums of the doubts about their items, [users, d, d].
        counts: How many ratings each has.
    """

    rows: Tensor
    doubts: Tensor
    facts: Tensor
    items: Tensor
    counts: Tensor

    @classmethod
    def solved(cls, table: Tensor, targets: Tensor, owner: Tensor, users: int, known: Beliefs) -> "Raters":
        """Every rating has the row of its item, (bᵢ, vᵢ, n), a centred target, and an owner."""
        theirs, inputs = table[:, :-1], code_of(table[:, :-1])
        size, dtype = inputs.shape[1], inputs.dtype
        matrix = torch.zeros(users, size * size, dtype=dtype)
        for part in torch.split(torch.arange(len(inputs)), BLOCK_RATINGS):
            outer = inputs[part][:, :, None] * inputs[part][:, None]
            matrix.index_add_(0, owner[part], outer.view(-1, size * size))

        def summed(of: Tensor) -> Tensor:
            return torch.zeros(users, of.shape[1], dtype=dtype).index_add_(0, owner, of)

        axes, values = (of.to(dtype) for of in known.axes)
        items = axes * summed(1 / (table[:, -1:].clamp(min=0) * values + 1))[:, None] @ axes.T
        counts = torch.bincount(owner, minlength=users)
        many = counts.clamp(min=1).to(dtype)[:, None]
        facts = torch.cat([torch.ones_like(many), many.log(), summed(theirs) / many], dim=1)
        pull = known.pull[0]
        sums = summed(inputs * (targets - theirs[:, 0])[:, None]) - tastes_of(items[:, 0])
        inverse = torch.linalg.inv(matrix.view(-1, size, size) + tastes_of(tastes_of(items).mT) + torch.diag(pull))
        rows = (inverse @ (sums + pull * (facts @ known.leaning.T))[:, :, None])[:, :, 0]
        return cls(rows, known.centre[2] * inverse, facts, items, counts)

    def words(self, table: Tensor, targets: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """What is said of the row of every rating, [ratings, d + 1], and the squared errors to expect, by user."""
        theirs, code = table[:, :-1], code_of(self.rows)
        inputs, mine = code_of(theirs), code[owner]
        errors = targets - self.rows[owner, 0] - (mine * theirs).sum(1)
        doubts = torch.cat(
            [
                (self.doubts[owner[part]] @ inputs[part][:, :, None])[:, :, 0]
                for part in torch.split(torch.arange(len(owner)), BLOCK_RATINGS)
            ]
        )
        weights = self._codes().diagonal(dim1=1, dim2=2).sum(1)[owner, None]
        said = errors[:, None] * mine - tastes_of(doubts) + STEADY * weights * theirs
        squares = torch.zeros_like(code[:, 0]).index_add_(0, owner, errors.square() + (inputs * doubts).sum(1))
        return torch.cat([said, weights], dim=1), squares + (self._codes() * self.items).sum((1, 2))

    def sums(self, squares: Tensor) -> Tensor:
        """What is said of each user beside the rows, [users, numbers]; nothing of those without ratings."""
        all_of, size = torch.cat([self.rows, self.facts], dim=1), self.rows.shape[1]
        codes = self.counts[:, None, None] * self._codes()
        pairs = all_of[:, :, None] * all_of[:, None]
        pairs[:, :size, :size] += self.doubts
        found = torch.cat([codes.flatten(1), pairs.flatten(1), squares[:, None]], dim=1)
        return found * (self.counts > 0)[:, None]

    def _codes(self) -> Tensor:
        """What is expected of c·cᵀ: the first number of a code is certain."""
        code = code_of(self.rows)
        return code[:, :, None] * code[:, None] + tastes_of(tastes_of(self.doubts).mT)


def sums_size(size: int) -> int:
    """How many numbers :meth:`Raters.sums` has for each user."""
    return size**2 + (2 * size + 2) ** 2 + 1


def beliefs_from(sums: Tensor, before: Beliefs, rounding: Tensor | None = None) -> Beliefs:
    """What the sums over all users say; the spreads of items stay as they were.

    Args:
        sums: Over all users.
        before: What was believed.
        rounding: Steps to which the numbers of every user were rounded.
    """
    size = before.metric.shape[0]
    codes, pairs, squares = torch.split(sums, [size**2, (2 * size + 2) ** 2, 1])
    metric, pairs = codes.view(size, size), pairs.view(2 * size + 2, -1)
    ratings, many = metric[0, 0], pairs[size, size]
    facts, both = pairs[size:, size:], pairs[size:, :size]
    # One imagined user of the usual facts, who is as expected without them, keeps few users from explaining too much.
    ridge = facts.diagonal() / many + LEAST
    if rounding is not None:  # errors of half a step in everybody's numbers do not make the matrix indefinite
        steps = rounding[size**2 : -1].view(2 * size + 2, -1).diagonal()[size:]
        ridge = ridge + many * (size + 2) / 2 * steps
    leaning = torch.linalg.solve(facts + torch.diag(ridge), both).T
    around = pairs[:size, :size] - leaning @ both - (leaning @ both).T + leaning @ facts @ leaning.T
    users = torch.cat([(around[:1, 0] / many).clamp(min=LEAST), torch.ones(size - 1).double()])
    spreads = torch.stack([users, before.spreads[1].double()])
    noise = (squares / ratings).clamp(min=LEAST)
    return Beliefs(torch.cat([before.centre[:2].double(), noise]), metric / ratings, spreads, leaning)


def moved_to(rows: Tensor, before: Tensor, weights: Tensor, metric: Tensor) -> Tensor:
    """What words said of some rows lack to be about those ``before``, by the weights in their sums."""
    off = rows - before
    return weights[:, None] * (off @ metric / metric.trace() - STEADY * off)


def solved_items(sums: Tensor, sharing: Tensor, known: Beliefs, before: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (w, n) of (Σ + pull)·w = sums + pull·m, and the spreads of w around what is expected.

    Args:
        sums: Of the words on each row.
        sharing: How many items share it: its sums are taken as so many equal parts, as the ridge is one per item.
        known: What is believed.
        before: The rows w as they were, of which m is made.
    """
    sums = sums / sharing[:, None]
    pull, weights = known.pull[1], sums[:, -1:].clamp(min=0)
    counts = weights / known.metric.trace()
    weigh = sharing[:, None] * (weights > 0)  # rows nobody spoke of say nothing
    line = torch.cat([torch.ones_like(counts), counts.clamp(min=1).log()], dim=1)

    def expected(rows: Tensor) -> Tensor:
        """By popularity: a line over the log of the counts."""
        found: Tensor = (
            line @ torch.linalg.lstsq((weigh * line).T @ line, (weigh * line).T @ rows, driver="gelsd").solution
        )
        return found

    def mean(of: Tensor) -> Tensor:
        return (weigh * of).sum(0) / weigh.sum()

    rows = (sums[:, :-1] + pull * expected(before)) / (STEADY * weights + pull)
    axes, values = known.axes
    off, doubts = (rows - expected(rows)).square(), 1 / (counts * values + 1) @ axes.square().T
    # Two ways to the same end. The first hardly moves where few ratings leave a row to its prior; the second is quick,
    # but gives a taste up before it has grown. A bias is there from the start.
    slow, quick = mean(off + doubts), mean(off) / mean(1 - doubts / known.spreads[1]).clamp(min=LEAST)
    haste = torch.tensor([1.0] + [HASTE] * (len(slow) - 1))
    spreads = slow ** (1 - haste) * quick**haste
    return torch.cat([rows, counts], dim=1), spreads.clamp(*WITHIN)


@dataclass(frozen=True)
class Spoken:
    """What some users say of the rows in a window.

    Of every rating: the ``place`` of its item in the window (−1 outside), its ``owner``, how much what is said of its
    row has ``moved``. Of the users: how much the ``change`` of their other sums is, and what they keep of their ratings
    and for themselves where the server takes the word.
    """

    window: Window
    place: Tensor
    owner: Tensor
    moved: Tensor
    change: Tensor
    kept: Weights
    own: Weights

    def bounds(self) -> Tensor:
        """What no number of a user's answer exceeds."""
        rows = torch.zeros(len(self.change), self.moved.shape[1], dtype=self.moved.dtype)
        rows.index_add_(0, self.owner, self.moved.abs())
        return torch.maximum(rows.amax(1), self.change.abs().amax(1))


def caught(kept: Tensor, place: Tensor, passing: Tensor) -> Tensor:
    """The full rows of own items that a device has kept, with those that pass by now."""
    inside = place >= 0
    rows = passing.view(-1, kept.shape[1] - 1)[place[inside]]
    now = kept.clone()
    now[inside] = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return now


def known_rows(kept: Tensor, held: Tensor) -> Tensor:
    """What a device knows of its own items: the full row if it has passed by, else what its compact table says."""
    return torch.where(kept[:, -1:] > 0, kept[:, :-1], held)


def code_of(rows: Tensor) -> Tensor:
    """(1, u) from a row (b, u)."""
    return torch.cat([torch.ones_like(rows[..., :1]), rows[..., 1:]], dim=-1)


def tastes_of(rows: Tensor) -> Tensor:
    """(0, u) from (b, u), or matrices without their first row."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, 1:]], dim=1)


def alike_places(chain: Sequence[Subspace], factors: int, means: Tensor) -> Tensor:
    """The number of every item, so that items which share a row have similar means."""
    place = torch.arange(len(means))
    for start, stop in pairwise(sorted({0, len(means), *(subspace.head // factors for subspace in chain)})):
        here = torch.arange(start, stop)
        row = rows_of(chain[0], here, factors)  # equal tails: what the smallest size folds, all fold alike
        place[here[means[here].argsort(stable=True)]] = here[row.argsort(stable=True)]
    return place
