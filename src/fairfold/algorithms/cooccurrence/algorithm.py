"""The default algorithm: partial correlations of items from one sum of co-occurrences over clients.

With x a user's history over the H leading items (1 where the user has an item) and n their number, a client uploads
x xᵀ/√n (:mod:`.cooccurrence`). From the sum G over clients follow the items' partial correlations S and their leading
eigenvectors (:mod:`.solver`): a row W_j and two numbers a_j, b_j for every item. A user's score of item j is
b_j ⟨W_j, Σ a_i W_i⟩ over their history, and a little for each of j's nearest neighbors that they have: what λ holds
down of rare items, neighbors bring back (:mod:`.scorer`). A new user needs their history alone.

A client uploads at most as many bytes as its capacity is of the whole sum, in parts under masks (:mod:`.parts`),
and its model is cut to bytes by :mod:`fairfold.methods.truncated`; splits and solver settings are tuned
(:mod:`.tuning`). Items outside the head, or beyond what a client holds, come last, in the order of popularity. A client
that takes part again uploads what has changed, by the :class:`.SyncState` of each item, updated once acknowledged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.cooccurrence import cooccurrence, low_rank, scorer, solver, tuning
from fairfold.algorithms.cooccurrence.cooccurrence import REQUEST, SUM, SYNC_STATE, USERS, is_private, model_of
from fairfold.algorithms.cooccurrence.groups import GROUP_SUMS, add_to_groups
from fairfold.algorithms.cooccurrence.parts import add_parts, is_dropped, is_uploaded
from fairfold.algorithms.cooccurrence.scorer import DEFAULT_QUALITY, ROWS, CoOccurrenceArchitecture
from fairfold.algorithms.cooccurrence.solver import SolverSettings
from fairfold.algorithms.cooccurrence.tuning import QUALITY, Tuning
from fairfold.algorithms.cooccurrence.uploads import CoOccurrenceUploads
from fairfold.config.fleet import SecurePrivacy
from fairfold.errors import InvalidMessage
from fairfold.federation.algorithm import COUNTS, FixedPointUpdates, PrivateReleases, Tunable
from fairfold.federation.architecture import Architecture
from fairfold.federation.clients import Clients
from fairfold.federation.noise import actual_noise_std
from fairfold.federation.plan import Plan
from fairfold.federation.updates import (
    PLACES,
    Aggregate,
    ClientTask,
    ClientUpdate,
    PublicStatistics,
    ScheduledTask,
    State,
    Update,
    nonzero_values,
    same_vectors,
    stored_vector,
    vector_in,
)
from fairfold.methods import Truncated
from fairfold.privacy import gram
from fairfold.privacy.accounting import Release
from fairfold.subspace.projection import Projection
from fairfold.typing import FLOAT_BYTES, Weights

SOLVER = "solver"  # name of the :class:`SolverSettings` in the server's state
# Keys that have no effect under differential privacy, where a rule decides
TUNED_KEYS = (
    "min_item_users", "beta", "ridge", "history_exponent", "support", "neighbor_weight", "popularity_weight", "tune"
)  # fmt: skip


class CoOccurrence(CoOccurrenceUploads, scorer.HistoryScoring, Tunable, FixedPointUpdates, PrivateReleases):
    """Partial correlations of items from one co-occurrence sum.

    Attributes:
        kind: Its name in settings.
        beta: Items weigh by the power −β of the number of their users.
        ridge: 75^(1 − κ) times this is λ, added to the diagonal before the inverse (docs/default-recommender.md).
        history_exponent: A history of n items weighs each of its pairs n to the power −κ: this is κ.
        support: Items with fewer users are left out of the head, and more where there are 32 items for every user.
        min_item_users: Items that fewer users of one secure sum are expected to have are left out; 0 leaves out none.
        max_items: Size of the head at most.
        pair_weight: Weight of a listed pair, against 1 for what the rows say.
        neighbor_weight: What a neighbor of similarity 1 adds to a score.
        popularity_weight: What the share of users that have an item adds to its score, divided by 1 + items of a user;
            times 1 + 100 / users, so that few users are served more by popularity.
        tune: Whether splits of budgets and solver settings are tuned, where there are rounds for it.
    """

    DEFAULTS: ClassVar = {
        "model": {"factors": 384},
        "subspace": {"method": "truncated"},
        "fleet": {"clients_per_round": None},
        "run": {"rounds": 16, "evaluate_every": 16},
    }

    depends_on_model: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    fixed_point: ClassVar = {SUM: cooccurrence.UNIT, QUALITY: cooccurrence.UNIT}
    nested_sums: ClassVar = frozenset({SUM})
    releases: ClassVar = {COUNTS: Release(0.1, 1.0), SUM: Release(0.9, sqrt(0.5))}
    public_sums: ClassVar = frozenset({USERS})

    kind: Literal["co_occurrence"] = "co_occurrence"
    beta: float = Field(0.15, ge=0, le=2)
    ridge: float = Field(4.0, gt=0)
    history_exponent: float = Field(0.5, ge=0, le=1)
    support: int = Field(3, ge=1, lt=2**31)
    min_item_users: int = Field(scorer.DEFAULT_MIN_ITEM_USERS, ge=0, lt=2**31)
    max_items: int = Field(2**24 - 1, ge=1, lt=2**24)
    pair_weight: float = Field(0.8, ge=0, le=1)
    neighbor_weight: float = Field(0.05, ge=0, le=1)
    popularity_weight: float = Field(1.0, ge=0, le=100)
    tune: bool = True

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Under masks small devices upload in parts, before and after tuning: rounds for all of them."""
        return {**cls.DEFAULTS, "run": dict.fromkeys(cls.DEFAULTS["run"], cooccurrence.default_rounds(given))}

    def fixed_settings(self, settings: Any) -> dict[str, dict[str, Any]]:
        """Differential privacy permits one upload: one round."""
        return {"run": dict.fromkeys(self.DEFAULTS["run"], 1)} if is_private(settings) else {}

    def inactive_keys(self, settings: Any) -> Sequence[str]:
        return ["privacy.clip", *(f"algorithm.{key}" for key in TUNED_KEYS if is_private(settings))]

    def incompatibility(self, settings: Any) -> str | None:
        if settings.model.kind != "mf" or settings.model.item_bias:
            return "algorithm.kind='co_occurrence' is for model.kind='mf' without item_bias; 'gradient' serves others"
        good = settings.subspace.method == "truncated"
        return None if good else "algorithm.kind='co_occurrence' needs subspace.method='truncated'"

    def architecture(
        self, settings: Any, public: PublicStatistics, image_shape: Any = None, projections: Any = None
    ) -> Architecture:
        """Rows for the head: the items up to the last one with enough users among clients that upload it."""
        whole = cooccurrence.max_items(settings, public)
        counts = public.statistics.get(COUNTS)
        users = int(public.statistics.get(USERS, [public.num_users])[0])
        private, least = is_private(settings), cooccurrence.least_support(settings, public)
        if projections is not None:
            if ROWS not in projections or not 1 <= projections[ROWS].shape[0] <= whole:
                raise InvalidMessage("a task without rows of items", f"1 to {whole} rows", "Check both sides.")
            head = whole = projections[ROWS].shape[0]
        else:
            support = max(least, scorer.required_item_users(self.min_item_users, settings, users))
            if counts is not None and not private:
                whole = cooccurrence.num_supported(counts[:whole], support)
            head = cooccurrence.covered_items(settings, public, whole, None if private else counts, support)
            if counts is not None and private:
                head = whole = gram.num_items_under_noise(users, actual_noise_std(settings, SUM, users), head)
        length = 0.0 if counts is None else float(counts[:head].sum()) / max(users, 1)
        # A Krylov space of three times as many columns, and its image, are in memory while they are found.
        factors = min(settings.model.factors, max(solver.LEAST_COLUMNS, low_rank.TABLE_NUMBERS // (2 * head)))
        sizes = (public.num_items, public.num_users, head, factors, users, length)
        architecture = CoOccurrenceArchitecture(*sizes, self.neighbor_weight > 0 and not private, whole)
        architecture.min_support, architecture.streamed = least, self.streamed
        most = cooccurrence.max_items(settings, public)
        if counts is not None and cooccurrence.num_supported(counts, least) > most:
            architecture.max_rows = most
        return architecture

    def tuning(self, plan: Plan) -> Tuning:
        """Candidates and schedule of a plan, built once."""
        model = model_of(plan)
        if model.tuning is None:
            assert isinstance(plan.method, Truncated)
            budgets = [plan.method.budget(model.tensors, capacity) for capacity in plan.capacities]
            parts = cooccurrence.num_parts(plan.settings, plan.public)
            model.tuning = Tuning.of(budgets, model, plan.settings.run.rounds if self.tune else 0, parts)
        return model.tuning

    def resolve(self, plan: Plan, state: State) -> Plan:
        splits = self.tuning(plan).splits_in(state.round_number, state.algorithm_state.get(QUALITY, {}))
        return replace(plan, architecture=model_of(plan).with_splits(splits), _cache={})

    def participating_share(self, plan: Plan, round_number: int) -> float:
        fleet, privacy = plan.settings.fleet, plan.settings.privacy
        everybody = fleet.clients_per_round is None and fleet.asynchronous.is_synchronous
        schedule, rounds = self.tuning(plan).schedule, plan.settings.run.rounds
        if not everybody or not schedule.num_candidates or schedule.uploads(round_number):  # there is news from all
            return 1.0
        least = float(tuning.MIN_PANEL)
        if isinstance(privacy, SecurePrivacy):  # as many of every size as a sum has to hide
            smallest = min(fleet.shares) / sum(fleet.shares) if fleet.shares else 1 / len(plan.capacities)
            least = max(least, 2 * privacy.fewest_clients(fleet) / smallest)
        return self.tuning(plan).panel_share(round_number, rounds, least / max(model_of(plan).num_known_users, 1))

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        schedule = self.tuning(plan).schedule
        upload = self.upload_projection(plan, size, schedule.part(round_number)).size
        if schedule.candidate(round_number) is not None:
            upload = tuning.REPORT_SIZE
        elif USERS in plan.public.statistics:
            news = plan.settings.fleet.clients_per_round is not None or round_number in (0, schedule.end)
            length, most = model_of(plan).length, self.max_items_of(plan, size)
            totals = plan.public.statistics[USERS]
            upload = cooccurrence.expected_upload_size(totals, length, most, upload, news=news)
        return self.received_bytes(plan.assignments(0)[size]), upload * FLOAT_BYTES

    def tasks(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[ClientTask]:
        model, like = model_of(plan), state.full[ROWS]
        users = model.num_known_users * self.participating_share(plan, state.round_number)
        request = self.tuning(plan).request(state.round_number, users)
        shared = dict[str, Tensor]()
        if is_private(plan.settings):
            shares = gram.item_shares(plan.public.statistics[COUNTS], model.head)
            shared[cooccurrence.ITEM_SHARES] = shares.to(like.dtype)
        found, schedule = [], self.tuning(plan).schedule
        for task in super().tasks(self.resolve(plan, state), state, sizes):
            context: dict[str, Projection] = {QUALITY: tuning.REPORT_PROJECTION}
            if schedule.candidate(state.round_number) is None:
                context = {SUM: self.upload_projection(plan, task.size, schedule.part(state.round_number))}
            extra = shared | {REQUEST: like.new_tensor([*request, self.max_items_of(plan, task.size)])}
            found.append(replace(task, vectors=task.vectors | extra, context=context))
        return self.with_streams(plan, state.full, found)

    def client_updates(self, plan: Plan, clients: Clients, scheduled: list[ScheduledTask]) -> Iterator[ClientUpdate]:
        few = QUALITY in scheduled[0].task.context and plan.settings.privacy.uses_secure_aggregation
        step = tuning.EXACT_USERS if few else len(scheduled)
        for start in range(0, len(scheduled), step):
            yield from super().client_updates(plan, clients, scheduled[start : start + step])

    def batch_update(
        self, plan: Plan, task: ClientTask, clients: Clients, client_ids: list[int], *, check: bool = True
    ) -> tuple[Tensor, Update, Weights]:
        chosen = clients.sample_indices(client_ids)
        items, states = clients.train.items[chosen], clients.local_state[SYNC_STATE][chosen, 0]
        lengths = clients.train.counts_by_user[client_ids]
        valid = torch.full((len(client_ids),), self.max_change >= 1)
        if QUALITY in task.context:
            before = clients.local_state[DEFAULT_QUALITY][client_ids]
            return valid, *self._report(plan, task, items, lengths, states, before)
        holds_out = float(task.vectors[REQUEST][0]) < 1
        wanted = tuning.training_mask(items, lengths) if holds_out else torch.ones_like(items).bool()
        return valid, *self.upload(plan, task, items, lengths, states, wanted)

    def _report(
        self, plan: Plan, task: ClientTask, items: Tensor, lengths: Tensor, states: Tensor, before: Tensor
    ) -> tuple[Update, Weights]:
        """How well a candidate finds held-out items by the others, and the local state afterwards."""
        present = ~is_dropped(states)
        mine, counts = cooccurrence.select_items(items, lengths, present)
        _, candidate, share, _ = task.vectors[REQUEST].tolist()
        double = replace(task, vectors={name: vector.double() for name, vector in task.vectors.items()})
        report, after = tuning.validate(
            self.task_scorer(double),
            mine,
            counts,
            is_uploaded(states[present]),
            before,
            is_default=candidate == 0,
            share=share,
            catalogue=plan.public.num_items,
            top=plan.settings.run.top,
        )
        return Update({QUALITY: report.to(task.vectors[ROWS].dtype)}, float(len(lengths))), {DEFAULT_QUALITY: after}

    def update_shapes(self, plan: Plan, task: ClientTask) -> dict[str, int]:
        return {name: held.size for name, held in task.context.items() if name in self.fixed_point}

    def validate_update(self, plan: Plan, task: ClientTask, update: Update | None) -> str | None:
        problem = super().validate_update(plan, task, update)
        if problem is not None or update is None:
            return problem
        if SUM in update.sums:
            return self.norm_problem(task, update)
        return tuning.problem(update.sums[QUALITY], update.weight * (1 + 1e-5))

    @torch.no_grad()
    def server_update(self, plan: Plan, state: State, aggregate: Aggregate) -> State:
        size = cooccurrence.triangle_size(model_of(plan).head)
        before = vector_in(state.algorithm_state.get(SUM, {}), SUM, size)
        uploads = dict[int, list[tuple[Projection, Tensor]]]()
        reports = dict(state.algorithm_state.get(QUALITY, {}))
        for task, update in aggregate.parts():
            if SUM in update.sums:
                uploads.setdefault(task.group, []).append((task.context[SUM], update.sums[SUM]))
            else:
                self.tuning(plan).add_report(reports, task.round_number, task.size, update.sums[QUALITY])
        held = {QUALITY: reports} if reports else {}
        if plan.settings.fleet.secure_groups > 1:
            held[GROUP_SUMS], sums = add_to_groups(state.algorithm_state.get(GROUP_SUMS, {}), uploads, size)
        else:
            sums = add_parts(before, uploads.get(0, []), size)
        held[SUM] = stored_vector(SUM, sums)
        algorithm_state = state.algorithm_state | held
        after = State(state.full, state.round_number + 1, algorithm_state)
        chosen = self.solver_settings(plan, after)
        stored, last = torch.tensor(chosen, dtype=torch.float64), state.algorithm_state.get(SOLVER, {}).get(SOLVER)
        unchanged = before is not None and last is not None and same_vectors(sums, before) and stored.equal(last)
        if unchanged or not bool(nonzero_values(sums).any()):
            return after
        if not self.tuning(plan).schedule.completes(state.round_number, plan.settings.run.rounds):
            algorithm_state.pop(SOLVER, None)  # solved when all parts are here
            return after
        dtype = state.full[ROWS].dtype
        solved = {name: of.to(dtype).reshape(-1) for name, of in self.solve(plan, sums, chosen).items()}
        return State(state.full | solved, after.round_number, algorithm_state | {SOLVER: {SOLVER: stored}})

    def noise(self, plan: Plan) -> float:
        """Standard deviation of the noise in the co-occurrence sum; 0 without differential privacy."""
        users = model_of(plan).num_known_users
        return actual_noise_std(plan.settings, SUM, users) if is_private(plan.settings) else 0.0

    def solver_settings(self, plan: Plan, state: State) -> SolverSettings:
        """What the model of a round is solved with."""
        model, noise = model_of(plan), self.noise(plan)
        scaling, columns = self.tuning(plan).solver_in(state.round_number, state.algorithm_state.get(QUALITY, {}))
        if noise:
            return solver.settings_under_noise(model.head, columns, noise)
        ridge = solver.scaled_ridge(self.ridge, self.history_exponent)
        popularity = self.popularity_weight * tuning.popularity_factor(model.num_known_users)
        weights = (self.neighbor_weight, model.head, popularity)
        return scaling.apply(SolverSettings(ridge, columns, self.beta, *weights), _head_counts(plan), model.min_support)

    def solve(self, plan: Plan, sums: Tensor, chosen: SolverSettings) -> Weights:
        """The model's tensors from a co-occurrence sum."""
        model = model_of(plan)
        items = int(chosen.items)
        if sums.is_sparse:
            kept = model.catalogue = model.catalogue or solver.LargeCatalogue()
            return solver.solve_model(kept.gram(sums, items), _head_counts(plan), chosen, model)
        matrix = cooccurrence.unpack_triangle(sums[: cooccurrence.triangle_size(items)].float())
        if noise := self.noise(plan):
            matrix = gram.recover_gram(matrix, plan.public.statistics[COUNTS], model.num_known_users, noise)
        return solver.solve_model(matrix, _head_counts(plan), chosen, model)

    def notes(self, plan: Plan, state: State) -> list[str]:
        known = state.algorithm_state
        if is_private(plan.settings):
            return solver.noise_notes(known[SUM][SUM], self.noise(plan), plan.public.num_items) if SUM in known else []
        if SOLVER not in known:
            return []
        held = [one.projections or {} for one in self.resolve(plan, state).assignments(0)]
        chosen = SolverSettings(*known[SOLVER][SOLVER].tolist())
        names = list(map(str, plan.capacities))
        notes = self.tuning(plan).notes(state.round_number, known.get(QUALITY, {}), chosen, names, held)
        return notes + self.upload_notes(plan, listed=SUM + PLACES in known.get(SUM, {}))


def _head_counts(plan: Plan) -> Tensor:
    head = model_of(plan).head
    return plan.public.statistics.get(COUNTS, torch.ones(head))[:head]
