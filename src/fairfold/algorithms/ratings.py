"""Ratings by variational Bayes from sums that remember: biases and tastes, and how sure of them one is.

A rating, less the mean of all and in units of their spread, is modelled as bᵤ + bᵢ + u·vᵢ and noise of variance σ². An
item's row is w = (bᵢ, vᵢ), a user's (bᵤ, u). Both are uncertain: of a user a mean row and a d × d covariance C follow
from their own ratings alone. With c = (1, u) a user's *code*, x = (1, vᵢ) and e the error that is left, an item's row
solves Σ (e·c − C₀·x) = pull·(w − m) over its raters, where C₀ is C without its first row, as the 1 in a code is
certain. That takes a d × d matrix for every item, far more than a row; but sums of rows suffice. A device adds, for
each of its items,

    e·c − C₀·x + ½t·w,   and t,   with t = |c|² + tr C₀

and the server solves (½Σt + pull)·w = Σ + pull·m. Where nothing moves any more that *is* the equation above, so the end
is exact; and as ½Σt is at least half of Σ(c·cᵀ + C₀) in every direction, no step is ever too long, whoever is drawn. A
device keeps what it last said of its own items, and sends the change.

With K the mean of c·cᵀ + C₀ over all ratings, n = Σt / tr K is about how many raters an item has, and the doubt about
its row is taken to be σ²(n·K + pull)⁻¹. n is the last number of the row: a device that solves its user believes rows of
few ratings less. In a row that k items share stands n/k.

Nothing is left to choose. Beside rows, a device adds the moments of its user: c·cᵀ, the squared errors to expect, and
(bᵤ, u, f)(bᵤ, u, f)ᵀ with f the user's facts: 1, the log of how many ratings, the mean row of their items. From these
sums σ² and K follow, the regression A of users' rows on their facts, and the variances around it. Likewise items: m is
a line over the log of n, and the variances around it follow from the rows, at the server alone. Pulls are σ² by these
variances (empirical Bayes), users' tastes having variance 1; a taste that the data do not bear out loses its own.

A device need not own an item's row to speak of it. It receives its own compact table, and speaks in the rows of the
*largest* devices, as many a round as its own table has: a window that moves on, the same for all devices of a size. Its
words are about the row w′ that it holds. To be about w they lack (c·cᵀ + C₀)(w′ − w) − ½t·(w′ − w): the server, which
knows both rows and Σt by size, adds that with n·K in place of the sum of the first term, whose mean K is. Without it
½t, which is too much in most directions, would draw the rows of large devices to those that small ones share.

Where rows are ``streamed`` that goes one step further. Devices speak in the rows of the *full* table, and those rows
pass by them as well: a device keeps the rows of its own items, beside what it said of them, and forgets the others. Its
user's row is then solved from full rows, as old as the last time they passed, and from its compact table where none has
yet. So the server's model is no longer bounded by what the largest device holds; what each device holds still is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.rating_rows import (
    NOISE,
    ROWS,
    USERS,
    Beliefs,
    Raters,
    RatingArchitecture,
    Spoken,
    Window,
    alike_places,
    beliefs_from,
    caught,
    known_rows,
    moved_to,
    solved_items,
)
from fairfold.algorithms.rating_words import ABOVE_STEPS, OF_ITEMS, OF_USERS, above, rated, require_ratings, units_of
from fairfold.algorithms.remembering import Remembering, chain_of, row_counts, rows_of
from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.projections import Projection
from fairfold.protocol.algorithm import COUNTS, count_of
from fairfold.protocol.architecture import Architecture, Picture
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Public, Sent, State, Totals
from fairfold.subspace import Subspace
from fairfold.values import BYTES, Weights

RATED = "rated"
"""Name of three sums over devices before the first round: how many ratings, their sum, the sum of their squares."""

ABOVE = "above"
"""Name of the sum, per item, of what its ratings are above their users' means."""
LAST = "last"
"""Name of what a device last said of each of its items, a row per rating: it stays there, and changes are sent."""

CACHE = "cache"
"""Name of the full rows of its own items that a device has kept, a row per rating, and whether one has come."""

STREAM = "stream"
"""Name of the rows of the server's table that pass by the devices of a size in a round."""

WEIGHTS = "weights"
"""Name of the sums of t, by row and size."""
DAMPING = 5.0
"""Imagined ratings without any bias that draw the mean by which items are numbered to zero."""


class RatingSquares(Remembering):
    """Ratings from sums that remember.

    Attributes:
        kind: Its name.
        alike: Number the items so that those which share a row have similar mean ratings (ranked). Needs sums of
            ratings beside the counts, so it is left out where ``popularity`` is not ``"catalogue"``.
        streamed: The server's rows stream by: a device also receives as many rows of the full table as its own has,
            others every round, speaks of these, and keeps those of its own items (docs/beyond.md).
        largest_change: An answer in which a number is larger than this is refused.
    """

    DEFAULTS: ClassVar = {"model": {"factors": 8}, "subspace": {"reference_factors": 32, "tail_share": 0.125}}
    grids: ClassVar = {ROWS: OF_ITEMS.steps, USERS: OF_USERS.steps}  # under masks
    bounds: ClassVar = {ROWS: OF_ITEMS.bound, USERS: OF_USERS.bound}
    kind: Literal["ratings"] = "ratings"
    alike: bool | None = None
    streamed: bool = False
    largest_change: float = Field(1e6, gt=0)

    def orders_alike(self, settings: Any) -> bool:
        """Whether items are numbered by their mean ratings; by itself where there is a public order of popularity."""
        ranked = getattr(settings.subspace, "ranked", False)
        return ranked and not settings.subspace.counted if self.alike is None else self.alike

    def problem_with(self, settings: Any) -> str | None:
        if settings.model.factors < 3:
            return "algorithm.kind='ratings' needs model.factors >= 3: a bias, a taste, how many ratings"
        if self.alike and not getattr(settings.subspace, "ranked", False):
            return "alike=true is about the tail that unpopular items share: use subspace.mapping='ranked'"
        if self.alike and settings.subspace.counted:
            return "popularity='counts' sums counts alone, and alike=true asks for sums of ratings: use alike=false"
        return super().problem_with(settings)

    def without_effect(self, settings: Any) -> Sequence[str]:
        """Its numbers lie on grids."""
        return ["privacy.bound"]

    def predicts_ratings(self, settings: Any) -> bool:
        return True

    def architecture(
        self,
        settings: Any,
        public: Public,
        picture: Picture | None = None,
        projections: Mapping[str, Projection] | None = None,
    ) -> Architecture:
        """See the base class."""
        return RatingArchitecture(public.items, public.users, settings.model.factors)

    def remembered(self, plan: Plan) -> dict[str, int]:
        factors = plan.settings.model.factors
        return {LAST: factors} | ({CACHE: factors + 1} if self.streamed else {})

    def surveys(self, settings: Any) -> dict[str, bool]:
        """How many have rated each item, how many ratings there are, their sum and that of their squares."""
        return {COUNTS: True, RATED: False} | ({ABOVE: True} if self.orders_alike(settings) else {})

    def survey(self, settings: Any, histories: Interactions, items: range) -> Answer:
        """See the base class."""
        masked = settings.privacy.sums_alone
        require_ratings(histories, masked=masked)
        sums = {COUNTS: count_of(histories, items)}
        if items.start == 0:
            sums[RATED] = rated(histories, masked=masked)
        if self.orders_alike(settings):
            sums[ABOVE] = above(histories, items, masked=masked)
        return Answer(sums, float(histories.num_users))

    def survey_grids(self, settings: Any) -> dict[str, int]:
        """See the base class: under masks."""
        return {COUNTS: 1, RATED: 1, ABOVE: ABOVE_STEPS}

    def numbering(self, plan: Plan) -> Tensor | None:
        """Items that share a row are alike: by their mean ratings, along the rows that the hash folds together."""
        if not self.orders_alike(plan.settings):
            return None
        survey = plan.public.survey
        return alike_places(chain_of(plan, 0), plan.settings.model.factors, survey[ABOVE] / (survey[COUNTS] + DAMPING))

    @torch.no_grad()
    def init(self, plan: Plan, full: Weights) -> State:
        """Folded as the largest devices hold it, with mean and spread of all ratings."""
        largest = self.spoken_space(chain_of(plan, 0)[-1])
        many, total, squares = plan.public.survey[RATED].tolist()
        mean = total / many if many else 0.0
        spread = max(squares / many - mean * mean, 0.0) ** 0.5 if many else 0.0
        centre = torch.tensor([mean, spread or 1.0, NOISE], dtype=full[ROWS].dtype)
        return State(full | {ROWS: largest.recover(largest.reduce(full[ROWS])), "centre": centre})

    def spoken_space(self, largest: Subspace) -> Subspace:
        """In whose rows devices speak: the largest devices', or those of the full table where these stream by."""
        return Subspace(largest.full_size, largest.full_size) if self.streamed else largest

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """Rows that stream by are received beside the device's own; rows and sums over users are sent."""
        held = plan.assignments(0)[size]
        if held.projections is None:
            return 0, 0
        rows = held.projections[ROWS].size * BYTES
        return held.size() * BYTES + rows * self.streamed, rows + plan.architecture.own[USERS] * BYTES

    def answer_shapes(self, plan: Plan, sent: Sent) -> dict[str, int]:
        """See the base class."""
        return {ROWS: sent.projections[ROWS].size, USERS: plan.architecture.own[USERS]}

    # -- the device ----------------------------------------------------------------------------------------------------

    def send(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[Sent]:
        """Beside its own table what the largest devices hold, to speak in its rows, and rows that stream by."""
        held = [one.projections[ROWS] for one in plan.assignments(state.round_number) if one.projections is not None]
        largest = max(held, key=lambda projection: projection.size)
        known = [replace(sent, context={ROWS: largest}) for sent in super().send(plan, state, sizes)]
        if not self.streamed:
            return known
        table = state.full[ROWS].view(plan.architecture.tables[ROWS])
        passing = [table[self.window(plan, sent).rows].view(-1) for sent in known]
        return [replace(of, vectors=of.vectors | {STREAM: rows}) for of, rows in zip(known, passing, strict=True)]

    def window(self, plan: Plan, sent: Sent) -> Window:
        """The rows that devices of a size speak of in a round."""
        largest = self.spoken_space(subspace_of(sent.context[ROWS]))
        return Window(largest, subspace_of(sent.projections[ROWS]), sent.round_number, plan.settings.model.factors)

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """Solve the user; say what that changes in what the device says of its items and of its user."""
        spoken = self._speak(plan, sent, client.people, [client.number])
        answer, own = self._said(spoken, torch.ones(1, dtype=torch.bool))
        return answer, own | {USERS: own[USERS][0]}

    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """All users of a size in one solve and one scatter."""
        spoken = self._speak(plan, sent, people, clients)
        good = spoken.bounds() <= self.largest_change
        return good, *self._said(spoken, good)

    def _given(self, known: Beliefs, people: People, users: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All ratings of some users: their places, whose each is, and what they are, centred."""
        chosen, ratings = people.chosen(users), people.train.ratings
        assert ratings is not None
        sizes = torch.tensor([people.samples(user) for user in users])
        owner = torch.repeat_interleave(torch.arange(len(users)), sizes)
        return chosen, owner, known.centred(ratings[chosen])

    def _speak(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> Spoken:
        """What users say of their items in this round's window and of themselves, and what they said before."""
        window, known = self.window(plan, sent), Beliefs.of(sent.vectors)
        chosen, owner, targets = self._given(known, people, clients)
        items, dtype = people.train.items[chosen], targets.dtype
        rows = self._held_rows(plan, sent, items)
        place, kept = window.places(items), dict[str, Tensor]()
        if self.streamed:
            kept[CACHE] = caught(people.private[CACHE][chosen].to(dtype), place, sent.vectors[STREAM])
            rows = known_rows(kept[CACHE], rows)
        raters = Raters.solved(rows, targets, owner, len(clients), known)
        words, squares = raters.words(rows, targets, owner)
        last, before = people.private[LAST][chosen].to(dtype), people.private[USERS][clients].to(dtype)
        units = units_of(words.shape[1] - 1)
        moved, change = (words - last) * (place >= 0)[:, None], (raters.sums(squares) - before) * units
        if plan.settings.privacy.sums_alone:
            moved = OF_ITEMS.said(moved, owner * window.size + place)
            change = OF_USERS.said(change, torch.arange(len(clients)))
        kept[LAST] = last + moved
        return Spoken(window, place, owner, moved, change, kept, {USERS: before + change / units})

    def _held_rows(self, plan: Plan, sent: Sent, items: Tensor) -> Tensor:
        factors = plan.settings.model.factors
        return sent.vectors[ROWS].view(-1, factors)[rows_of(subspace_of(sent.projections[ROWS]), items, factors)]

    def _said(self, spoken: Spoken, good: Tensor) -> tuple[Answer, Weights]:
        """What some of them say and keep."""
        kept = good[spoken.owner]
        rows = spoken.window.sums(spoken.place[kept], spoken.moved[kept])
        own = {key: of[kept] for key, of in spoken.kept.items()} | {key: of[good] for key, of in spoken.own.items()}
        return Answer({ROWS: rows, USERS: spoken.change[good].sum(0)}, float(good.sum())), own

    # -- the server ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The sums of all rounds, and what follows: beliefs first, then rows."""
        factors, largest = plan.settings.model.factors, self.spoken_space(chain_of(plan, 0)[-1])
        if not totals.by_size:
            return replace(state, round_number=state.round_number + 1)
        # In double: changes of changes are added for as long as the run lasts.
        start = {ROWS: torch.zeros(largest.size), USERS: torch.zeros(plan.architecture.own[USERS])}
        kept = {key: of.double() for key, of in state.moments.get("sums", start).items()}
        sums, users, units = kept[ROWS].view(-1, factors).clone(), kept[USERS], units_of(factors - 1).double()
        weights = dict(state.moments.get(WEIGHTS, {}))
        for sent, answer in totals.parts():
            rows, said = self.window(plan, sent).rows, answer.sums[ROWS].view(-1, factors).double()
            sums.index_add_(0, rows, said)
            of_size = weights.get(str(sent.size), torch.zeros(len(sums)))
            weights[str(sent.size)] = of_size.double().index_add(0, rows, said[:, -1])
            users = users + answer.sums[USERS] / units
        moments = state.moments | {"sums": {ROWS: sums.view(-1), USERS: users}, WEIGHTS: weights}
        if not users[0] > 0:  # none of them has a rating
            return replace(state, round_number=state.round_number + 1, moments=moments)
        masked = plan.settings.privacy.sums_alone
        known = beliefs_from(users, Beliefs.of(state.full), 1 / (OF_USERS.steps * units) if masked else None)
        sharing = row_counts(largest, factors).clamp(min=1).double()
        before, dtype = largest.reduce(state.full[ROWS]).view(-1, factors)[:, :-1].double(), state.full[ROWS].dtype
        lacking = self._lacking(plan, largest, state.full[ROWS], weights, known.metric)
        table, spreads = solved_items(sums + lacking, sharing, known, before)
        beliefs = replace(known, spreads=torch.stack([known.spreads[0], spreads])).flat(dtype)
        full = {ROWS: largest.recover(table.view(-1).to(dtype))} | beliefs
        return State(state.full | full, state.round_number + 1, moments)

    def _lacking(self, plan: Plan, largest: Subspace, full: Tensor, weights: Weights, metric: Tensor) -> Tensor:
        """What words of smaller devices lack to be about the rows of the largest; nothing where full rows stream by."""
        table = largest.reduce(full).view(-1, plan.settings.model.factors).double()
        found = torch.zeros_like(table)
        for size, of in weights.items():
            held = subspace_of((plan.assignments(0)[int(size)].projections or {})[ROWS])
            if held.size < largest.size and not self.streamed:
                theirs = largest.reduce(held.recover(held.reduce(full))).view_as(table).double()
                found[:, :-1] += moved_to(theirs[:, :-1], table[:, :-1], of, metric)
        return found

    # -- what was learned ----------------------------------------------------------------------------------------------

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: they follow from the model and the users' ratings."""
        known = Beliefs.of(sent.vectors)
        chosen, owner, targets = self._given(known, people, users)
        rows = self._held_rows(plan, sent, people.train.items[chosen])
        if self.streamed and CACHE in people.private:
            rows = known_rows(people.private[CACHE][chosen].to(rows.dtype), rows)
        return {USERS: Raters.solved(rows, targets, owner, len(users), known).rows}

    def block_scores(self, plan: Plan, sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        rows = sent.projections[ROWS].rows(sent.vectors[ROWS], items)
        rows = rows if rows.dim() == 3 else rows[None]
        return Beliefs.of(sent.vectors).predicted(vectors[USERS][:, None], rows)

    def predictor(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Predictor:
        """Everybody's bias and vector follow from their own ratings."""
        mine, known = people.train, Beliefs.of(full)
        table = full[ROWS].view(plan.architecture.tables[ROWS])
        if mine.ratings is None:
            raise InvalidSettings(
                "a history without ratings for a model of ratings", "what the user thinks of each item",
                "Ask for a user of the run, or train a model of rankings (algorithm.kind='correlations').",
            )  # fmt: skip
        targets = known.centred(mine.ratings)
        own = Raters.solved(table[mine.items], targets, mine.users, mine.num_users, known).rows
        return lambda users, items: known.predicted(own[users], table[items])

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Items by their predicted ratings."""
        predict, items = self.predictor(plan, full, held, people), torch.arange(plan.public.items)
        return lambda users: predict(users[:, None], items)
