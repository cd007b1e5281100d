"""The closed form: a user's vector solved exactly, then one step on the squared error over the whole catalogue.

With items V (never in memory as a whole), own items weighing 1 and all others w: u solves
((1 − w)·Σ⁺ v vᵀ + w·VᵀV + ridge·I) u = Σ⁺ v, and the gradient is g = w·V u uᵀ + Σ⁺ ((1 − w)·v·u − 1) uᵀ. The step is
the *projected* one, the mean and not the sum of a slot's coordinates (tests/laws: equal to plain gradient descent where
columns have unit length). It is linear in u uᵀ, so the updates of all users of a size take two passes over the items.

With ``server_optimizer="newton"`` clients also send Σ u uᵀ, and the server divides by each item's Hessian
(:mod:`fairfold.algorithms.newton`): federated alternating least squares (iALS), which needs tens of rounds in the place
of hundreds.

**The ridge of items.** Of the ridges of users and items only the product λ² counts, and λ is where singular values are
cut: it is to be above those of noise. Let a share p of the pairs of U users and I items be interactions, without any
pattern. The best constant prediction is x = p/(w + (1 − w)p). Weighted residuals, 1 − x of an interaction and −w·x of
any other pair, have mean 0 and variance p(w/(w + (1 − w)p))², but for a factor of 1 − p. The largest singular value of
a matrix of such entries is near their deviation times √U + √I. So the ridge of items is a multiple of its square. All
of it follows from the number of users and the items' counts, which the server has before the first round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.averaging import AveragingAlgorithm, mean_changes
from fairfold.algorithms.newton import GRAM, newton_step, running_gram
from fairfold.data import Interactions
from fairfold.federation.aggregation import CombinesRobustly
from fairfold.federation.algorithm import (
    COUNTS,
    BatchedUpdates,
    DerivesSettings,
    DeviceScoring,
    Statistic,
    count_of,
)
from fairfold.federation.clients import Client, Clients
from fairfold.federation.plan import Plan
from fairfold.federation.updates import (
    Aggregate,
    ClientTask,
    ClientUpdate,
    PublicStatistics,
    ScheduledTask,
    State,
    Update,
    group_by_task,
)
from fairfold.kernels import ops
from fairfold.methods import Fair
from fairfold.metrics.ranking import Scorer
from fairfold.subspace import Subspace
from fairfold.subspace.projection import Hashed
from fairfold.typing import FLOAT_BYTES, Weights

BLOCK_ITEMS = 8_192  # items recovered at a time in a pass over the catalogue

LEAST_WEIGHT = 0.1  # that follows from the data: below, the mean user is too poor a stand-in in the Hessian

SUBSPACE_METHODS = ("fair", "fair_hom", "full_trn", "fedavg")
"""Methods whose clients hold subspaces of the table, in which users can be solved for."""

NEWTON = "newton"
"""Name of the server's optimizer, and of the group of the algorithm state that it keeps."""

POPULATION = "population"
"""Name of the statistic whose first number counts users, which a Newton step needs; the other two are 0."""
REACHED = "reached"
"""Name of the rows that the last Newton step reached, before momentum took them on."""


class ClosedForm(AveragingAlgorithm, BatchedUpdates, DeviceScoring, CombinesRobustly, DerivesSettings):
    """Matrix factorization with users solved exactly and one projected step per round.

    Attributes:
        kind: Its name in settings.
        ridge: Ridge of the user's vector.
        unobserved_weight: w, weight of an item that the user does not have, against 1 for one they have; ``"none"``:
            the root of the density of the data, at least 0.1 (docs/concepts.md).
        local_lr: Learning rate on the client.
        server_optimizer: ``"newton"``: a step to the least-squares solution of all item rows, with ``server_lr`` 1
            (docs/concepts.md); or an optimizer along the mean change.
        server_momentum: Share of the last Newton step that is taken again (Nesterov's momentum), where all clients take
            part: it makes up for the approximate Hessian (docs/concepts.md).
        item_ridge: Ridge of an item's vector, of a Newton step, in multiples of the noise of data with as many users,
            items and interactions (docs/concepts.md).
    """

    ACTIVE_WHEN: ClassVar = AveragingAlgorithm.ACTIVE_WHEN | dict.fromkeys(
        ("item_ridge", "server_momentum"), ("server_optimizer", (NEWTON,))
    )
    serves_new_users: ClassVar[bool] = True
    times_median: ClassVar[float] = 10.0  # a user solved exactly moves more the more items they have

    kind: Literal["closed_form"] = "closed_form"
    ridge: float = Field(1.0, ge=0)
    unobserved_weight: float | None = Field(0.5, gt=0, le=1)
    local_lr: float = Field(1.0, gt=0)
    server_optimizer: Literal["newton", "sgd", "momentum", "adam", "yogi", "adagrad"] = "adam"  # type: ignore[assignment]
    server_momentum: float = Field(0.0, ge=0, lt=1)
    item_ridge: float = Field(0.04, ge=0)

    def incompatibility(self, settings: Any) -> str | None:
        return mf_incompatibility(self.kind, settings)

    @property
    def others(self) -> float:
        """The weight w as a number: that of the settings, or what it became by the statistics."""
        assert self.unobserved_weight is not None
        return self.unobserved_weight

    def with_derived_settings(self, settings: Any, public: PublicStatistics) -> Self:
        if self.unobserved_weight is not None or POPULATION not in public.statistics:
            return self
        users, items, interactions = own_items(settings, public)
        weight = max(min(interactions / (users * items), 1.0) ** 0.5, LEAST_WEIGHT)
        return self.model_copy(update={"unobserved_weight": weight})

    @property
    def asks_for_counts(self) -> bool:
        """Whether users and those of each item are counted before the first round."""
        return self.takes_newton_steps or self.unobserved_weight is None

    @property
    def takes_newton_steps(self) -> bool:
        """Whether the server divides the mean change by each item's Hessian."""
        return self.aggregation == "delta" and self.server_optimizer == NEWTON

    def statistics(self, settings: Any) -> Mapping[str, Statistic]:
        found = super().statistics(settings)
        if not self.asks_for_counts:
            return found
        return {**found, COUNTS: Statistic(per_item=True, steps=1), POPULATION: Statistic(False, 1, True)}

    def client_statistics(self, settings: Any, histories: Interactions, items: range) -> Update:
        found = super().client_statistics(settings, histories, items)
        if not self.asks_for_counts:
            return found
        sums = found.sums | {COUNTS: count_of(histories, items)}
        if items.start == 0:
            sums[POPULATION] = torch.tensor([histories.num_users, 0, 0], dtype=torch.float64)
        return replace(found, sums=sums)

    def update_shapes(self, plan: Plan, task: ClientTask) -> dict[str, int]:
        found = super().update_shapes(plan, task)
        return found | {GRAM: plan.settings.model.factors**2} if self.takes_newton_steps else found

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        down, up = super().traffic(plan, size, round_number)
        return down, up + (plan.settings.model.factors**2 * FLOAT_BYTES if up and self.takes_newton_steps else 0)

    def row_ridge(self, plan: Plan) -> float:
        """Ridge of an item's row: a multiple of the squared norm of noise, over items that have rows of their own."""
        users, items, interactions = own_items(plan.settings, plan.public)
        density = min(interactions / (users * items), 1.0)
        residual = self.others / (self.others + (1 - self.others) * density)
        noise: float = density * (residual * (users**0.5 + items**0.5)) ** 2
        return self.item_ridge * noise

    @torch.no_grad()
    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        if not self.takes_newton_steps or not aggregate.weight:
            return super().server_update(plan, state, aggregate)
        (name,) = plan.architecture.tables
        rows = state.full[name].view(plan.architecture.tables[name])
        change = mean_changes(state.full, aggregate)[name].view_as(rows) / self.local_lr
        outer = torch.stack([update.sums[GRAM].to(rows) for _, update in aggregate.parts() if update.weight]).sum(0)
        gram_matrix = outer.view(rows.shape[1], -1) / aggregate.weight
        users = num_users(plan.public)
        shares = (plan.public.statistics[COUNTS] / users).clamp(max=1).to(rows)
        before = state.algorithm_state.get(NEWTON, {})
        share = self._participation(plan, aggregate)
        kept, rate = running_gram(before, gram_matrix, share)
        step = newton_step(rows, change, kept[GRAM], shares, self.others, self.row_ridge(plan) / users)
        if share == 1 and self.server_momentum:
            kept[REACHED] = rows.add(step, alpha=self.server_lr).view(-1)
            last = before.get(REACHED, state.full[name])
            moved = kept[REACHED].add(kept[REACHED] - last, alpha=self.server_momentum)
        else:  # at once what momentum would come to
            moved = rows.add(step, alpha=self.server_lr / (1 - self.server_momentum) * rate)
        return State(
            state.full | {name: moved.view(-1)}, state.round_number + 1, state.algorithm_state | {NEWTON: kept}
        )

    def _participation(self, plan: Plan, aggregate: Aggregate) -> float:
        """Share of all clients, by weight, that took part in a round; 1 where all are asked and waited for."""
        fleet, statistics = plan.settings.fleet, plan.public.statistics
        if fleet.clients_per_round is None and fleet.asynchronous.is_synchronous:
            return 1.0
        users = num_users(plan.public)
        everybody = users * self.weight(float(statistics[COUNTS].sum()) / users)  # exact for equal weights and data's
        return min(aggregate.weight / everybody, 1.0) if everybody else 1.0

    def client_update(self, plan: Plan, task: ClientTask, client: Client) -> tuple[Update, Weights]:
        (client_update,) = self.client_updates(plan, client.clients, [ScheduledTask(client.number, task)])
        return client_update.update, {name: rows[0] for name, rows in client_update.local_state.items()}

    def client_updates(self, plan: Plan, clients: Clients, scheduled: list[ScheduledTask]) -> Iterator[ClientUpdate]:
        for task, client_ids in group_by_task(scheduled):
            yield from self._updates_of_size(plan, clients, task, client_ids)

    def _updates_of_size(
        self, plan: Plan, clients: Clients, task: ClientTask, client_ids: list[int]
    ) -> Iterator[ClientUpdate]:
        (name,) = plan.architecture.tables
        (user_name,) = plan.architecture.user_vectors
        space = subspace_of(task.projections[name])
        factors = plan.settings.model.factors
        compact = task.vectors[name]
        histories = [clients.train.of(client) for client in client_ids]
        rows, users = self._solve_users(compact, space, factors, histories)
        own = 1 - self.others
        slopes = [(own * (of @ user) - 1)[:, None] * user for of, user in zip(rows, users, strict=True)]
        bounds = self._bounds(users, slopes, compact, factors)
        together = [place for place, bound in enumerate(bounds) if bound <= self.max_change]
        alone = [[place] for place, bound in enumerate(bounds) if not bound <= self.max_change]
        for places in [together, *alone] if together else alone:
            weights = [self.weight(len(histories[place])) for place in places]
            parts = [(histories[place], slopes[place], weight) for place, weight in zip(places, weights, strict=True)]
            outer = (users[places].T * torch.tensor(weights, dtype=users.dtype)) @ users[places]
            change = self._change(compact, space, factors, outer, parts)
            total = sum(weights)
            if self.sends_weights:
                change = change.add_(compact, alpha=total)
            sums = {name: change} | ({GRAM: outer.reshape(-1)} if self.takes_newton_steps else {})
            yield ClientUpdate(
                task, [client_ids[place] for place in places], Update(sums, total), {user_name: users[places]}
            )

    def _solve_users(
        self, compact: Tensor, space: Subspace, factors: int, histories: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """The rows of the items of some users, and the users' vectors."""
        gram_matrix = gram(compact, space, factors)
        together = space.recover_rows(
            compact, torch.cat(histories), factors
        )  # the table is validated once, not per user
        rows = list(torch.split(together, [len(mine) for mine in histories]))
        return rows, torch.stack([self.solve(of, gram_matrix) for of in rows])

    def _bounds(self, users: Tensor, slopes: list[Tensor], compact: Tensor, factors: int) -> list[float]:
        """A bound of each user's largest change: a slot's mean is at most its largest coordinate."""
        longest = float(compact.abs().max()) * factors if compact.numel() else 0.0  # of any v·u with |u| ≤ 1
        found = []
        for user, slope in zip(users, slopes, strict=True):
            most = float(user.abs().max()) if user.numel() else 0.0
            everywhere = self.others * longest * most * most
            largest = self.local_lr * (everywhere + (float(slope.abs().max()) if slope.numel() else 0.0))
            found.append(max(largest, most * most) if self.takes_newton_steps else largest)
        return found

    def _change(
        self, compact: Tensor, space: Subspace, factors: int, outer: Tensor, parts: list[tuple[Tensor, Tensor, float]]
    ) -> Tensor:
        """The weighted change of all users: one pass over the items."""
        touched, order = torch.cat([items for items, _, _ in parts]).sort(stable=True)
        moved = torch.cat([weight * slope for _, slope, weight in parts])[order]
        sums, counts = torch.zeros(space.size, dtype=compact.dtype), torch.zeros(space.size, dtype=torch.int32)
        for first, block in item_blocks(compact, space, factors):
            slope = self.others * (block @ outer)
            low, high = torch.searchsorted(touched, torch.tensor([first, first + len(block)])).tolist()
            slope.index_add_(0, touched[low:high] - first, moved[low:high])
            ops.accumulate_range(space.layout, slope.view(-1), first * factors, sums, counts)
        return sums.div_(counts.clamp_(min=1)).mul_(-self.local_lr)

    def solve(self, rows: Tensor, gram_matrix: Tensor) -> Tensor:
        """The user's vector from the rows of their own items and the Gram matrix of all items."""
        weight = self.others
        matrix = (1 - weight) * rows.T @ rows + weight * gram_matrix
        matrix.diagonal().add_(self.ridge)
        solution: Tensor = torch.linalg.solve(matrix, rows.sum(0))
        return solution

    def scoring_vectors(self, plan: Plan, task: ClientTask, clients: Clients, users: list[int]) -> Weights:
        (name,) = plan.architecture.tables
        (user_name,) = plan.architecture.user_vectors
        space = subspace_of(task.projections[name])
        histories = [clients.train.of(user) for user in users]
        return {user_name: self._solve_users(task.vectors[name], space, plan.settings.model.factors, histories)[1]}

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        (name,) = plan.architecture.tables
        table = full[name].view(plan.architecture.tables[name])
        everything, of = table.T @ table, clients.train.of
        return lambda users: torch.stack([self.solve(table[of(user)], everything) for user in users.tolist()]) @ table.T


def mf_incompatibility(kind: str, settings: Any) -> str | None:
    """Why the other tables do not go with an algorithm that solves for users; None if they do."""
    if settings.model.kind != "mf" or settings.model.item_bias:
        return f"algorithm.kind={kind!r} is for model.kind='mf' without item_bias; 'gradient' serves others"
    if settings.subspace.method not in SUBSPACE_METHODS:
        return f"algorithm.kind={kind!r} needs subspaces, not method={settings.subspace.method!r}: use 'gradient'"
    if isinstance(settings.subspace, Fair) and settings.subspace.compress != "tables":
        return f"algorithm.kind={kind!r} has one table and nothing else: leave out subspace.compress"
    return None


def num_users(public: PublicStatistics) -> float:
    """The number of users that the statistics are about."""
    return max(float(public.statistics[POPULATION][0]), 1.0)


def own_items(settings: Any, public: PublicStatistics) -> tuple[float, int, float]:
    """The number of users, of items that have rows of their own (any items if none has), and of their interactions."""
    counts = public.statistics[COUNTS]
    supported = counts >= max(settings.subspace.min_support, 1)
    own = counts[supported if bool(supported.any()) else counts > 0]
    return num_users(public), max(len(own), 1), float(own.sum())


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
