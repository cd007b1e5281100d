"""Alternating least squares as a federation: sums are all that devices send, and all that the server keeps.

With X the users' histories (1 where a user has an item), user i counting ωᵢ, the objective is
Σ ωᵢ ‖xᵢ − V uᵢ‖² plus a ridge on both sides. Given V, a user's vector follows from their own history alone. Given all
users' vectors, V = T (M + ridge)⁻¹ with T = Σ ωᵢ xᵢ uᵢᵀ, one row per item, and M = Σ ωᵢ uᵢ uᵢᵀ, a d × d matrix: both
are sums over users. So a device sends the *change* of its own summands since it last took part, in the slots of its
subspace, and the server adds. Nothing is drawn at random but who takes part, there is no step size, and one setting
serves all cohorts and schemes: the server's sums always hold everybody's latest word, whoever was drawn.

Four things make that work in nested subspaces:

* *Rows are folded whole* (no signs, a row per chunk), so folding commutes with matrices: reduce(V)·A = reduce(V·A).
  All of the server's algebra happens in the compact space of the largest device.
* *An item counts by what is held of it.* In its tail a device holds sums of many items, which say little about each:
  a user's vector is solved from those of their items that own a row, and the user counts by how many these are.
* *Everybody solves in the server's metric.* A user's vector needs VᵀV of all items; the server sends it, d × d. From
  its own rows alone a small device would find vectors of another scale, and the sums of both kinds would not fit.
* *A row is divided by those who hold it.* The sums and M are kept per size; rows that only larger devices own come from
  their sums and their M alone. Averaging over all would halve them where half of the devices cannot own them.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.closed_form import only_mf, subspace_of
from fairfold.algorithms.server_step import weight_of
from fairfold.kernels import ops
from fairfold.metrics.ranking import Scorer
from fairfold.protocol.algorithm import Algorithm
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.sampling import Purpose, generator
from fairfold.protocol.words import Answer, Sent, State, Totals, Visit, Word, by_sent
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested
from fairfold.values import Shapes, Weights

GRAM = "gram"
"""Name of the d × d matrix: a device receives that of the items, and adds that of its user."""


class Remembering(Algorithm):
    """What algorithms whose sums remember have in common: devices send changes of their last words, in whole rows."""

    keeps: ClassVar[Literal["learned", "acknowledged"]] = "acknowledged"
    whole_rows: ClassVar[bool] = True
    from_history: ClassVar[bool] = True

    def fixed(self, settings: Any) -> dict[str, dict[str, Any]]:
        """Rows are folded whole, by one hash, without signs."""
        return {"subspace": {"chunk": settings.model.factors, "sign": False, "rehash": False, "compress": "tables"}}

    def starts_own(self, plan: Plan, own: Weights) -> None:
        """Before a user's first word the sums hold nothing of theirs."""
        for rows in own.values():
            rows.zero_()

    def change(self, sent: Sent, name: str, vector: Tensor, weight: float) -> Tensor:
        """A user's change; of several users together their mean."""
        return vector if weight <= 1 else vector / weight

    def problem_with(self, settings: Any) -> str | None:
        if getattr(settings.subspace, "mapping", "ranked") == "element":
            return f"algorithm.kind={self.kind!r} folds whole rows: use subspace.mapping='ranked' or 'chunk'"
        return only_mf(self.kind, settings)

    def answers(self, plan: Plan, people: People, visits: list[Visit]) -> Iterator[Word]:
        """Users of a size together, but for those whose word might be refused alone."""
        for sent, drawn in by_sent(visits):
            clients = list(dict.fromkeys(drawn))  # who is drawn twice has nothing new to say the second time
            good, answer, own = self.together(plan, sent, people, clients)
            fine = dict(zip(clients, good.tolist(), strict=True))
            if any(fine.values()):
                yield Word(sent, [client for client in clients if fine[client]], answer, own)
            for client in clients:
                if not fine[client]:
                    answer, own = self.answer(plan, sent, people.client(client, sent.round_number))
                    yield Word(sent, [client], answer, own)

    @abstractmethod
    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """Whose answers would not be refused for their size, and what these say and keep together."""


class LeastSquares(Remembering):
    """Alternating least squares from sums that remember.

    Attributes:
        kind: Its name.
        ridge: Pull of users' and items' vectors to zero, in units of the mean eigenvalue of what is inverted.
        weighting: Users count by how many of their items own a row (``"data"``), alike (``"equal"``), or by a power of
            that number in between.
    """

    DEFAULTS: ClassVar = {"model": {"factors": 16}, "subspace": {"tail_share": 0.125, "support": 10}}

    kind: Literal["least_squares"] = "least_squares"
    ridge: float = Field(1.0, gt=0)
    weighting: Literal["data", "equal"] | float = Field("equal", union_mode="left_to_right")

    def extra(self, settings: Any) -> Shapes:
        return {GRAM: (settings.model.factors, settings.model.factors)}

    @torch.no_grad()
    def init(self, plan: Plan, full: Weights) -> State:
        """By chance in the space of the largest devices: the same whoever takes part, however many they are."""
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        largest = chain_of(plan, 0)[-1]
        source = generator(plan.settings, Purpose.MODEL)
        start = torch.randn(largest.size, generator=source, dtype=full[name].dtype)
        return State(full | self._model(name, largest, start, factors))

    # -- the device ----------------------------------------------------------------------------------------------------

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """Solve the user's vector; say what that changes in the sums of rows and of outer products."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        space, factors, compact = subspace_of(sent.projections[name]), plan.settings.model.factors, sent.vectors[name]
        mine = client.items
        owned = mine[mine < owned_rows(space, factors)]
        rows = space.recover_rows(compact, owned, factors)
        user = self.solve(rows.sum(0)[None], sent.vectors[GRAM].view(factors, factors))[0]
        before = client.own[own_name].to(user.dtype)
        weight = self.weight(len(owned))
        moved = weight * (user - before)
        sums = space.accumulate_rows(moved.expand(len(mine), factors).contiguous(), mine)
        outer = weight * (torch.outer(user, user) - torch.outer(before, before))
        sums = sums / space.counts().clamp(min=1)
        return Answer({name: sums, GRAM: outer.view(-1)}, 1.0), {own_name: user}

    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """All users of a size share one d × d system: one solve, one scatter of vectors into rows."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        space, factors = subspace_of(sent.projections[name]), plan.settings.model.factors
        table = sent.vectors[name].view(-1, factors)
        histories = [people.train.of(client) for client in clients]
        items = torch.cat(histories)
        client_of = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([len(mine) for mine in histories]))
        row = rows_of(space, items, factors)
        counted = items < owned_rows(space, factors)
        sums = torch.zeros(len(clients), factors, dtype=table.dtype)
        sums.index_add_(0, client_of[counted], table[row[counted]])
        users = self.solve(sums, sent.vectors[GRAM].view(factors, factors))
        owned = torch.bincount(client_of[counted], minlength=len(clients)).tolist()
        weights = torch.tensor([self.weight(count) for count in owned], dtype=table.dtype)
        before = people.private[own_name][clients].to(table.dtype)
        moved = weights[:, None] * (users - before)
        # A row's change is a mean over its items, so at most what moved; likewise of the outer products.
        outer = weights[:, None, None] * (users[:, :, None] * users[:, None] - before[:, :, None] * before[:, None])
        good = torch.maximum(moved.abs().amax(1), outer.abs().amax((1, 2))) <= self.largest_change
        kept = good[client_of]
        total = torch.zeros_like(table).index_add_(0, row[kept], moved[client_of[kept]])
        total /= row_counts(space, factors).clamp(min=1)[:, None]
        answer = Answer({name: total.view(-1), GRAM: outer[good].sum(0).view(-1)}, float(good.sum()))
        return good, answer, {own_name: users[good]}

    def solve(self, sums: Tensor, gram_matrix: Tensor) -> Tensor:
        """Vectors of users, [users, d], from the sums of the rows they own: their own history alone."""
        solution: Tensor = torch.linalg.solve(with_ridge(gram_matrix, self.ridge), sums.T).T
        return solution

    def weight(self, owned: int) -> float:
        """ωᵢ of a user: 1 under ``"data"``, so that every owned item counts alike; else every user more alike."""
        return weight_of(self.weighting, owned) / owned if owned else 0.0

    # -- the server ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The sums of all rounds, and the items' rows that follow from them."""
        if not totals.by_size:  # nothing new was said
            return replace(state, round_number=state.round_number + 1)
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        chain, moments = chain_of(plan, 0), dict(state.moments)
        sums = dict[Subspace, Weights]()
        for space in chain:  # in double: changes of changes are added for as long as the run lasts
            kept = moments.get(f"sums-{space.size}") or {name: torch.zeros(space.size), GRAM: torch.zeros(factors**2)}
            sums[space] = {key: of.double() for key, of in kept.items()}
        for sent, answer in totals.parts():
            space = subspace_of(sent.projections[name])
            sums[space] = {key: sums[space][key] + said for key, said in answer.sums.items()}
        moments |= {f"sums-{space.size}": of for space, of in sums.items()}
        largest = chain[-1]
        rows = {space: of[name] for space, of in sums.items()}
        codes = {space: of[GRAM] for space, of in sums.items()}
        solved = self._solved(chain, rows, codes, largest.reduce(state.full[name]).view(-1, factors))
        full = state.full | self._model(name, largest, solved, factors)
        return State(full, state.round_number + 1, moments)

    def _model(self, name: str, space: Subspace, compact: Tensor, factors: int) -> Weights:
        """The items' table and its Gram matrix, at the one scale at which mean diag(VᵀV) = 1.

        The ridge is in units of what it is added to, so no term of the objective holds the scale: left alone, V grows
        by a factor every round, and users' vectors shrink by it, until float32 holds neither.
        """
        metric = gram(compact, space, factors)
        level = float(metric.diagonal().mean())
        scale = level**-0.5 if level > 0 else 1.0
        return {name: space.recover(compact * scale), GRAM: (metric * scale**2).view(-1)}

    def _solved(
        self, chain: list[Subspace], rows: dict[Subspace, Tensor], codes: dict[Subspace, Tensor], table: Tensor
    ) -> Tensor:
        """The items' rows in the compact space of the largest size; those nobody has spoken of stay as they were."""
        largest, factors, start = chain[-1], table.shape[1], 0
        for stop in sorted({space.head for space in chain}):
            owners = [space for space in chain if space.head >= stop]
            total = torch.stack([rows[space][start:stop] for space in owners]).sum(0)
            self._divide(table[start // factors : stop // factors], total, [codes[space] for space in owners])
            start = stop
        # What the largest devices do not own they know best: in smaller tails, items that others own outweigh the rest.
        self._divide(table[start // factors :], rows[largest][start:], [codes[largest]])
        return table.view(-1)

    def _divide(self, into: Tensor, sums: Tensor, codes: list[Tensor]) -> None:
        """Rows from their sums and the outer products of the users behind them."""
        factors = into.shape[1]
        outer = torch.stack(codes).sum(0).view(factors, factors)
        if len(into) and bool((outer.diagonal() > 0).any()):
            solved = torch.linalg.solve(with_ridge(outer, self.ridge), sums.view(-1, factors).to(outer.dtype).T)
            into.copy_(solved.T)

    # -- what was learned ----------------------------------------------------------------------------------------------

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: they follow from the model and the users' histories."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        space, factors = subspace_of(sent.projections[name]), plan.settings.model.factors
        owned = owned_rows(space, factors)
        histories = [items[items < owned] for items in map(people.train.of, users)]
        sums = torch.stack([space.recover_rows(sent.vectors[name], of, factors).sum(0) for of in histories])
        return {own_name: self.solve(sums, sent.vectors[GRAM].view(factors, factors))}

    def tells_apart(self, plan: Plan, held: Sequence[Any], items: Tensor) -> Tensor:
        """Those that own a row."""
        return items < _owned(plan, held)

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Everybody's vector follows from those of their items that own a row."""
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        table, of = full[name].view(plan.architecture.tables[name]), people.train.of
        owned = _owned(plan, held)
        gram_matrix = full[GRAM].view(factors, factors)

        def score(users: Tensor) -> Tensor:
            sums = torch.stack([table[items[items < owned]].sum(0) for items in map(of, users.tolist())])
            return self.solve(sums, gram_matrix) @ table.T

        return score


def _owned(plan: Plan, held: Sequence[Any]) -> int:
    """How many leading items own a row on some of the devices."""
    (name,), factors = plan.architecture.tables, plan.settings.model.factors
    mine = [subspace_of(one.projections[name]) for one in held if one.projections is not None]
    return max(owned_rows(space, factors) for space in mine)


def with_ridge(matrix: Tensor, ridge: float) -> Tensor:
    """A matrix with its mean eigenvalue, times ``ridge``, on the diagonal; with 1 there if it is all zero."""
    level = float(matrix.diagonal().mean())
    return matrix + (ridge * level if level > 0 else 1.0) * torch.eye(len(matrix), dtype=matrix.dtype)


def gram(compact: Tensor, subspace: Subspace, factors: int) -> Tensor:
    """VᵀV over the items that own a row, from the compact vector alone."""
    rows = compact.view(-1, factors)[: len(compact) // factors if not subspace.head else subspace.head // factors]
    if subspace.head:
        return rows.T @ rows
    return rows.T @ (rows * row_counts(subspace, factors)[:, None].to(rows.dtype))  # nobody owns a row: all count


def chain_of(plan: Plan, round_number: int) -> list[Subspace]:
    """The subspaces of all sizes, the smallest first."""
    (name,) = plan.architecture.tables
    held = [one.projections for one in plan.assignments(round_number) if one.projections is not None]
    return require_nested(subspace_of(projections[name]) for projections in held)


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
