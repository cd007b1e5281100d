"""Federated least squares for ratings: biases and tastes, from sums that remember.

A rating, less the mean of all and in units of their spread, is modelled as bᵤ + bᵢ + u·vᵢ. A row of the item table is
w = (bᵢ, vᵢ), a user's private row (bᵤ, u). Given w, a user's row follows from their own ratings alone. With c = (1, u)
a user's *code* and e the error that is left, an item's row solves Σ e·c = ridge·w over its raters. That takes a d × d
matrix for every item, far more than a row; but sums of rows suffice. A device adds, for each of its items,

    e·c + K·w

and the server solves (n·K + ridge)·w = Σ, n being how many spoke. Where nothing moves any more that *is* the equation
above, whatever K, so the end is exact. K is the mean of c·cᵀ over all ratings, one d × d matrix, from one more sum over
devices: then e·c + K·w is about (e + c·w)·c, what the ratings say whatever the row was, and what was said of an old row
hardly ages. So there is no step size here either, whoever is drawn. A device keeps what it last said of its own items,
and sends the change.

As the sum hardly depends on w, a device need not own an item's row to speak of it. It receives its own compact table,
and speaks in the rows of the *largest* devices, as many a round as its own table has: a window that moves on from round
to round, the same for all devices of a size, so that a secure sum can take it. Every row is known to all in turn.

Where rows are ``streamed`` that goes one step further. Devices speak in the rows of the *full* table, and those rows
pass by them as well: a device keeps the rows of its own items, beside what it said of them, and forgets the others. Its
user's row is then solved from full rows, as old as the last time they passed, and from its compact table where none has
yet. So the server's model is no longer bounded by what the largest device holds; what each device holds still is.

The server knows how many ratings an item has from the count that ranks the catalogue, and how many of all ratings have
been spoken of from one more sum: n is the former times the share of the latter.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.closed_form import subspace_of
from fairfold.algorithms.least_squares import GRAM, Remembering, chain_of, row_counts, rows_of
from fairfold.algorithms.rating_rows import (
    Spoken,
    Window,
    alike_places,
    caught,
    centred,
    code_of,
    codes,
    known_rows,
    mean_code,
    predicted,
    pull_of,
    solve_raters,
    solved_rows,
)
from fairfold.data import Interactions
from fairfold.errors import InvalidSettings
from fairfold.metrics.ranking import Scorer
from fairfold.metrics.rating import Predictor
from fairfold.protocol.algorithm import COUNTS, count_of
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Sent, State, Totals
from fairfold.subspace import Subspace
from fairfold.values import Shapes, Weights

CENTRE = "centre"
"""Name of three numbers: mean and spread of all ratings, and how many ratings the sums hold."""

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


class RatingSquares(Remembering):
    """Ratings by least squares from sums that remember.

    Attributes:
        kind: Its name.
        ridge: Pull of the items' tastes to zero, in imagined ratings.
        damping: Imagined ratings without any bias that draw the biases of users and items to zero.
        alike: Number the items so that those which share a row have similar mean ratings (ranked). Needs sums of
            ratings beside the counts, so it is left out where ``popularity`` is not ``"catalogue"``.
        streamed: The server's rows stream by: a device also receives as many rows of the full table as its own has,
            others every round, speaks of these, and keeps those of its own items (docs/beyond.md).
    """

    DEFAULTS: ClassVar = {"model": {"factors": 8}, "subspace": {"reference_factors": 32, "tail_share": 0.125}}

    kind: Literal["ratings"] = "ratings"
    ridge: float = Field(80.0, gt=0)
    damping: float = Field(5.0, gt=0)
    alike: bool | None = None
    streamed: bool = False

    def orders_alike(self, settings: Any) -> bool:
        """Whether items are numbered by their mean ratings; by itself where there is a public order of popularity."""
        ranked = getattr(settings.subspace, "ranked", False)
        return ranked and not settings.subspace.counted if self.alike is None else self.alike

    def problem_with(self, settings: Any) -> str | None:
        if settings.model.factors < 2:
            return "algorithm.kind='ratings' needs model.factors >= 2: a bias, a taste"
        if self.alike and not getattr(settings.subspace, "ranked", False):
            return "alike=true is about the tail that unpopular items share: use subspace.mapping='ranked'"
        if self.alike and settings.subspace.counted:
            return "popularity='counts' sums counts alone, and alike=true asks for sums of ratings: use alike=false"
        return super().problem_with(settings)

    def predicts_ratings(self, settings: Any) -> bool:
        return True

    def extra(self, settings: Any) -> Shapes:
        return {CENTRE: (3,), GRAM: (settings.model.factors, settings.model.factors)}

    def remembered(self, plan: Plan) -> dict[str, int]:
        return dict.fromkeys([LAST, CACHE] if self.streamed else [LAST], plan.settings.model.factors + 1)

    def surveys(self, settings: Any) -> dict[str, bool]:
        """How many have rated each item, how many ratings there are, their sum and that of their squares."""
        return {COUNTS: True, RATED: False} | ({ABOVE: True} if self.orders_alike(settings) else {})

    def survey(self, settings: Any, histories: Interactions, items: range) -> Answer:
        if histories.ratings is None:
            raise InvalidSettings("data without ratings for algorithm.kind='ratings'", "ratings", "Use another one.")
        given = histories.ratings.double()
        sums = {COUNTS: count_of(histories, items)}
        if items.start == 0:
            sums[RATED] = torch.stack([torch.tensor(float(len(given))).double(), given.sum(), given.square().sum()])
        if self.orders_alike(settings):
            counts = histories.counts_by_user.clamp(min=1)
            means = torch.zeros(histories.num_users).double().index_add_(0, histories.users, given) / counts
            here = (histories.items >= items.start) & (histories.items < items.stop)
            above = torch.zeros(len(items)).double()
            above.index_add_(0, histories.items[here] - items.start, (given - means[histories.users])[here])
            sums[ABOVE] = above
        return Answer(sums, float(histories.num_users))

    def numbering(self, plan: Plan) -> Tensor | None:
        """Items that share a row are alike: by their mean ratings, along the rows that the hash folds together."""
        if not self.orders_alike(plan.settings):
            return None
        survey = plan.public.survey
        means = survey[ABOVE] / (survey[COUNTS] + self.damping)
        return alike_places(chain_of(plan, 0), plan.settings.model.factors, means)

    @torch.no_grad()
    def init(self, plan: Plan, full: Weights) -> State:
        """Tastes by chance, no biases, mean and spread of all ratings."""
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        largest = self.spoken_space(chain_of(plan, 0)[-1])
        compact = largest.reduce(full[name])
        compact.view(-1, factors)[:, 0] = 0
        many, total, squares = plan.public.survey[RATED].tolist()
        mean = total / many if many else 0.0
        spread = max(squares / many - mean * mean, 0.0) ** 0.5 if many else 0.0
        centre = torch.tensor([mean, spread or 1.0, 0.0], dtype=compact.dtype)
        return State(full | {name: largest.recover(compact), CENTRE: centre})

    def spoken_space(self, largest: Subspace) -> Subspace:
        """In whose rows devices speak: the largest devices', or those of the full table where these stream by."""
        return Subspace(largest.full_size, largest.full_size) if self.streamed else largest

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """Rows that stream by are received beside the device's own."""
        down, up = super().traffic(plan, size)
        return down * (2 if self.streamed else 1), up

    # -- the device ----------------------------------------------------------------------------------------------------

    def send(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[Sent]:
        """Beside its own table what the largest devices hold, to speak in its rows, and rows that stream by."""
        (name,), found = plan.architecture.tables, super().send(plan, state, sizes)
        held = [one.projections for one in plan.assignments(state.round_number) if one.projections is not None]
        largest = max(held, key=lambda projections: sum(one.size for one in projections.values()))
        known = [replace(sent, context={name: largest[name]}) for sent in found]
        if not self.streamed:
            return known
        table = state.full[name].view(plan.architecture.tables[name])
        passing = [table[self.window(plan, sent).rows].view(-1) for sent in known]
        return [replace(of, vectors=of.vectors | {STREAM: rows}) for of, rows in zip(known, passing, strict=True)]

    def window(self, plan: Plan, sent: Sent) -> Window:
        """The rows that devices of a size speak of in a round."""
        (name,) = plan.architecture.tables
        largest = self.spoken_space(subspace_of(sent.context[name]))
        return Window(largest, subspace_of(sent.projections[name]), sent.round_number, plan.settings.model.factors)

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """Solve the user's bias and vector; say what that changes in what the device says of its items."""
        (own_name,), spoken = plan.architecture.own, self._speak(plan, sent, client.people, [client.number])
        answer, own = self._said(plan, spoken, torch.ones(1, dtype=torch.bool))
        return answer, own | {own_name: spoken.users[0]}

    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """All users of a size in one solve and one scatter."""
        spoken = self._speak(plan, sent, people, clients)
        good = spoken.bounds() <= self.largest_change
        return good, *self._said(plan, spoken, good)

    def _given(self, sent: Sent, people: People, users: list[int], name: str) -> tuple[Tensor, Tensor, Tensor]:
        """All ratings of some users: their places, whose each is, and what they are, centred."""
        chosen, ratings = people.chosen(users), people.train.ratings
        assert ratings is not None
        sizes = torch.tensor([people.samples(user) for user in users])
        owner = torch.repeat_interleave(torch.arange(len(users)), sizes)
        return chosen, owner, centred(ratings[chosen].to(sent.vectors[name].dtype), sent.vectors[CENTRE])

    def _speak(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> Spoken:
        """What users say of their items in this round's window, and what they said before."""
        (name,), (own_name,), window = plan.architecture.tables, plan.architecture.own, self.window(plan, sent)
        chosen, owner, targets = self._given(sent, people, clients, name)
        items, dtype = people.train.items[chosen], targets.dtype
        rows = self._held_rows(plan, sent, items)
        place, kept = window.places(items), dict[str, Tensor]()
        if self.streamed:
            kept[CACHE] = caught(people.private[CACHE][chosen].to(dtype), place, sent.vectors[STREAM])
            rows = known_rows(kept[CACHE], rows)
        users = solve_raters(rows, targets, owner, len(clients), self.damping)
        code = code_of(users)[owner]
        errors = targets - users[owner, 0] - (code * rows).sum(1)
        as_it_is = rows @ mean_code(sent.vectors[GRAM], rows.shape[1])
        now = torch.cat([errors[:, None] * code + as_it_is, torch.ones_like(errors)[:, None]], dim=1)
        last = people.private[LAST][chosen].to(dtype)
        kept[LAST] = torch.where((place >= 0)[:, None], now, last)
        before = people.private[own_name][clients].to(dtype)
        return Spoken(window, place, owner, kept[LAST] - last, users, before, kept)

    def _held_rows(self, plan: Plan, sent: Sent, items: Tensor) -> Tensor:
        """What a device's compact table says of items."""
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        return sent.vectors[name].view(-1, factors)[rows_of(subspace_of(sent.projections[name]), items, factors)]

    def _said(self, plan: Plan, spoken: Spoken, good: Tensor) -> tuple[Answer, Weights]:
        """What some of them say and keep."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        kept, sizes = good[spoken.owner], spoken.sizes[good]
        moved, none = spoken.moved[kept], torch.zeros(2, dtype=spoken.moved.dtype)
        sums = {
            name: spoken.window.sums(spoken.place[kept], moved[:, :-1]),
            CENTRE: torch.cat([none, moved[:, -1].sum()[None]]),
            GRAM: codes(spoken.users[good], sizes) - codes(spoken.before[good], sizes),
        }
        own = {key: rows[kept] for key, rows in spoken.kept.items()} | {own_name: spoken.users[good]}
        return Answer(sums, float(good.sum())), own

    # -- the server ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """The sums of all rounds, and the rows that follow; what nobody spoke of is zero."""
        (name,), factors = plan.architecture.tables, plan.settings.model.factors
        largest, number = self.spoken_space(chain_of(plan, 0)[-1]), state.round_number
        if not totals.by_size:
            return replace(state, round_number=number + 1)
        # In double: changes of changes are added for as long as the run lasts.
        start = {name: torch.zeros(largest.size), CENTRE: state.full[CENTRE], GRAM: state.full[GRAM]}
        kept = {key: of.double() for key, of in (start | state.moments.get("sums", {})).items()}
        sums, centre, gram = kept[name].view(-1, factors).clone(), kept[CENTRE], kept[GRAM]
        for sent, answer in totals.parts():
            sums.index_add_(0, self.window(plan, sent).rows, answer.sums[name].view(-1, factors).double())
            centre, gram = centre + answer.sums[CENTRE], gram + answer.sums[GRAM]
        # The ridge is one of the full table, so a row that k items share has it k times. Without that, a row of items
        # with one rating each would believe what none of them can.
        sharing = row_counts(largest, factors).clamp(min=1)[:, None].to(sums.dtype)
        pull = pull_of(factors, self.damping, self.ridge, sums.dtype)
        table = solved_rows(sums, self._spoken(plan, largest, centre[2]), sharing, mean_code(gram, factors), pull)
        dtype = state.full[name].dtype
        full = {name: largest.recover(table.view(-1).to(dtype)), CENTRE: centre.to(dtype), GRAM: gram.to(dtype)}
        moments = {"sums": {name: sums.view(-1), CENTRE: centre, GRAM: gram}}
        return State(state.full | full, number + 1, state.moments | moments)

    def _spoken(self, plan: Plan, largest: Subspace, spoken: Tensor) -> Tensor:
        """n, how many ratings were spoken of, by row."""
        factors, surveyed = plan.settings.model.factors, plan.public.survey[COUNTS]
        row = rows_of(largest, torch.arange(len(surveyed)), factors)
        counts = torch.zeros(largest.size // factors, dtype=torch.float64)
        counts.index_add_(0, row, surveyed.double())
        return counts * (spoken.double() / counts.sum().clamp(min=1))

    # -- what was learned ----------------------------------------------------------------------------------------------

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: they follow from the model and the users' ratings."""
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        chosen, owner, targets = self._given(sent, people, users, name)
        rows = self._held_rows(plan, sent, people.train.items[chosen])
        if self.streamed and CACHE in people.private:
            rows = known_rows(people.private[CACHE][chosen].to(rows.dtype), rows)
        return {own_name: solve_raters(rows, targets, owner, len(users), self.damping)}

    def block_scores(self, plan: Plan, sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        (name,), (own_name,) = plan.architecture.tables, plan.architecture.own
        rows = sent.projections[name].rows(sent.vectors[name], items)
        rows = rows if rows.dim() == 3 else rows[None]
        return predicted(vectors[own_name][:, None], rows, sent.vectors[CENTRE])

    def predictor(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Predictor:
        """Everybody's bias and vector follow from their own ratings."""
        (name,), known = plan.architecture.tables, people.train
        table, centre = full[name].view(plan.architecture.tables[name]), full[CENTRE]
        if known.ratings is None:
            raise InvalidSettings(
                "a history without ratings for a model of ratings", "what the user thinks of each item",
                "Ask for a user of the run, or train a model of rankings (algorithm.kind='least_squares').",
            )  # fmt: skip
        targets = centred(known.ratings.to(table.dtype), centre)
        own = solve_raters(table[known.items], targets, known.users, known.num_users, self.damping)
        return lambda users, items: predicted(own[users], table[items], centre)

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """Items by their predicted ratings."""
        predict = self.predictor(plan, full, held, people)
        return lambda users: predict(users[:, None], torch.arange(plan.public.items))
