"""The closed form: a user's vector solved exactly, then one step on the squared error over the whole catalogue.

With items V (never realised on a device), own items weighing 1 and all others w: u solves
((1 − w)·Σ⁺ v vᵀ + w·VᵀV + ridge·I) u = Σ⁺ v, and the gradient is g = w·V u uᵀ + Σ⁺ ((1 − w)·v·u − 1) uᵀ. The step is
the *projected* one, the mean and not the sum of a slot's coordinates: what a step outside the subspace would leave in
it (tests/laws: equal to plain gradient descent where columns have unit length).

The step is linear in the user's outer product: Σ over users of w·V u uᵀ is w·V·(Σ u uᵀ), a d × d matrix however many
they are. So users of one size, in a simulation or on one device, are answered for in two walks over the items.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.server_step import Stepping
from fairfold.kernels import ops
from fairfold.metrics.ranking import Scorer
from fairfold.projections import Hashed
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Sent, Visit, Word, by_sent
from fairfold.subspace import Subspace
from fairfold.values import Weights

BLOCK_ITEMS = 8_192
"""Items realised at a time where a device walks the catalogue: the table itself is never made."""


class ClosedForm(Stepping):
    """Matrix factorisation with solved users and one projected step per round.

    Attributes:
        kind: Its name.
        ridge: Pull of the user's vector towards zero.
        unobserved_weight: w, what an item the user did not touch counts, against 1 for one they did.
        local_step: The device's step size.
    """

    NEEDS: ClassVar = Stepping.NEEDS
    from_history: ClassVar[bool] = True

    kind: Literal["closed_form"] = "closed_form"
    ridge: float = Field(1.0, ge=0)
    unobserved_weight: float = Field(0.5, gt=0, le=1)
    local_step: float = Field(1.0, gt=0)

    def problem_with(self, settings: Any) -> str | None:
        return only_mf(self.kind, settings)

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """Solve the user, walk the catalogue once more for the step."""
        (word,) = self.answers(plan, client.people, [Visit(client.number, sent)])
        return word.answer, {name: rows[0] for name, rows in word.own.items()}

    def answers(self, plan: Plan, people: People, visits: list[Visit]) -> Iterator[Word]:
        """Users of a size together, but for those whose step might be refused alone."""
        for sent, clients in by_sent(visits):
            yield from self._of_size(plan, people, sent, clients)

    def _of_size(self, plan: Plan, people: People, sent: Sent, clients: list[int]) -> Iterator[Word]:
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        space, factors, compact = subspace_of(sent.projections[name]), plan.settings.model.factors, sent.vectors[name]
        histories = [people.train.of(client) for client in clients]
        rows, users = self._solved(compact, space, factors, histories)
        slopes = [
            ((1 - self.unobserved_weight) * (of @ user) - 1)[:, None] * user
            for of, user in zip(rows, users, strict=True)
        ]
        bounds = self._bounds(users, slopes, compact, factors)
        together = [place for place, bound in enumerate(bounds) if bound <= self.largest_change]
        alone = [[place] for place, bound in enumerate(bounds) if not bound <= self.largest_change]
        for places in [together, *alone] if together else alone:
            weights = [self.weight(len(histories[place])) for place in places]
            parts = [(histories[place], slopes[place], weight) for place, weight in zip(places, weights, strict=True)]
            outer = (users[places].T * torch.tensor(weights, dtype=users.dtype)) @ users[places]
            change = self._change(compact, space, factors, outer, parts)
            total = sum(weights)
            if self.values:
                change = change.add_(compact, alpha=total)
            answer = Answer({name: change}, total)
            yield Word(sent, [clients[place] for place in places], answer, {own_name: users[places]})

    def _solved(
        self, compact: Tensor, space: Subspace, factors: int, histories: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """The rows of the items of some users, and the users' vectors."""
        gram_matrix = gram(compact, space, factors)
        rows = [space.recover_rows(compact, mine, factors) for mine in histories]
        return rows, torch.stack([self.solve(of, gram_matrix) for of in rows])

    def _bounds(self, users: Tensor, slopes: list[Tensor], compact: Tensor, factors: int) -> list[float]:
        """What no number of a user's step exceeds: a slot's mean is at most the largest of what lives in it."""
        longest = float(compact.abs().max()) * factors if compact.numel() else 0.0  # of any v·u with |u| ≤ 1
        found = []
        for user, slope in zip(users, slopes, strict=True):
            most = float(user.abs().max()) if user.numel() else 0.0
            everywhere = self.unobserved_weight * longest * most * most
            found.append(self.local_step * (everywhere + (float(slope.abs().max()) if slope.numel() else 0.0)))
        return found

    def _change(
        self, compact: Tensor, space: Subspace, factors: int, outer: Tensor, parts: list[tuple[Tensor, Tensor, float]]
    ) -> Tensor:
        """Minus the step, weighted: one walk over the items for all."""
        touched, order = torch.cat([items for items, _, _ in parts]).sort(stable=True)
        moved = torch.cat([weight * slope for _, slope, weight in parts])[order]
        sums, counts = torch.zeros(space.size, dtype=compact.dtype), torch.zeros(space.size, dtype=torch.int32)
        for first, block in item_blocks(compact, space, factors):
            slope = self.unobserved_weight * (block @ outer)
            low, high = torch.searchsorted(touched, torch.tensor([first, first + len(block)])).tolist()
            slope.index_add_(0, touched[low:high] - first, moved[low:high])
            ops.accumulate_range(space.layout, slope.view(-1), first * factors, sums, counts)
        return sums.div_(counts.clamp_(min=1)).mul_(-self.local_step)

    def solve(self, rows: Tensor, gram_matrix: Tensor) -> Tensor:
        """The user's vector from the rows of their own items and the Gram matrix of all items."""
        weight = self.unobserved_weight
        matrix = (1 - weight) * rows.T @ rows + weight * gram_matrix
        matrix.diagonal().add_(self.ridge)
        solution: Tensor = torch.linalg.solve(matrix, rows.sum(0))
        return solution

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: they follow from the model and the users' histories."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        space, factors = subspace_of(sent.projections[name]), plan.settings.model.factors
        _, found = self._solved(sent.vectors[name], space, factors, [people.train.of(user) for user in users])
        return {own_name: found}

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Everybody's vector follows from their own history."""
        (name,) = plan.architecture.tables
        table = full[name].view(plan.architecture.tables[name])
        everything, of = table.T @ table, people.train.of
        return lambda users: torch.stack([self.solve(table[of(user)], everything) for user in users.tolist()]) @ table.T


def only_mf(kind: str, settings: Any) -> str | None:
    """What algorithms that solve for users ask of the other tables."""
    if settings.model.kind != "mf" or settings.model.item_bias:
        return f"algorithm.kind={kind!r} is for model.kind='mf' without item_bias; 'gradient' serves others"
    if settings.subspace.method not in ("fair", "fair_hom", "full_trn", "fedavg"):
        return f"algorithm.kind={kind!r} needs subspaces, not method={settings.subspace.method!r}: use 'gradient'"
    if getattr(settings.subspace, "compress", "tables") != "tables":
        return f"algorithm.kind={kind!r} has one table and nothing else: leave out subspace.compress"
    return None


def subspace_of(projection: Any) -> Subspace:
    """The subspace of a projection that is known to have one."""
    assert isinstance(projection, Hashed)
    return projection.subspace


def gram(compact: Tensor, subspace: Subspace, factors: int) -> Tensor:
    """VᵀV of all items, block by block."""
    total = torch.zeros(factors, factors, dtype=compact.dtype)
    for _, block in item_blocks(compact, subspace, factors):
        total.addmm_(block.T, block)
    return total


def item_blocks(compact: Tensor, subspace: Subspace, factors: int) -> Iterator[tuple[int, Tensor]]:
    """The item table a block at a time, each with the number of its first item."""
    num_items = subspace.full_size // factors
    for first in range(0, num_items, BLOCK_ITEMS):
        last = min(first + BLOCK_ITEMS, num_items)
        block = torch.empty((last - first) * factors, dtype=compact.dtype)
        ops.recover_range(subspace.layout, compact, first * factors, block)
        yield first, block.view(-1, factors)
