"""Algorithms with incremental sums: a client sends the change of its contribution since it last took part.

So the server's sums hold the latest contribution of every client, sampled or not. Rows are folded whole (no signs, a
row per chunk), so that folding commutes with matrices, and all of the server's algebra happens in the compact space.
"""

from abc import abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any, ClassVar

import torch
from torch import Tensor

from fairfold.algorithms.closed_form import mf_incompatibility, subspace_of
from fairfold.federation.algorithm import Algorithm, BatchedUpdates, DeviceScoring, RemembersUpdates, SettingsRules
from fairfold.federation.clients import Client, Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import ClientTask, ClientUpdate, ScheduledTask, Update, group_by_task
from fairfold.kernels import ops
from fairfold.methods import Fair
from fairfold.subspace import Subspace
from fairfold.subspace.nesting import require_nested
from fairfold.typing import Weights


class IncrementalAlgorithm(Algorithm, BatchedUpdates, RemembersUpdates, SettingsRules, DeviceScoring):
    """Base of algorithms whose updates are changes, and whose rows are folded whole."""

    serves_new_users: ClassVar[bool] = True

    def fixed_settings(self, settings: Any) -> dict[str, dict[str, Any]]:
        """Rows are folded whole, by one hash, without signs."""
        return {"subspace": {"chunk": settings.model.factors, "sign": False, "rehash": False, "compress": "tables"}}

    def incompatibility(self, settings: Any) -> str | None:
        if isinstance(settings.subspace, Fair) and settings.subspace.mapping == "element":
            return f"algorithm.kind={self.kind!r} folds whole rows: use subspace.mapping='ranked' or 'chunk'"
        return mf_incompatibility(self.kind, settings)

    def client_updates(self, plan: Plan, clients: Clients, scheduled: list[ScheduledTask]) -> Iterator[ClientUpdate]:
        for task, drawn in group_by_task(scheduled):
            client_ids = list(dict.fromkeys(drawn))  # sampled twice: nothing has changed the second time
            valid, update, local_state = self.batch_update(plan, task, clients, client_ids)
            good = valid.tolist()
            together = list(compress(client_ids, good))
            if together:
                yield ClientUpdate(task, together, update, local_state)
            for client in compress(client_ids, map(not_, good)):
                update, local_state = self.client_update(plan, task, clients.client(client, task.round_number))
                yield ClientUpdate(task, [client], update, local_state)

    def client_update(self, plan: Plan, task: ClientTask, client: Client) -> tuple[Update, Weights]:
        _, update, local_state = self.batch_update(plan, task, client.clients, [client.number], check=False)
        return update, local_state

    @abstractmethod
    def batch_update(
        self, plan: Plan, task: ClientTask, clients: Clients, client_ids: list[int], *, check: bool = True
    ) -> tuple[Tensor, Update, Weights]:
        """Which clients' updates are in range, and the sum and new local state of these; of all without ``check``."""


def chain_of(plan: Plan, round_number: int) -> list[Subspace]:
    """The subspaces of all sizes, the smallest first."""
    (name,) = plan.architecture.tables
    held = [one.projections for one in plan.assignments(round_number) if one.projections is not None]
    return require_nested(subspace_of(projections[name]) for projections in held)


@lru_cache(maxsize=16)
def items_per_row(subspace: Subspace, factors: int) -> Tensor:
    """Number of items that share each row of a compact table."""
    return subspace.counts().view(-1, factors)[:, 0]


def rows_of(subspace: Subspace, items: Tensor, factors: int) -> Tensor:
    """The row of a compact table that each item has."""
    slots, _ = ops.slots_and_signs(subspace.layout, items * factors)
    return torch.div(slots, factors, rounding_mode="floor")
