"""The rows behind :mod:`fairfold.algorithms.ratings`: users solved from their ratings, windows, what devices say."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fairfold.algorithms.least_squares import rows_of
from fairfold.subspace import Subspace
from fairfold.values import Weights

CAUTION = 1.5
"""K before anybody spoke: rows settle where no direction has more than twice K in the codes of an item's raters."""
USER_RIDGE = 1.0
"""Draws users' tastes to 0. Only its product with the items' ridge matters to what is learned, so it is no setting."""
BLOCK_RATINGS = 1 << 16
"""Ratings whose outer products are in memory at a time."""


class Window:
    """The rows that devices of a size speak of in a round: of the largest devices' table, or of the server's."""

    def __init__(self, largest: Subspace, subspace: Subspace, round_number: int, factors: int) -> None:
        self._largest, self._factors = largest, factors
        self._all, self._some = largest.size // factors, subspace.size // factors
        self._start = round_number * self._some % self._all

    @property
    def rows(self) -> Tensor:
        """Which rows these are, in the order in which they are sent."""
        return (self._start + torch.arange(self._some)) % self._all

    def places(self, items: Tensor) -> Tensor:
        """Where in the window each item's row is; −1 outside."""
        place = (rows_of(self._largest, items, self._factors) - self._start) % self._all
        return torch.where(place < self._some, place, -1)

    def sums(self, place: Tensor, said: Tensor) -> Tensor:
        """What is said of the window's rows, flat."""
        inside = place >= 0
        total = torch.zeros(self._some, self._factors, dtype=said.dtype)
        return total.index_add_(0, place[inside], said[inside]).view(-1)


@dataclass(frozen=True)
class Spoken:
    """What some users say of the rows in a window.

    Of every rating: the ``place`` of its item in the window (−1 outside), its ``owner``, how much what is said of its
    row has ``moved``, and whether it is new. Of the users: their private rows, now and ``before``, and what they keep
    of their ratings where the server takes the word.
    """

    window: Window
    place: Tensor
    owner: Tensor
    moved: Tensor
    users: Tensor
    before: Tensor
    kept: Weights

    @property
    def sizes(self) -> Tensor:
        """How many ratings each user has."""
        return torch.bincount(self.owner, minlength=len(self.users))

    def bounds(self) -> Tensor:
        """What no number of a user's answer exceeds."""
        rows = torch.zeros(len(self.users), self.moved.shape[1], dtype=self.moved.dtype)
        rows.index_add_(0, self.owner, self.moved.abs())
        code = torch.maximum(code_of(self.users).abs().amax(1), code_of(self.before).abs().amax(1))
        return torch.maximum(rows.amax(1), 2 * self.sizes * code.square())


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


def codes(own: Tensor, ratings: Tensor) -> Tensor:
    """Σ c·cᵀ over the ratings of users with these private rows, flat; who has not taken part yet has none."""
    code = code_of(own) * (own != 0).any(1)[:, None]
    return (code.T @ (code * ratings.to(own.dtype)[:, None])).view(-1)


def mean_code(total: Tensor, factors: int) -> Tensor:
    """K, from Σ c·cᵀ: as c begins with 1, its first number counts the ratings."""
    matrix = total.view(factors, factors)
    return matrix / matrix[0, 0] if matrix[0, 0] > 0 else CAUTION * torch.eye(factors, dtype=total.dtype)


def solve_raters(rows: Tensor, targets: Tensor, owner: Tensor, users: int, damping: float) -> Tensor:
    """The private rows of so many users, [users, factors], from their own ratings alone.

    Every rating has the row of its item, [ratings, factors], a centred target, and an owner.
    """
    inputs = code_of(rows)
    left, size = targets - rows[:, 0], inputs.shape[1]
    matrix = torch.zeros(users, size * size, dtype=inputs.dtype)
    for part in torch.split(torch.arange(len(inputs)), BLOCK_RATINGS):
        outer = inputs[part][:, :, None] * inputs[part][:, None]
        matrix.index_add_(0, owner[part], outer.view(-1, size * size))
    sums = torch.zeros(users, size, dtype=inputs.dtype).index_add_(0, owner, inputs * left[:, None])
    pull = torch.diag(pull_of(size, damping, USER_RIDGE, inputs.dtype))
    solution: Tensor = torch.linalg.solve(matrix.view(-1, size, size) + pull, sums)
    return solution


def code_of(rows: Tensor) -> Tensor:
    """(1, u) from a row (b, u)."""
    return torch.cat([torch.ones_like(rows[:, :1]), rows[:, 1:]], dim=1)


def centred(ratings: Tensor, centre: Tensor) -> Tensor:
    """Ratings less their mean over everybody, in units of their spread."""
    return (ratings - centre[0]) / centre[1]


def predicted(mine: Tensor, theirs: Tensor, centre: Tensor) -> Tensor:
    """Ratings from the rows of users and of items: bᵤ + bᵢ + u·vᵢ, in units of the spread, and the mean of all."""
    scores = mine[..., 0] + theirs[..., 0] + (mine[..., 1:] * theirs[..., 1:]).sum(-1)
    return centre[0] + centre[1] * scores


def pull_of(size: int, damping: float, ridge: float, dtype: torch.dtype) -> Tensor:
    """What draws a row to zero: its bias, which comes first, and its tastes."""
    found = torch.full((size,), float(ridge), dtype=dtype)
    found[0] = damping
    return found


def solved_rows(sums: Tensor, spoken: Tensor, sharing: Tensor, mean: Tensor, pull: Tensor) -> Tensor:
    """Rows w of (n·K + k·pull) w = sums, for all n and k from one decomposition."""
    root = pull.double().sqrt()
    values, vectors = torch.linalg.eigh(mean.double() / torch.outer(root, root))
    scale = spoken.double()[:, None] * values.clamp(min=0) + sharing.double()
    solution: Tensor = ((sums / root) @ vectors / scale) @ vectors.T / root
    return solution.to(sums.dtype)


def alike_places(chain: Sequence[Subspace], factors: int, means: Tensor) -> Tensor:
    """The number of every item, so that items which share a row have similar means."""
    place = torch.arange(len(means))
    for start, stop in pairwise(sorted({0, len(means), *(subspace.head // factors for subspace in chain)})):
        here = torch.arange(start, stop)
        row = rows_of(chain[0], here, factors)  # equal tails: what the smallest size folds, all fold alike
        place[here[means[here].argsort(stable=True)]] = here[row.argsort(stable=True)]
    return place
