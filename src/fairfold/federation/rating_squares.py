"""Federated least squares for ratings: biases and tastes, from sums that remember.

A rating is modelled as m + bᵤ + bᵢ + u·vᵢ. A row of the item table is w = (bᵢ, vᵢ), a user's private row (bᵤ, u). With
c = (1, u) a user's *code*, the exact rows solve Σ (r − m − bᵤ − c·w) c = ridge·w over an item's raters: a d × d matrix
for every item, far more than a row. Sums of rows suffice all the same. With C the mean of c cᵀ over ratings, which the
server sends, a device adds for each of its items

    e·c + C·w,   e being the error that is left,

and the server divides by (n·C + ridge), n being how many spoke. Where nothing moves any more that *is* the equation
above, so the end is exact; and as c cᵀ is C in the mean, what a device said about old rows hardly ages. So there is no
step size here either, whoever is drawn. A device keeps what it last said of its own items, and sends the change.

That sum hardly depends on w, so a device need not own an item's row to speak of it. It receives its own compact table,
and speaks in the rows of the *largest* devices, as many a round as its own table has: a window that moves on from round
to round, the same for all devices of a size, so that a secure sum can take it. Every row is known to all in turn.

The server knows how many ratings an item has from the count that ranks the catalogue, and how many of all ratings have
been spoken of from one more sum: n is the former times the share of the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.federation.aggregate import ServerState
from fairfold.federation.least_squares import SizeTotals, row_counts, rows_of, subspace_of
from fairfold.federation.projection import Assignment, Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import CENTRE, GRAM, SAID, Task, Weights
from fairfold.federation.train import Device, Trained
from fairfold.metrics.rating import Predictor
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested

BLOCK_RATINGS = 1 << 16
"""Ratings whose outer products are in memory at a time."""


def rating_squares(received: Weights, device: Device, settings: Settings) -> Trained:
    """Solve the user's bias and vector; send what that changes in what the device says of its items."""
    (name,), (own_name,) = device.task.tables, device.task.own
    subspace, factors, compact = subspace_of(device.projections[name]), settings.factors, received[name]
    train = device.task.data.train
    mine, ratings = train.of(device.client), train.ratings_of(device.client).to(compact.dtype)
    rows = subspace.recover_rows(compact, mine, factors)
    assert device.largest is not None
    window = Window(subspace_of(device.largest[name]), subspace, device.round_number, factors)
    speech = Speech(
        rows, ratings - received[CENTRE][0], torch.zeros_like(mine), device.own[SAID].to(compact.dtype),
        device.own[own_name].to(compact.dtype)[None],
    )  # fmt: skip
    changes, said, user = speech.changes(window, window.places(mine), received[GRAM], settings)
    compacts = {key: received[key] + change for key, change in zip((name, GRAM, CENTRE), changes, strict=True)}
    return Trained(compacts, {own_name: user[0], SAID: said})


@dataclass(frozen=True)
class Speech:
    """What some users have to go by.

    Attributes:
        rows: Of the item of every rating, [ratings, factors].
        targets: Ratings less their mean over everybody.
        owner: Which user each rating is of.
        last: What was last said of each: a row, whether it was said, whether the user took part.
        before: The users' private rows.
    """

    rows: Tensor
    targets: Tensor
    owner: Tensor
    last: Tensor
    before: Tensor

    def changes(
        self, window: "Window", place: Tensor, code_matrix: Tensor, settings: Settings
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        """Changes of the window's rows, of Σ c cᵀ and of what is counted; what is said now; the users' rows now."""
        users, factors = len(self.before), self.rows.shape[1]
        own = solve_raters(self.rows, self.targets, self.owner, users, settings)
        code = code_of(own)[self.owner]
        errors = self.targets - own[self.owner, 0] - (code * self.rows).sum(1)
        ones = torch.ones_like(errors)[:, None]
        now = torch.cat([errors[:, None] * code + self.rows @ code_matrix.view(factors, factors), ones, ones], dim=1)
        now[:, :-1] = torch.where((place >= 0)[:, None], now[:, :-1], self.last[:, :-1])
        moved = now - self.last
        old = code_of(self.before)[self.owner] * self.last[:, -1:]
        counted = torch.stack([torch.zeros_like(moved[0, 0]), moved[:, -2].sum()]) if len(moved) else moved.new_zeros(2)
        outer = code.T @ code - old.T @ old
        return (window.sums(place, moved[:, :factors]), outer.reshape(-1), counted), now, own


class Window:
    """The rows of the largest devices' table that devices of a size speak of in a round."""

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


def solve_raters(rows: Tensor, targets: Tensor, owner: Tensor, users: int, settings: Settings) -> Tensor:
    """The private rows of users, [users, factors], from their own ratings alone."""
    inputs = torch.cat([torch.ones_like(rows[:, :1]), rows[:, 1:]], dim=1)
    left, size = targets - rows[:, 0], inputs.shape[1]
    matrix = torch.zeros(users, size * size, dtype=rows.dtype)
    for part in torch.split(torch.arange(len(rows)), BLOCK_RATINGS):
        outer = inputs[part][:, :, None] * inputs[part][:, None]
        matrix.index_add_(0, owner[part], outer.view(-1, size * size))
    sums = torch.zeros(users, size, dtype=rows.dtype).index_add_(0, owner, inputs * left[:, None])
    ridges = torch.diag(_ridges(size, settings, rows.dtype))
    solution: Tensor = torch.linalg.solve(matrix.view(users, size, size) + ridges, sums)
    return solution


def code_of(own: Tensor) -> Tensor:
    """Codes (1, u) from users' private rows (b, u)."""
    return torch.cat([torch.ones_like(own[:, :1]), own[:, 1:]], dim=1)


def _ridges(size: int, settings: Settings, dtype: torch.dtype) -> Tensor:
    """What draws a bias (the first number) and the tastes to zero."""
    found = torch.full((size,), float(settings.ridge), dtype=dtype)
    found[0] = settings.damping
    return found


@torch.no_grad()
def first_ratings(full: Weights, assignments: Sequence[Assignment], task: Task) -> Weights:
    """The server's tensors before the first round: tastes by chance, no biases, the mean of all ratings."""
    (name,), factors = task.tables, task.settings.factors
    held = [assignment.projections for assignment in assignments if assignment.projections is not None]
    largest = require_nested(subspace_of(projections[name]) for projections in held)[-1]
    compact = largest.reduce(full[name])
    compact.view(-1, factors)[:, 0] = 0
    matrix = torch.zeros(task.dense[GRAM], dtype=compact.dtype)
    matrix[0, 0] = 1
    assert task.data.train.ratings is not None
    mean = task.data.train.ratings.to(compact.dtype).mean()
    centre = torch.stack([mean, torch.zeros_like(mean)])
    return full | {name: largest.recover(compact), GRAM: matrix.view(-1), CENTRE: centre}


class RatingTotals(SizeTotals):
    """What the devices of a round changed, window by window."""

    def __init__(self, assignments: Sequence[Assignment], task: Task) -> None:
        super().__init__(assignments, task)
        self._counts = task.data.train.counts_by_item
        self._counted: Tensor | None = None

    def add(self, projections: dict[str, Projection], changes: Weights, weight: float) -> None:
        """Add what one device, or several of one size, changed."""
        super().add(projections, changes, weight)
        self._counted = changes[CENTRE] if self._counted is None else self._counted + changes[CENTRE]

    @torch.no_grad()
    def applied(self, state: ServerState, settings: Settings) -> ServerState:
        """The server's state after the round: its sums, and the rows that follow; what nobody spoke of is zero."""
        name, factors, number = self._name, settings.factors, state.round_number
        if self._counted is None:
            return replace(state, round_number=number + 1)
        largest = require_nested(self._subspaces)[-1]
        kept = state.moments.get("sums") or {
            name: torch.zeros(largest.size, dtype=state.full[name].dtype), GRAM: torch.zeros_like(state.full[GRAM])
        }  # fmt: skip
        sums, outer = kept[name].view(-1, factors).clone(), kept[GRAM].clone()
        for subspace, change in self._rows.items():
            sums.index_add_(0, Window(largest, subspace, number, factors).rows, change.view(-1, factors))
            outer += self._codes[subspace]
        centre, total = state.full[CENTRE] + self._counted, outer.view(factors, factors)
        matrix = total / total[0, 0].clamp(min=1)
        table = _divided(sums, matrix, self._behind(largest, factors) * centre[1], largest, settings)
        full = state.full | {name: largest.recover(table.view(-1)), GRAM: matrix.reshape(-1), CENTRE: centre}
        return ServerState(full, number + 1, {"sums": {name: sums.view(-1), GRAM: outer}})

    def _behind(self, largest: Subspace, factors: int) -> Tensor:
        """The share of all ratings that is behind each row."""
        row = rows_of(largest, torch.arange(len(self._counts)), factors)
        counts = torch.zeros(largest.size // factors, dtype=torch.float64).index_add_(0, row, self._counts.double())
        return (counts / counts.sum().clamp(min=1)).to(torch.get_default_dtype())


def _divided(sums: Tensor, matrix: Tensor, behind: Tensor, largest: Subspace, settings: Settings) -> Tensor:
    """Rows w from their sums s: (n·C + k·ridge) w = s, all at once by one decomposition.

    The ridge is one of the full table, so a row that k items share has it k times. Without that, a row of items with
    one rating each would believe what none of them can.
    """
    scale = _ridges(len(matrix), settings, matrix.dtype).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * matrix * scale)
    sharing = row_counts(largest, settings.factors).clamp(min=1).to(sums.dtype)
    inside = (sums * scale) @ vectors
    weights: Tensor = (inside / (behind[:, None] * values.clamp(min=0) + sharing[:, None])) @ vectors.T * scale
    return weights


def rating_predictor(full: Weights, task: Task, settings: Settings, histories: Interactions | None = None) -> Predictor:
    """Ratings of pairs from an item table alone: everybody's bias and vector follow from their own ratings.

    Args:
        full: The server's tensors, or those that a device's stand for.
        task: What they were trained for.
        settings: Of the run.
        histories: Of the users asked for, with ratings; those of the task if not given.
    """
    (name,) = task.tables
    table, centre = full[name].view(task.tables[name]), full[CENTRE][0]
    known = task.data.train if histories is None else histories
    assert known.ratings is not None
    own = solve_raters(
        table[known.items], known.ratings.to(table.dtype) - centre, known.users, known.num_users, settings
    )

    def predict(users: Tensor, items: Tensor) -> Tensor:
        return centre + own[users][..., 0] + (code_of(own)[users] * table[items]).sum(-1)

    return predict
