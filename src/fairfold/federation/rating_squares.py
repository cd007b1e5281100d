"""Federated least squares for ratings: biases and tastes, from sums that remember.

A rating is modelled as m + bᵤ + bᵢ + u·vᵢ. A row of the item table is (how many ratings are behind it, bᵢ, vᵢ); a user's
private row is (1 once they have spoken, bᵤ, u). With c = (1, u) a user's *code* and w = (bᵢ, vᵢ), the exact rows solve
Σ (r − m − bᵤ − c·w) c = ridge·w over an item's raters: a d × d matrix for every item, far more than a row. Sums of rows
suffice all the same. With C the mean of c cᵀ over ratings, which the server sends, a device adds for each of its items

    e·c + C·w,   e being the error that is left,

and the server divides by (n·C + ridge), n counting those who spoke. Where nothing moves any more that *is* the equation
above, so the end is exact; and as c cᵀ is C in the mean, what a device said about old rows hardly ages. So there is no
step size here either, whoever is drawn. A device keeps what it last said of its own items, and sends the change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.federation.aggregate import ServerState
from fairfold.federation.least_squares import SizeTotals, blocks_by_owner, history_weight, subspace_of
from fairfold.federation.projection import Assignment
from fairfold.federation.settings import Settings
from fairfold.federation.task import CENTRE, GRAM, SAID, Task, Weights
from fairfold.federation.train import Device, Trained
from fairfold.metrics.rating import Predictor
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested

SPOKEN = 1
"""Leading numbers of a row that are no weights: how often it was spoken of."""
BLOCK_RATINGS = 1 << 16
"""Ratings whose outer products are in memory at a time."""


def rating_squares(received: Weights, device: Device, settings: Settings) -> Trained:
    """Solve the user's bias and vector; send what that changes in what the device said of its items."""
    (name,), (own_name,) = device.task.tables, device.task.own
    subspace, factors, compact = subspace_of(device.projections[name]), settings.factors, received[name]
    train = device.task.data.train
    mine, ratings = train.of(device.client), train.ratings_of(device.client).to(compact.dtype)
    rows = subspace.recover_rows(compact, mine, factors)
    alone = torch.zeros_like(mine)
    said, user = said_of(rows, ratings - received[CENTRE], alone, 1, received[GRAM], settings)
    before = device.own[own_name].to(user.dtype)[None]
    weight = history_weight(len(mine), settings)
    sums = subspace.accumulate_rows((weight * said - device.own[SAID].to(said.dtype)).contiguous(), mine)
    sizes = torch.tensor([weight * len(mine)], dtype=user.dtype)
    outer = codes(user, sizes) - codes(before, sizes)
    return Trained(
        {name: compact + sums, GRAM: received[GRAM] + outer.view(-1), CENTRE: received[CENTRE]},
        {own_name: user[0], SAID: weight * said},
    )


def said_of(
    rows: Tensor, targets: Tensor, owner: Tensor, users: int, code_matrix: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """What some users say of the items they rated, [ratings, factors], and their own rows, [users, factors].

    Args:
        rows: Of the item of every rating.
        targets: Ratings less the centre.
        owner: Which user each rating is of.
        users: How many users.
        code_matrix: C.
        settings: Of the run.
    """
    own = solve_raters(rows, targets, owner, users, settings)
    weights, codes_ = rows[:, SPOKEN:], code_of(own)[owner]
    errors = targets - own[owner, SPOKEN] - (codes_ * weights).sum(1)
    size = weights.shape[1]
    said = errors[:, None] * codes_ + weights @ code_matrix.view(size, size)
    return torch.cat([torch.ones_like(errors)[:, None], said], dim=1), own


def solve_raters(rows: Tensor, targets: Tensor, owner: Tensor, users: int, settings: Settings) -> Tensor:
    """The private rows of users, [users, factors], from their own ratings alone."""
    inputs = torch.cat([torch.ones_like(rows[:, :1]), rows[:, SPOKEN + 1 :]], dim=1)
    left, size = targets - rows[:, SPOKEN], inputs.shape[1]
    matrix = torch.zeros(users, size * size, dtype=rows.dtype)
    for part in torch.split(torch.arange(len(rows)), BLOCK_RATINGS):
        outer = inputs[part][:, :, None] * inputs[part][:, None]
        matrix.index_add_(0, owner[part], outer.view(-1, size * size))
    sums = torch.zeros(users, size, dtype=rows.dtype).index_add_(0, owner, inputs * left[:, None])
    ridges = torch.diag(_ridges(size, settings, rows.dtype))
    solution: Tensor = torch.linalg.solve(matrix.view(users, size, size) + ridges, sums)
    return torch.cat([torch.ones(users, SPOKEN, dtype=rows.dtype), solution], dim=1)


def code_of(own: Tensor) -> Tensor:
    """Codes (1, u) from users' private rows; zero for those who never spoke."""
    return torch.cat([own[:, :SPOKEN], own[:, SPOKEN + 1 :]], dim=1)


def codes(own: Tensor, sizes: Tensor) -> Tensor:
    """Σ over users of size·c cᵀ."""
    found = code_of(own)
    return found.T @ (sizes[:, None] * found)


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
    compact.view(-1, factors)[:, : SPOKEN + 1] = 0
    matrix = torch.zeros(task.dense[GRAM], dtype=compact.dtype)
    matrix[0, 0] = 1
    assert task.data.train.ratings is not None
    centre = task.data.train.ratings.to(compact.dtype).mean().view(1)
    return full | {name: largest.recover(compact), GRAM: matrix.view(-1), CENTRE: centre}


class RatingTotals(SizeTotals):
    """What the devices of a round changed in their sums; see :class:`SizeTotals`."""

    def solved(
        self, chain: list[Subspace], rows: dict[Subspace, Tensor], outer: dict[Subspace, Tensor], state: ServerState,
        settings: Settings,
    ) -> Weights:  # fmt: skip
        """Rows from their sums, in the compact space of the largest size; what nobody spoke of is zero."""
        factors, largest = settings.factors, chain[-1]
        total = torch.stack([outer[subspace] for subspace in chain]).sum(0).view(factors - SPOKEN, -1)
        if not float(total[0, 0]) > 0:
            return state.full
        matrix = total / total[0, 0]
        table = torch.zeros(largest.size, dtype=state.full[self.name].dtype)
        for start, stop, owners in blocks_by_owner(chain):
            sums = torch.stack([rows[subspace][start:stop] for subspace in owners]).sum(0).view(-1, factors)
            table[start:stop] = _divided(sums, matrix, settings).view(-1)
        return state.full | {self.name: largest.recover(table), GRAM: matrix.reshape(-1)}


def _divided(sums: Tensor, matrix: Tensor, settings: Settings) -> Tensor:
    """Rows (n, w) from (n, s): (n·C + ridge) w = s, all at once by one decomposition."""
    scale = _ridges(len(matrix), settings, matrix.dtype).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * matrix * scale)
    counts = sums[:, :SPOKEN]
    inside = (sums[:, SPOKEN:].to(matrix.dtype) * scale) @ vectors
    weights = (inside / (counts * values.clamp(min=0) + 1)) @ vectors.T * scale
    return torch.cat([counts, weights], dim=1)


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
    assert known.ratings is not None
    own = solve_raters(
        table[known.items], known.ratings.to(table.dtype) - centre, known.users, known.num_users, settings
    )

    def predict(users: Tensor, items: Tensor) -> Tensor:
        weights = table[items][..., SPOKEN:]
        return centre + own[users][..., SPOKEN] + (code_of(own)[users] * weights).sum(-1)

    return predict
