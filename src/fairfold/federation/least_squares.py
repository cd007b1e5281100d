"""Alternating least squares as a federation: sums are all that devices send, and all that the server keeps.

With X the users' histories (1 where a user has an item), user i counting ωᵢ, the objective is
Σ ωᵢ ‖xᵢ − V uᵢ‖² plus a ridge on both sides. Given V, a user's vector follows from their own history alone. Given all
users' vectors, V = T (M + ridge)⁻¹ with T = Σ ωᵢ xᵢ uᵢᵀ, one row an item, and M = Σ ωᵢ uᵢ uᵢᵀ, a d × d matrix: both are
sums over users. So a device sends the *change* of its own summands since it last took part, in the slots of its
subspace, and the server adds. Nothing is drawn at random but who takes part, there is no step size, and one setting
serves all cohorts and schemes: the server's sums always hold everybody's latest word, whoever was drawn.

Four things make that work in nested subspaces:

* *Rows are folded whole* (no signs, a row a chunk), so folding commutes with d × d matrices: reduce(V)·A = reduce(V·A).
  All of the server's algebra happens in the compact space of the largest device.
* *An item counts by what is held of it.* In its tail a device holds sums of many items, which say little about each:
  a user's vector is solved from those of their items that own a row, and the user counts by how many these are.
* *Everybody solves in the server's metric.* A user's vector needs VᵀV of all items; the server sends it, d × d. From
  its own rows alone a small device would find vectors of another scale, and the sums of both kinds would not fit.
* *A row is divided by those who hold it.* The sums and M are kept per size; rows that only larger devices own come from
  their sums and their M alone. Averaging over all would halve them where half of the devices cannot own them.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fairfold.federation.aggregate import ServerState
from fairfold.federation.projection import Assignment, Hashed, Projection
from fairfold.federation.settings import Settings
from fairfold.federation.task import GRAM, Task, Weights
from fairfold.federation.train import Device, Trained
from fairfold.kernels import ops
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested


def least_squares(received: Weights, device: Device, settings: Settings) -> Trained:
    """Solve the user's vector; send what that changes in the sums of rows and of outer products.

    What came as the table goes back as the change of the rows' sums, what came as the items' Gram matrix as that of
    the users' outer products.
    """
    (name,), (own_name,) = device.task.tables, device.task.own
    subspace, factors, compact = subspace_of(device.projections[name]), settings.factors, received[name]
    mine = device.task.data.train.of(device.client)
    owned = mine[mine < owned_rows(subspace, factors)]
    rows = subspace.recover_rows(compact, owned, factors)
    user = solve_users(rows.sum(0)[None], received[GRAM].view(factors, factors), settings)[0]
    before = device.own[own_name].to(user.dtype)
    weight = history_weight(len(owned), settings)
    moved = weight * (user - before)
    sums = subspace.accumulate_rows(moved.expand(len(mine), factors).contiguous(), mine)
    outer = weight * (torch.outer(user, user) - torch.outer(before, before))
    return Trained({name: sums / subspace.counts().clamp(min=1), GRAM: outer.view(-1)}, {own_name: user})


def solve_users(sums: Tensor, gram_matrix: Tensor, settings: Settings) -> Tensor:
    """Vectors of users, [users, d], from the sums of the rows they own: their own history alone."""
    solution: Tensor = torch.linalg.solve(with_ridge(gram_matrix, settings.ridge), sums.T).T
    return solution


def with_ridge(matrix: Tensor, ridge: float) -> Tensor:
    """A matrix with its mean eigenvalue, times ``ridge``, on the diagonal; with 1 there if it is all zero."""
    level = float(matrix.diagonal().mean())
    return matrix + (ridge * level if level > 0 else 1.0) * torch.eye(len(matrix), dtype=matrix.dtype)


def history_weight(owned: int, settings: Settings) -> float:
    """ωᵢ of a user: 1 under ``weighting="data"``, so that every owned item counts alike; else every user more alike."""
    return settings.weight(owned) / owned if owned else 0.0


def gram(compact: Tensor, subspace: Subspace, factors: int) -> Tensor:
    """VᵀV over the items that own a row, from the compact vector alone."""
    rows = compact.view(-1, factors)[: len(compact) // factors if not subspace.head else subspace.head // factors]
    if subspace.head:
        return rows.T @ rows
    return rows.T @ (rows * row_counts(subspace, factors)[:, None].to(rows.dtype))  # nobody owns a row: all count


@torch.no_grad()
def first_state(full: Weights, assignments: Sequence[Assignment], task: Task) -> Weights:
    """The server's tensors before the first round: inside the space of its largest devices, with the Gram matrix."""
    (name,), factors = task.tables, task.settings.factors
    held = [assignment.projections for assignment in assignments if assignment.projections is not None]
    largest = require_nested(subspace_of(projections[name]) for projections in held)[-1]
    compact = largest.reduce(full[name])
    return full | {name: largest.recover(compact), GRAM: gram(compact, largest, factors).view(-1)}


def owned_rows(subspace: Subspace, factors: int) -> int:
    """How many leading items own a row; where none does, all count as if they did."""
    return (subspace.head or subspace.full_size) // factors


@lru_cache(maxsize=16)
def row_counts(subspace: Subspace, factors: int) -> Tensor:
    """How many items share each row of a compact table."""
    return subspace.counts().view(-1, factors)[:, 0]


def rows_of(subspace: Subspace, items: Tensor, factors: int) -> Tensor:
    """The row of a compact table in which each item lives."""
    slots, _ = ops.slots_and_signs(subspace.layout, items * factors)
    return torch.div(slots, factors, rounding_mode="floor")


def subspace_of(projection: Projection) -> Subspace:
    """The subspace of a projection that is known to have one."""
    assert isinstance(projection, Hashed)
    return projection.subspace


def server_owned(assignments: Sequence[Assignment], name: str, factors: int) -> int:
    """How many leading items own a row in the server's model: as many as on the largest device."""
    held = [assignment.projections for assignment in assignments if assignment.projections is not None]
    return max(owned_rows(subspace_of(projections[name]), factors) for projections in held)


class SizeTotals:
    """What the devices of a round changed, size by size. Takes the place of ``RoundTotals`` in a round."""

    def __init__(self, assignments: Sequence[Assignment], task: Task) -> None:
        (self._name,) = task.tables
        self._subspaces = [
            subspace_of(held.projections[self._name]) for held in assignments if held.projections is not None
        ]
        self._rows: dict[Subspace, Tensor] = {}
        self._codes: dict[Subspace, Tensor] = {}

    def add(self, projections: dict[str, Projection], changes: Weights, weight: float) -> None:  # noqa: ARG002
        """Add what one device, or several of one size, changed; their weights are in it already."""
        subspace = subspace_of(projections[self._name])
        for sums, change in ((self._rows, changes[self._name]), (self._codes, changes[GRAM])):
            sums[subspace] = sums[subspace] + change if subspace in sums else change.clone()

    @torch.no_grad()
    def applied(self, state: ServerState, settings: Settings) -> ServerState:
        """The server's state after the round: its sums, and the items' rows that follow from them."""
        name, factors = self._name, settings.factors
        chain = require_nested(self._subspaces)
        rows, codes = dict[Subspace, Tensor](), dict[Subspace, Tensor]()
        moments = dict(state.moments)
        for subspace in chain:
            key = f"sums-{subspace.size}"
            kept = moments.get(key) or {
                name: torch.zeros(subspace.size, dtype=state.full[name].dtype),
                GRAM: torch.zeros(factors * factors, dtype=state.full[name].dtype),
            }
            rows[subspace] = kept[name] + self._rows.get(subspace, 0)
            codes[subspace] = kept[GRAM] + self._codes.get(subspace, 0)
            moments[key] = {name: rows[subspace], GRAM: codes[subspace]}
        largest = chain[-1]
        solved = _solved(chain, rows, codes, largest.reduce(state.full[name]), settings)
        full = state.full | {name: largest.recover(solved), GRAM: gram(solved, largest, factors).view(-1)}
        return ServerState(full, state.round_number + 1, moments)


def _solved(
    chain: list[Subspace],
    rows: dict[Subspace, Tensor],
    codes: dict[Subspace, Tensor],
    before: Tensor,
    settings: Settings,
) -> Tensor:
    """The items' rows in the compact space of the largest size; those that nobody has spoken of stay as they were."""
    factors, largest = settings.factors, chain[-1]
    table = before.clone().view(-1, factors)
    start = 0
    for stop in sorted({subspace.head for subspace in chain}):
        owners = [subspace for subspace in chain if subspace.head >= stop]
        total = torch.stack([rows[subspace][start:stop] for subspace in owners]).sum(0)
        _divide(table[start // factors : stop // factors], total, [codes[subspace] for subspace in owners], settings)
        start = stop
    # What the largest devices do not own they know best: in smaller tails, items that others own outweigh the rest.
    _divide(table[start // factors :], rows[largest][start:], [codes[largest]], settings)
    return table.view(-1)


def _divide(into: Tensor, sums: Tensor, codes: list[Tensor], settings: Settings) -> None:
    """Rows from their sums and the outer products of the users behind them."""
    factors = settings.factors
    outer = torch.stack(codes).sum(0).view(factors, factors)
    if len(into) and bool((outer.diagonal() > 0).any()):
        into.copy_(torch.linalg.solve(with_ridge(outer, settings.ridge), sums.view(-1, factors).to(outer.dtype).T).T)
