"""Federated least squares for ratings: biases and tastes, from sums that remember.

A rating, less the mean of all and in units of their spread, is modelled as bᵤ + bᵢ + u·vᵢ. A row of the item table is
w = (bᵢ, vᵢ), a user's private row (bᵤ, u). Given w, a user's row follows from their own ratings alone. With c = (1, u)
a user's *code* and e the error that is left, an item's row solves Σ e·c = ridge·w over its raters. That takes a d × d
matrix for every item, far more than a row; but sums of rows suffice. A device adds, for each of its items,

    e·c + K·w

and the server solves (n·K + ridge)·w = Σ, n being how many spoke. Where nothing moves any more that *is* the equation
above, whatever K, so the end is exact. K is the mean of c·cᵀ over all ratings, one d × d matrix, from one more sum over
devices: then e·c + K·w is about (e + c·w)·c, what the ratings say whatever the row was, and what was said of an old row
hardly ages. So there is no step size here either, whoever is drawn. A device keeps what it last said of its own items,
and sends the change.

As the sum hardly depends on w, a device need not own an item's row to speak of it. It receives its own compact table,
and speaks in the rows of the *largest* devices, as many a round as its own table has: a window that moves on from round
to round, the same for all devices of a size, so that a secure sum can take it. Every row is known to all in turn.

Where rows are ``streamed`` that goes one step further. Devices speak in the rows of the *full* table, and those rows
pass by them as well: a device keeps the rows of its own items, beside what it said of them, and forgets the others. Its
user's row is then solved from full rows, as old as the last time they passed, and from its compact table where none has
yet. So the server's model is no longer bounded by what the largest device holds; what each device holds still is.

The server knows how many ratings an item has from the count that ranks the catalogue, and how many of all ratings have
been spoken of from one more sum: n is the former times the share of the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregate import ServerState
from fairfold.federation.least_squares import row_counts, rows_of, subspace_of
from fairfold.federation.projection import Assignment, Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import CAUGHT, CENTRE, GRAM, SAID, Task, Weights
from fairfold.federation.train import Device, Trained
from fairfold.metrics.rating import Predictor
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested

CAUTION = 1.5
"""K before anybody spoke: rows settle where no direction has more than twice K in the codes of an item's raters."""
USER_RIDGE = 1.0
"""Draws users' tastes to 0. Only its product with the items' ridge matters to what is learned, so it is no setting."""
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
    window = Window(subspace_of(device.largest[name]), subspace, device.round_number, settings)
    place, kept = window.places(mine), dict[str, Tensor]()
    if device.passing is not None:
        kept[CAUGHT] = caught(device.own[CAUGHT].to(compact.dtype), place, device.passing)
        rows = known_rows(kept[CAUGHT], rows)
    spoken = speak(
        Ratings(rows, centred(ratings, received[CENTRE]), torch.zeros_like(mine), 1),
        device.own[SAID].to(compact.dtype), window, place, received[GRAM], settings,
    )  # fmt: skip
    outer = codes(spoken.users, [len(mine)]) - codes(device.own[own_name][None].to(compact.dtype), [len(mine)])
    changes = {name: spoken.change, CENTRE: spoken.counted, GRAM: outer}
    return Trained(changes, kept | {own_name: spoken.users[0], SAID: spoken.said})


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


def passing_rows(full: Weights, projections: dict[str, Projection], number: int, task: Task) -> Tensor | None:
    """The rows of the server's table that pass by devices of a size in a round; None where none do."""
    if not (task.ratings and task.settings.streamed):
        return None
    (name,), subspace = task.tables, subspace_of(projections[next(iter(task.tables))])
    window = Window(subspace, subspace, number, task.settings)
    return full[name].view(task.tables[name])[window.rows].view(-1)


@dataclass(frozen=True)
class Ratings:
    """Ratings of some users.

    Attributes:
        rows: Of the item of every rating, [ratings, factors].
        targets: The ratings, centred.
        owner: Which user each is of.
        users: How many users.
    """

    rows: Tensor
    targets: Tensor
    owner: Tensor
    users: int


@dataclass(frozen=True)
class Spoken:
    """What some users say.

    Attributes:
        change: Of the window's rows.
        counted: Of what is counted.
        said: Of every rating the row said of it, and whether any was.
        users: Their private rows.
    """

    change: Tensor
    counted: Tensor
    said: Tensor
    users: Tensor


def codes(own: Tensor, ratings: Sequence[int]) -> Tensor:
    """Σ c·cᵀ over the ratings of users with these private rows, flat; who has not taken part yet has none."""
    code = code_of(own) * (own != 0).any(1)[:, None]
    return (code.T @ (code * torch.tensor(ratings, dtype=own.dtype)[:, None])).view(-1)


def mean_code(total: Tensor, factors: int) -> Tensor:
    """K, from Σ c·cᵀ: as c begins with 1, its first number counts the ratings."""
    matrix = total.view(factors, factors)
    return matrix / matrix[0, 0] if matrix[0, 0] > 0 else CAUTION * torch.eye(factors, dtype=total.dtype)


def speak(given: Ratings, last: Tensor, window: "Window", place: Tensor, gram: Tensor, settings: Settings) -> Spoken:
    """What users say of their items in a window, given what they said last and Σ c·cᵀ of all ratings."""
    own = solve_raters(given, settings)
    code = code_of(own)[given.owner]
    errors = given.targets - own[given.owner, 0] - (code * given.rows).sum(1)
    as_it_is = given.rows @ mean_code(gram, settings.factors)
    now = torch.cat([errors[:, None] * code + as_it_is, torch.ones_like(errors)[:, None]], dim=1)
    said = torch.where((place >= 0)[:, None], now, last)
    moved = said - last
    none = torch.zeros(2, dtype=moved.dtype)
    return Spoken(window.sums(place, moved[:, :-1]), torch.cat([none, moved[:, -1].sum()[None]]), said, own)


def spoken_space(largest: Subspace, settings: Settings) -> Subspace:
    """In whose rows devices speak: the largest devices', or those of the full table where these stream by."""
    return Subspace(largest.full_size, largest.full_size) if settings.streamed else largest


class Window:
    """The rows that devices of a size speak of in a round: of the largest devices' table, or of the server's."""

    def __init__(self, largest: Subspace, subspace: Subspace, round_number: int, settings: Settings) -> None:
        self._largest, self._factors = spoken_space(largest, settings), settings.factors
        self._all, self._some = self._largest.size // self._factors, subspace.size // self._factors
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


def solve_raters(given: Ratings, settings: Settings) -> Tensor:
    """The private rows of users, [users, factors], from their own ratings alone."""
    inputs = code_of(given.rows)
    left, size = given.targets - given.rows[:, 0], inputs.shape[1]
    matrix = torch.zeros(given.users, size * size, dtype=inputs.dtype)
    for part in torch.split(torch.arange(len(inputs)), BLOCK_RATINGS):
        outer = inputs[part][:, :, None] * inputs[part][:, None]
        matrix.index_add_(0, given.owner[part], outer.view(-1, size * size))
    sums = torch.zeros(given.users, size, dtype=inputs.dtype).index_add_(0, given.owner, inputs * left[:, None])
    pull = torch.diag(_pull(size, settings.damping, USER_RIDGE, inputs.dtype))
    solution: Tensor = torch.linalg.solve(matrix.view(-1, size, size) + pull, sums)
    return solution


def code_of(rows: Tensor) -> Tensor:
    """(1, u) from a row (b, u)."""
    return torch.cat([torch.ones_like(rows[:, :1]), rows[:, 1:]], dim=1)


def centred(ratings: Tensor, centre: Tensor) -> Tensor:
    """Ratings less their mean over everybody, in units of their spread."""
    return (ratings - centre[0]) / centre[1]


def _pull(size: int, damping: float, ridge: float, dtype: torch.dtype) -> Tensor:
    """What draws a row to zero: its bias, which comes first, and its tastes."""
    found = torch.full((size,), float(ridge), dtype=dtype)
    found[0] = damping
    return found


@torch.no_grad()
def first_ratings(full: Weights, assignments: Sequence[Assignment], task: Task) -> Weights:
    """The server's tensors before the first round: tastes by chance, no biases, mean and spread of all ratings."""
    (name,), factors = task.tables, task.settings.factors
    largest = _spoken_space(assignments, task)
    compact = largest.reduce(full[name])
    compact.view(-1, factors)[:, 0] = 0
    assert task.data.train.ratings is not None
    ratings = task.data.train.ratings.to(compact.dtype)
    spread = float(ratings.std(correction=0)) if len(ratings) else 0.0
    centre = torch.tensor([float(ratings.mean()) if len(ratings) else 0.0, spread or 1.0, 0.0], dtype=compact.dtype)
    return full | {name: largest.recover(compact), CENTRE: centre}


def _spoken_space(assignments: Sequence[Assignment], task: Task) -> Subspace:
    (name,) = task.tables
    held = [assignment.projections for assignment in assignments if assignment.projections is not None]
    return spoken_space(require_nested(subspace_of(projections[name]) for projections in held)[-1], task.settings)


class RatingTotals:
    """What the devices of a round said, window by window. Takes the place of ``RoundTotals`` in a round."""

    def __init__(self, assignments: Sequence[Assignment], task: Task) -> None:
        (self._name,) = task.tables
        self._largest = _spoken_space(assignments, task)
        self._counts = task.data.train.counts_by_item
        self._rows: dict[Subspace, Tensor] = {}
        self._counted: Tensor | None = None
        self._codes: Tensor | None = None

    def add(self, projections: dict[str, Projection], changes: Weights, weight: float) -> None:  # noqa: ARG002
        """Add what one device, or several of one size, changed: every rating counts alike."""
        subspace, change = subspace_of(projections[self._name]), changes[self._name]
        self._rows[subspace] = self._rows[subspace] + change if subspace in self._rows else change
        self._counted = changes[CENTRE] if self._counted is None else self._counted + changes[CENTRE]
        self._codes = changes[GRAM] if self._codes is None else self._codes + changes[GRAM]

    @torch.no_grad()
    def applied(self, state: ServerState, settings: Settings) -> ServerState:
        """The server's state after the round: its sums, and the rows that follow; what nobody spoke of is zero."""
        name, factors, largest = self._name, settings.factors, self._largest
        if self._counted is None or self._codes is None:
            return replace(state, round_number=state.round_number + 1)
        kept = state.moments.get("sums") or {name: torch.zeros(largest.size, dtype=state.full[name].dtype)}
        sums = kept[name].view(-1, factors).clone()
        for subspace, change in self._rows.items():
            rows = Window(largest, subspace, state.round_number, settings).rows
            sums.index_add_(0, rows, change.view(-1, factors))
        centre, gram = state.full[CENTRE] + self._counted, state.full[GRAM] + self._codes
        # The ridge is one of the full table, so a row that k items share has it k times. Without that, a row of items
        # with one rating each would believe what none of them can.
        sharing = row_counts(largest, factors).clamp(min=1)[:, None].to(sums.dtype)
        pull = _pull(factors, settings.damping, settings.ridge, sums.dtype)
        table = _solved(sums, self._spoken(centre[2], factors), sharing, mean_code(gram, factors), pull)
        full = state.full | {name: largest.recover(table.view(-1)), CENTRE: centre, GRAM: gram}
        return ServerState(full, state.round_number + 1, {"sums": {name: sums.view(-1)}})

    def _spoken(self, spoken: Tensor, factors: int) -> Tensor:
        """n, how many ratings were spoken of, by row."""
        row = rows_of(self._largest, torch.arange(len(self._counts)), factors)
        counts = torch.zeros(self._largest.size // factors, dtype=torch.float64)
        counts.index_add_(0, row, self._counts.double())
        return counts * (spoken.double() / counts.sum().clamp(min=1))


def _solved(sums: Tensor, spoken: Tensor, sharing: Tensor, mean: Tensor, pull: Tensor) -> Tensor:
    """Rows w of (n·K + k·pull) w = sums, for all n and k from one decomposition."""
    root = pull.double().sqrt()
    values, vectors = torch.linalg.eigh(mean.double() / torch.outer(root, root))
    scale = spoken.double()[:, None] * values.clamp(min=0) + sharing.double()
    solution: Tensor = ((sums / root) @ vectors / scale) @ vectors.T / root
    return solution.to(sums.dtype)


def rating_predictor(full: Weights, task: Task, settings: Settings, histories: Interactions | None = None) -> Predictor:
    """Ratings of pairs from an item table alone: everybody's bias and vector follow from their own ratings.

    Args:
        full: The server's tensors, or those that a device's stand for.
        task: What they were trained for.
        settings: Of the run.
        histories: Of the users asked for, with ratings; those of the task if not given.
    """
    (name,) = task.tables
    table, centre = full[name].view(task.tables[name]), full[CENTRE]
    known = task.data.train if histories is None else histories
    if known.ratings is None:
        raise InvalidSettings(
            "a history without ratings for a model of ratings", "what the user thinks of each item",
            "Ask for a user of the run, or train a model of rankings (model='mf').",
        )  # fmt: skip
    targets = centred(known.ratings.to(table.dtype), centre)
    own = solve_raters(Ratings(table[known.items], targets, known.users, known.num_users), settings)

    def predict(users: Tensor, items: Tensor) -> Tensor:
        mine, theirs = own[users], table[items]
        scores = mine[..., 0] + theirs[..., 0] + (mine[..., 1:] * theirs[..., 1:]).sum(-1)
        return centre[0] + centre[1] * scores

    return predict
