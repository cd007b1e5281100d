"""Sums that remember: a device sends the change of its own summands since it last took part, and the server adds.

So the server's sums hold everybody's latest word, whoever was drawn. Rows are folded whole (no signs, a row per chunk),
so that folding commutes with matrices, and all of the server's algebra happens in the compact space.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import only_mf, subspace_of
from fairfold.kernels import ops
from fairfold.protocol.algorithm import Algorithm
from fairfold.protocol.people import People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Sent, Visit, Word, by_sent
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested
from fairfold.values import Weights


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


def chain_of(plan: Plan, round_number: int) -> list[Subspace]:
    """The subspaces of all sizes, the smallest first."""
    (name,) = plan.architecture.tables
    held = [one.projections for one in plan.assignments(round_number) if one.projections is not None]
    return require_nested(subspace_of(projections[name]) for projections in held)


@lru_cache(maxsize=16)
def row_counts(subspace: Subspace, factors: int) -> Tensor:
    """How many items share each row of a compact table."""
    return subspace.counts().view(-1, factors)[:, 0]


def rows_of(subspace: Subspace, items: Tensor, factors: int) -> Tensor:
    """The row of a compact table in which each item lives."""
    slots, _ = ops.slots_and_signs(subspace.layout, items * factors)
    return torch.div(slots, factors, rounding_mode="floor")
