"""Ratings by variational Bayes from incremental sums: biases and tastes, and how certain they are.

A rating, less the mean of all and in units of their standard deviation, is modeled as bᵤ + bᵢ + u·vᵢ and noise of
variance σ². An item's row is w = (bᵢ, vᵢ), a user's (bᵤ, u). Of a user a mean row and a d × d covariance C follow from
their own ratings alone. With c = (1, u) a user's *code*, x = (1, vᵢ) and e the error that is left, an item's row solves
Σ (e·c − C₀·x) = shrinkage·(w − m) over its raters, where C₀ is C without its first row, as the 1 in a code is certain.
That takes a d × d matrix for every item; but sums of rows suffice. A client adds, for each of its items,

    e·c − C₀·x + ½t·w,   and t,   with t = |c|² + tr C₀

and the server solves (½Σt + shrinkage)·w = Σ + shrinkage·m. At a fixed point that *is* the equation above; and as ½Σt
is at least half of Σ(c·cᵀ + C₀) in every direction, no step is ever too long, whichever clients are sampled. A client
stores what it last sent of its own items, and sends the change.

With K the mean of c·cᵀ + C₀ over all ratings, n = Σt / tr K is about the number of an item's raters, and the covariance
of its row is taken to be σ²(n·K + shrinkage)⁻¹. n is the last number of the row: a client that solves for its user
trusts rows of few ratings less. In a row that k items share stands n/k.

There is nothing to tune. A client also adds the moments of its user: c·cᵀ, the expected squared errors, and
(bᵤ, u, f)(bᵤ, u, f)ᵀ with f the features: 1, the log of the number of ratings, the mean row of their items. From these
follow σ² and K, the regression A of users' rows on features, and the variances around it. Of items, m is a line over
the log of n, and the variances around it follow from the rows. Shrinkage is σ² by these variances (empirical Bayes).

Updates are about rows of the *largest* clients, as many a round as a client's own table has: a window that moves on,
the same for all clients of a size. Sums are computed at the row w′ that a client holds. To be those at w they lack
(c·cᵀ + C₀)(w′ − w) − ½t·(w′ − w): the server, which knows both rows and Σt by size, adds that with n·K for the sum of
the first term. With ``streamed``, updates are about rows of the *full* table, which are streamed to clients; these
cache the rows of their own items (docs/default-recommender-derivation.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms import rating_model, rating_updates
from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.incremental import IncrementalAlgorithm, chain_of, items_per_row
from fairfold.algorithms.rating_model import NOISE, ROWS, USERS, RatingHyperparameters, UserPosteriors
from fairfold.algorithms.rating_updates import (
    ITEM_FIXED_POINT,
    RATING_OFFSETS,
    RATING_TOTALS,
    USER_FIXED_POINT,
    Window,
    best_known_rows,
)
from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import COUNTS, FixedPointUpdates, NumbersItems, PredictsRatings, Statistic, count_of
from fairfold.federation.architecture import Architecture
from fairfold.federation.bounds import BoundsStatistics
from fairfold.federation.clients import Clients
from fairfold.federation.plan import STREAM, Plan, StreamsRows
from fairfold.federation.updates import Aggregate, ClientTask, PublicStatistics, State, Update
from fairfold.methods import Fair
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.subspace import Subspace
from fairfold.typing import FLOAT_BYTES, Weights

LAST_UPDATE = "last_update"  # name of the local state, per rating, of what was last sent of its item
CACHE = "cache"  # name of the local state, per rating, of its item's full row, and whether it has been streamed
WEIGHTS = "weights"  # name of the sums of t, by row and size, in the server's state
DAMPING = 5.0  # imagined ratings without any offset that draw the mean by which items are numbered to zero


class BayesianRatings(
    IncrementalAlgorithm, NumbersItems, FixedPointUpdates, PredictsRatings, StreamsRows, BoundsStatistics
):
    """Ratings by variational Bayes from incremental sums.

    Attributes:
        kind: Its name in settings.
        group_similar: Number the items so that those which share a row have similar mean ratings (ranked). Needs sums
            of ratings beside the counts, so it is left out where ``popularity`` is not ``"catalogue"``.
        streamed: Stream the server's rows: a client also receives as many rows of the full table as its own has, others
            every round, sends updates of these, and caches those of its own items (docs/default-recommender.md).
        max_change: An update with a larger number is refused.
    """

    DEFAULTS: ClassVar = {"model": {"factors": 8}, "subspace": {"reference_factors": 32, "tail_share": 0.125}}
    fixed_point: ClassVar = {ROWS: ITEM_FIXED_POINT.steps, USERS: USER_FIXED_POINT.steps}
    value_bounds: ClassVar = {ROWS: ITEM_FIXED_POINT.bound, USERS: USER_FIXED_POINT.bound}

    kind: Literal["ratings"] = "ratings"
    group_similar: bool | None = None
    streamed: bool = False
    max_change: float = Field(1e6, gt=0)

    def groups_similar_items(self, settings: Any) -> bool:
        """Whether items are numbered by their mean ratings; by default where there is a public order of popularity."""
        if self.group_similar is not None:
            return self.group_similar
        method = settings.subspace
        return isinstance(method, Fair) and method.ranked and not method.counts_items

    def incompatibility(self, settings: Any) -> str | None:
        if settings.model.factors < 3:
            return "algorithm.kind='ratings' needs model.factors >= 3: a bias, a taste, the number of ratings"
        if self.group_similar and not (isinstance(settings.subspace, Fair) and settings.subspace.ranked):
            return "group_similar=true is about the tail that unpopular items share: use subspace.mapping='ranked'"
        if self.group_similar and settings.subspace.counts_items:
            return "popularity='counts' sums counts alone, and group_similar=true needs sums of ratings: use false"
        return super().incompatibility(settings)

    def inactive_keys(self, settings: Any) -> Sequence[str]:
        """``privacy.clip`` has no effect: numbers are in fixed point, and not clipped."""
        return ["privacy.clip"]

    def predicts_ratings(self, settings: Any) -> bool:
        return True

    def architecture(
        self, settings: Any, public: PublicStatistics, image_shape: Any = None, projections: Any = None
    ) -> Architecture:
        return rating_model.RatingArchitecture(public.num_items, public.num_users, settings.model.factors)

    def sample_state_shapes(self, plan: Plan) -> dict[str, int]:
        factors = plan.settings.model.factors
        return {LAST_UPDATE: factors} | ({CACHE: factors + 1} if self.streamed else {})

    def statistics(self, settings: Any) -> dict[str, Statistic]:
        found = {COUNTS: Statistic(True, 1), RATING_TOTALS: Statistic(False, 1)}
        if self.groups_similar_items(settings):
            found[RATING_OFFSETS] = Statistic(True, rating_updates.OFFSET_STEPS)
        return found

    def client_statistics(self, settings: Any, histories: Interactions, items: range) -> Update:
        secure = settings.privacy.uses_secure_aggregation
        rating_updates.require_ratings(histories, secure=secure)
        sums = {COUNTS: count_of(histories, items)}
        if items.start == 0:
            sums[RATING_TOTALS] = rating_updates.rating_totals(histories, secure=secure)
        if self.groups_similar_items(settings):
            sums[RATING_OFFSETS] = rating_updates.rating_offsets(histories, items, secure=secure)
        return Update(sums, float(histories.num_users))

    def bounded_statistics(self, settings: Any, statistics: Update, num_items: int) -> Update:
        secure, (sums, weight) = settings.privacy.uses_secure_aggregation, (statistics.sums, statistics.weight)
        return replace(statistics, sums=rating_updates.bounded_rating_sums(sums, weight, num_items, secure=secure))

    def numbering(self, plan: Plan) -> Tensor | None:
        """Number items so that those which the hash folds into one row have similar mean ratings."""
        if not self.groups_similar_items(plan.settings):
            return None
        known = plan.public.statistics
        means = known[RATING_OFFSETS] / (known[COUNTS] + DAMPING)
        return rating_model.similar_item_numbers(chain_of(plan, 0), plan.settings.model.factors, means)

    @torch.no_grad()
    def init(self, plan: Plan, full: Weights) -> State:
        largest = self.update_space(chain_of(plan, 0)[-1])
        count, total, squares = plan.public.statistics[RATING_TOTALS].tolist()
        mean = total / count if count else 0.0
        deviation = max(squares / count - mean * mean, 0.0) ** 0.5 if count else 0.0
        center = torch.tensor([mean, deviation or 1.0, NOISE], dtype=full[ROWS].dtype)
        return State(full | {ROWS: largest.recover(largest.reduce(full[ROWS])), "center": center})

    def update_space(self, largest: Subspace) -> Subspace:
        """The subspace whose rows updates are about: the largest clients', or the full table if it is streamed."""
        return Subspace(largest.full_size, largest.full_size) if self.streamed else largest

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        held = plan.assignments(0)[size]
        if held.projections is None:
            return 0, 0
        rows = held.projections[ROWS].size * FLOAT_BYTES
        users = plan.architecture.user_vectors[USERS] * FLOAT_BYTES
        return held.size() * FLOAT_BYTES + rows * self.streamed, rows + users

    def update_shapes(self, plan: Plan, task: ClientTask) -> dict[str, int]:
        return {ROWS: task.projections[ROWS].size, USERS: plan.architecture.user_vectors[USERS]}

    def tasks(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[ClientTask]:
        held = [one.projections[ROWS] for one in plan.assignments(state.round_number) if one.projections is not None]
        largest = max(held, key=lambda projection: projection.size)
        tasks = [replace(task, context={ROWS: largest}) for task in super().tasks(plan, state, sizes)]
        return self.with_streams(plan, state.full, tasks)

    def streamed_rows(self, plan: Plan, full: Weights, task: ClientTask) -> Tensor | None:
        if not self.streamed:
            return None
        return full[ROWS].view(plan.architecture.tables[ROWS])[self.window(plan, task).rows].view(-1)

    def window(self, plan: Plan, task: ClientTask) -> Window:
        """The rows that a task's update is about."""
        largest = self.update_space(subspace_of(task.context[ROWS]))
        return Window(largest, subspace_of(task.projections[ROWS]), task.round_number, plan.settings.model.factors)

    def batch_update(
        self, plan: Plan, task: ClientTask, clients: Clients, client_ids: list[int], *, check: bool = True
    ) -> tuple[Tensor, Update, Weights]:
        window = self.window(plan, task)
        known = RatingHyperparameters.of(task.vectors)
        chosen, owners, targets = rating_updates.ratings_of(known, clients, client_ids)
        items, dtype = clients.train.items[chosen], targets.dtype
        rows = rating_updates.compact_rows(plan, task, items)
        places = window.places(items)
        sample_state = dict[str, Tensor]()
        if self.streamed:
            cache = clients.local_state[CACHE][chosen].to(dtype)
            sample_state[CACHE] = rating_updates.update_cache(cache, places, task.vectors[STREAM])
            rows = best_known_rows(sample_state[CACHE], rows)
        posteriors = UserPosteriors.of(rows, targets, owners, len(client_ids), known)
        row_sums, squares = posteriors.row_sums(rows, targets, owners)
        last_rows = clients.local_state[LAST_UPDATE][chosen].to(dtype)
        last_users = clients.local_state[USERS][client_ids].to(dtype)
        units = rating_updates.statistic_units(row_sums.shape[1] - 1)
        row_changes = (row_sums - last_rows) * (places >= 0)[:, None]
        user_changes = (posteriors.sums(squares) - last_users) * units
        if plan.settings.privacy.uses_secure_aggregation:
            row_changes = ITEM_FIXED_POINT.quantize(row_changes, owners * window.size + places)
            user_changes = USER_FIXED_POINT.quantize(user_changes, torch.arange(len(client_ids)))
        sample_state[LAST_UPDATE] = last_rows + row_changes
        user_state = {USERS: last_users + user_changes / units}
        changes = rating_updates.RatingUpdate(
            window, places, owners, row_changes, user_changes, sample_state, user_state
        )
        valid = (changes.bounds() <= self.max_change) | (not check)
        return valid, *changes.summed(valid)

    @torch.no_grad()
    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        next_round = state.round_number + 1
        if not len(aggregate):
            return replace(state, round_number=next_round)
        factors = plan.settings.model.factors
        largest = self.update_space(chain_of(plan, 0)[-1])
        # In double precision: changes of changes are added for as long as the run lasts.
        start = {ROWS: torch.zeros(largest.size), USERS: torch.zeros(plan.architecture.user_vectors[USERS])}
        before = {name: total.double() for name, total in state.algorithm_state.get("sums", start).items()}
        sums, users = before[ROWS].view(-1, factors).clone(), before[USERS]
        units = rating_updates.statistic_units(factors - 1).double()
        weights = dict(state.algorithm_state.get(WEIGHTS, {}))
        for task, update in aggregate.parts():
            rows = self.window(plan, task).rows
            changes = update.sums[ROWS].view(-1, factors).double()
            sums.index_add_(0, rows, changes)
            of_size = weights.get(str(task.size), torch.zeros(len(sums)))
            weights[str(task.size)] = of_size.double().index_add(0, rows, changes[:, -1])
            users = users + update.sums[USERS] / units
        algorithm_state = state.algorithm_state | {"sums": {ROWS: sums.view(-1), USERS: users}, WEIGHTS: weights}
        if not users[0] > 0:  # no ratings
            return replace(state, round_number=next_round, algorithm_state=algorithm_state)
        rounding = 1 / (USER_FIXED_POINT.steps * units) if plan.settings.privacy.uses_secure_aggregation else None
        known = rating_model.estimate_hyperparameters(users, RatingHyperparameters.of(state.full), rounding)
        sharing = items_per_row(largest, factors).clamp(min=1).double()
        last = largest.reduce(state.full[ROWS]).view(-1, factors)[:, :-1].double()
        corrections = self._corrections(plan, largest, state.full[ROWS], weights, known.metric)
        table, variances = rating_model.solve_items(sums + corrections, sharing, known, last)
        dtype = state.full[ROWS].dtype
        known = replace(known, variances=torch.stack([known.variances[0], variances]))
        full = {ROWS: largest.recover(table.view(-1).to(dtype))} | known.flat(dtype)
        return State(state.full | full, next_round, algorithm_state)

    def _corrections(self, plan: Plan, largest: Subspace, full: Tensor, weights: Weights, metric: Tensor) -> Tensor:
        """Corrections that make sums of smaller clients those of the largest's rows; zero if full rows are streamed."""
        table = largest.reduce(full).view(-1, plan.settings.model.factors).double()
        found = torch.zeros_like(table)
        for size, of_size in weights.items():
            held = subspace_of((plan.assignments(0)[int(size)].projections or {})[ROWS])
            if held.size < largest.size and not self.streamed:
                rows = largest.reduce(held.recover(held.reduce(full))).view_as(table).double()
                found[:, :-1] += rating_model.row_correction(rows[:, :-1], table[:, :-1], of_size, metric)
        return found

    def scoring_vectors(self, plan: Plan, task: ClientTask, clients: Clients, users: list[int]) -> Weights:
        known = RatingHyperparameters.of(task.vectors)
        chosen, owners, targets = rating_updates.ratings_of(known, clients, users)
        rows = rating_updates.compact_rows(plan, task, clients.train.items[chosen])
        if self.streamed and CACHE in clients.local_state:
            rows = best_known_rows(clients.local_state[CACHE][chosen].to(rows.dtype), rows)
        return {USERS: UserPosteriors.of(rows, targets, owners, len(users), known).rows}

    def block_scores(self, plan: Plan, task: ClientTask, vectors: Weights, items: Tensor) -> Tensor:
        rows = task.projections[ROWS].rows(task.vectors[ROWS], items)
        rows = rows if rows.dim() == 3 else rows[None]
        return RatingHyperparameters.of(task.vectors).predicted(vectors[USERS][:, None], rows)

    def predictor(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Predictor:
        train = clients.train
        if train.ratings is None:
            remedy = "Ask for a user of the run, or train a model of rankings (algorithm.kind='co_occurrence')."
            raise InvalidSettings("a history without ratings for a model of ratings", "ratings of its items", remedy)
        known = RatingHyperparameters.of(full)
        table = full[ROWS].view(plan.architecture.tables[ROWS])
        targets = known.centered(train.ratings)
        rows = UserPosteriors.of(table[train.items], targets, train.users, train.num_users, known).rows
        return lambda users, items: known.predicted(rows[users], table[items])

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], clients: Clients) -> Scorer:
        predict = self.predictor(plan, full, held, clients)
        items = torch.arange(plan.public.num_items)
        return lambda users: predict(users[:, None], items)
