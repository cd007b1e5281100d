"""Partial correlations of items: a model that is one sum over devices, and serves from a history alone.

With x a user's history over the H leading items (1 where the user has an item) and n how many these are, a device
answers with x xᵀ/n: which items it has together (:mod:`.pairs`). The sum G over devices is all that the server keeps of
them. It makes the items' partial correlations S of it and their leading eigenvectors (:mod:`.spectrum`): a row W_j and
two numbers a_j, b_j for every item. A user's score of item j is b_j ⟨W_j, Σ a_i W_i⟩ over their history, and a little
for each of the few items most alike to j that they have: what λ holds down of rare items, neighbours bring back. No
training on devices, no step size, nothing to solve and no private vector; who comes new needs their history alone.

Three sizes nest:

* *What is said.* As many bytes as the capacity of a device is a share of the whole sum's: the pairs that it has, for
  most devices all; or, under masks, all numbers of a prefix of the packed sum, the pairs of leading items.
* *What is held.* Models are cut to bytes by :mod:`fairfold.methods.leading`: leading rows and columns of W in few bits,
  neighbours, and pairs (j, i, b_j S_ij a_i), the strongest first. Of a pair the device holds all that i says of j, so
  it adds what its own rows miss of that, times ``pair_weight``: one list serves all sizes.
* *What is needed on the way.* A device never holds more than it says.

How many columns, whether pairs and neighbours, λ, β and support are chosen by trials (:mod:`.trials`): first devices
say nine tenths of their histories, then models are tried on the rest, one per round, and at last devices say the rest.

An item outside the head, or beyond what a device holds, comes after all others, in the order of popularity. A device
that is asked again says what has changed: the pairs of what it now has, less those of what the server's sum holds
(``said``, a flag per item, counts once acknowledged). So what users do, or take back, while a run goes on is in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms import private_pairs as noisy
from fairfold.algorithms.by_rows import CROWD, ByRows
from fairfold.algorithms.making import Made, counts_in, leading_block, model_of, supported
from fairfold.algorithms.pair_architecture import JUDGED, ROWS, PairArchitecture, crowd_of
from fairfold.algorithms.pairs import UNIT, among, frobenius, items_of, size_of
from fairfold.algorithms.said import SAID, gone, marks_of
from fairfold.algorithms.spectrum import penalty
from fairfold.algorithms.spoken import Spoken, heard_of, reach_of, room_for, totals_of, usually_said
from fairfold.algorithms.trials import EXACT, JUDGEMENT, QUALITY, TOLD, Trials, judged, said_first, within
from fairfold.data import Interactions
from fairfold.errors import InvalidMessage
from fairfold.methods import Leading
from fairfold.projections import LeadingBlock, Projection
from fairfold.protocol.algorithm import COUNTS, count_of
from fairfold.protocol.architecture import Architecture, Picture
from fairfold.protocol.noising import noise_in
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.words import Answer, Public, Sent, State, Totals, Visit, Word
from fairfold.values import BYTES, Weights

SUM = "sum"
"""Name of the sum of pairs, which devices answer with and the server keeps."""

ASKED, MADE = "asked", "made"
"""Names of what is sent beside a model (share to say, trial, share that judges, most items in pairs); of its making."""

USERS = "users"
"""Name of the survey's sum that says how many users there are."""


class Correlations(ByRows):
    """Partial correlations of items from one sum of pairs.

    Attributes:
        kind: Its name.
        beta: Items weigh by the power −β of how many have them, before they are correlated.
        ridge: λ for histories of 75 items, added to the diagonal before the inverse (docs/beyond.md).
        support: Items that fewer users have are left out of the head.
        crowd: Items that fewer users of one secure sum are expected to have are left out of it; 0 leaves out none.
        head: The most items that are correlated: the server inverts a matrix of so many rows.
        pair_weight: How much a pair of the list counts, against 1 for what the rows say.
        near: What the likeness of a neighbour, 1 at the most, adds to a score.
        prior: What the share of users that have an item adds to its score; for who has n items a (1 + n)-th of that.
        choose: Whether shapes, λ, β, support, near and prior are chosen by trials, where there are rounds for them.
    """

    DEFAULTS: ClassVar = {
        "model": {"factors": 384},
        "subspace": {"method": "leading"},
        "fleet": {"clients_per_round": None},
        "run": {"rounds": 16, "evaluate_every": 16},
    }

    follows: ClassVar[bool] = True
    ages: ClassVar[bool] = False
    grids: ClassVar = {SUM: UNIT, QUALITY: UNIT}
    prefixes: ClassVar = frozenset({SUM})
    listed: ClassVar = frozenset({SUM})
    releases: ClassVar = noisy.releases(SUM)
    public: ClassVar = frozenset({USERS})

    kind: Literal["correlations"] = "correlations"
    beta: float = Field(0.15, ge=0, le=2)
    ridge: float = Field(4.0, gt=0)
    support: int = Field(3, ge=1, lt=2**31)
    crowd: int = Field(CROWD, ge=0, lt=2**31)
    head: int = Field(8_000, ge=1, lt=2**15)
    pair_weight: float = Field(0.8, ge=0, le=1)
    near: float = Field(0.05, ge=0, le=1)
    prior: float = Field(1.0, ge=0, le=100)
    choose: bool = True

    # -- settings and plan ---------------------------------------------------------------------------------------------

    def fixed(self, settings: Any) -> dict[str, dict[str, Any]]:
        """Who is to stay private speaks once."""
        return {"run": {"rounds": 1, "evaluate_every": 1}} if noisy.asked_for(settings) else {}

    def without_effect(self, settings: Any) -> Sequence[str]:
        """All that is said lies on a grid, and no number of a user is above 1; under noise a rule chooses."""
        return noisy.idle(settings)

    def problem_with(self, settings: Any) -> str | None:
        """See the base class."""
        if settings.model.kind != "mf" or settings.model.item_bias:
            return "algorithm.kind='correlations' is for model.kind='mf' without item_bias; 'gradient' serves others"
        good = settings.subspace.method == "leading"
        return None if good else "algorithm.kind='correlations' needs subspace.method='leading'"

    def architecture(
        self,
        settings: Any,
        public: Public,
        picture: Picture | None = None,
        projections: Mapping[str, Projection] | None = None,
    ) -> Architecture:
        """Rows for the head: the items up to the last one with enough support, as the survey tells; else all it may be.

        Where items are numbered by their counts these are all that have it, among the users who speak of them.
        """
        whole, counts = min(public.items, self.head), public.survey.get(COUNTS)
        many, private = int(public.survey.get(USERS, [public.users])[0]), noisy.asked_for(settings)
        if projections is not None:
            if ROWS not in projections or not 1 <= projections[ROWS].shape[0] <= whole:
                raise InvalidMessage("an order without rows of items", f"1 to {whole} rows", "Check both sides.")
            head = whole = projections[ROWS].shape[0]
        else:
            least = max(self.support, crowd_of(self.crowd, settings, many))
            whole = whole if counts is None or private else supported(counts[:whole], least)
            head = heard_of(settings, public, whole, None if private else counts, least)
            if counts is not None and private:
                head = whole = noisy.head_for(many, noise_in(settings, SUM, many), head)
        length = 0.0 if counts is None else float(counts[:head].sum()) / max(many, 1)
        near, known = self.near > 0 and not private, (public.items, public.users, head, settings.model.factors)
        return PairArchitecture(*known, many, length, near, whole)

    def surveys(self, settings: Any) -> dict[str, bool]:
        """How many users have each item, and how many they are."""
        return {COUNTS: True, USERS: False}

    def survey(self, settings: Any, histories: Interactions, items: range) -> Answer:
        """See the base class."""
        private = noisy.asked_for(settings)
        sums = {COUNTS: count_of(histories, items, noisy.shared_among(histories) if private else None)}
        if items.start == 0:
            sums[USERS] = totals_of(histories, lengths=not private, pairs=not settings.privacy.sums_alone)
        return Answer(sums, float(histories.num_users))

    def survey_grids(self, settings: Any) -> Mapping[str, int]:
        """See the base class."""
        return {COUNTS: UNIT if noisy.asked_for(settings) else 1, USERS: 1}

    def numbering(self, plan: Plan) -> Tensor | None:
        """By falling counts; None where they are so already."""
        counts = plan.public.survey[COUNTS]
        ordered = bool((counts[:-1] >= counts[1:]).all())
        return None if ordered else counts.argsort(descending=True, stable=True).argsort()

    def spoken(self, plan: Plan, size: int) -> LeadingBlock:
        """Of which pairs devices of a size speak: leading ones (under noise they are as many as of all items)."""
        held, private = self._held(plan), noisy.asked_for(plan.settings)
        most = min(plan.public.items, self.head) if private else held.whole
        said = min(held.head, reach_of(plan.settings, plan.public, plan.capacities[size], most))
        return LeadingBlock((size_of(held.head),), (size_of(said),))

    def _held(self, plan: Plan) -> PairArchitecture:
        assert isinstance(plan.architecture, PairArchitecture)
        return plan.architecture

    def trials(self, plan: Plan) -> Trials:
        """What is tried, and when."""
        assert isinstance(plan.method, Leading)
        budgets = [plan.method.budget(plan.architecture.tensors, capacity) for capacity in plan.capacities]
        return Trials.of(budgets, self._held(plan), plan.settings.run.rounds if self.choose else 0)

    def settled(self, plan: Plan, state: State) -> Plan:
        """What devices hold now: what is on trial, or was chosen."""
        shapes = self.trials(plan).settled(state.round_number, state.moments.get(QUALITY, {}))
        return replace(plan, architecture=self._held(plan).settled_on(shapes), _assigned={})

    def traffic(self, plan: Plan, size: int, round_number: int = 0) -> tuple[int, int]:
        """A model down; pairs up, where these are listed those of a usual history, or a judgement."""
        schedule, up = self.trials(plan).schedule, self.spoken(plan, size).size
        listens = schedule.trial(round_number) is None
        if USERS in plan.public.survey:
            news = plan.settings.fleet.clients_per_round is not None or round_number in (0, schedule.end)
            length, room = self._held(plan).length, self._room(plan, size)
            up = usually_said(plan.public.survey[USERS], length, room, up, news=news)
        return plan.assignments(0)[size].bytes(), (up if listens else TOLD) * BYTES

    def largest_answer(self, plan: Plan, size: int) -> int:
        """See the base class: no list is longer than all of the numbers."""
        return self.spoken(plan, size).size * BYTES

    def send(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[Sent]:
        """The model, and what to say."""
        trials, held, number, like = self.trials(plan), self._held(plan), state.round_number, state.full[ROWS]
        asked, listens = trials.asked(number, held.known_users).tolist(), trials.schedule.trial(number) is None
        beside, found = dict[str, Tensor](), super().send(self.settled(plan, state), state, sizes)
        if noisy.asked_for(plan.settings):
            beside[noisy.USUAL] = noisy.usual_of(plan.public.survey[COUNTS], held.head).to(like.dtype)
        for place, one in enumerate(found):
            said: dict[str, Projection] = {SUM: self.spoken(plan, one.size)} if listens else {QUALITY: JUDGEMENT}
            mine = beside | {ASKED: like.new_tensor([*asked, self._room(plan, one.size)])}
            found[place] = replace(one, vectors=one.vectors | mine, context=said)
        return found

    def _room(self, plan: Plan, size: int) -> int:
        return room_for(plan.settings, plan.public, plan.capacities[size], self._held(plan).whole)

    # -- the device ----------------------------------------------------------------------------------------------------

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """What a user has not said yet of their pairs; or how well a model finds what they hold back."""
        items, marks, lengths = client.items, client.own[SAID][:, 0], torch.tensor([len(client.items)])
        if QUALITY in sent.context:
            return self._judge(plan, sent, items, lengths, marks, client.own[JUDGED].view(1, 1))
        return self._unsaid(plan, sent, items, lengths, marks)

    def answers(self, plan: Plan, people: People, visits: list[Visit]) -> Iterator[Word]:
        """See the base class; judgements that become words of so few users that single precision adds them exactly."""
        few = QUALITY in visits[0].sent.context and plan.settings.privacy.sums_alone
        for start in range(0, len(visits), EXACT if few else len(visits)):
            yield from super().answers(plan, people, visits[start : start + EXACT if few else None])

    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """The same of many users in one sum."""
        chosen = people.chosen(clients)
        items, marks = people.train.items[chosen], people.private[SAID][chosen, 0]
        lengths = people.train.counts_by_user[clients]
        good = torch.full((len(clients),), self.largest_change >= 1)
        if QUALITY in sent.context:
            return good, *self._judge(plan, sent, items, lengths, marks, people.private[JUDGED][clients])
        return good, *self._unsaid(plan, sent, items, lengths, marks)

    def _unsaid(self, plan: Plan, sent: Sent, items: Tensor, lengths: Tensor, marks: Tensor) -> tuple[Answer, Weights]:
        """What some histories add to the sum, and what they have said then."""
        said, lost = marks > 0, gone(marks)
        now = ~lost & (said | (said_first(items, lengths) if float(sent.vectors[ASKED][0]) < 1 else items >= 0))
        speaks, dtype = items_of(sent.context[SUM].size), sent.vectors[ROWS].dtype
        seen = not plan.settings.privacy.sums_alone
        if noisy.asked_for(plan.settings):
            sums = noisy.private_sum(items, lengths, noisy.usual_in(sent), speaks).to(dtype)
        else:
            known, most = items < sent.projections[ROWS].shape[0], int(sent.vectors[ASKED][3]) if seen else len(items)
            found = Spoken.changes(items, lengths, now & known, said & known, most)
            sums = found.shortest(speaks, dtype) if seen else found.summed(speaks, dtype)
        return Answer({SUM: sums}, float(len(lengths))), {SAID: marks_of(now, lost)[:, None]}

    def _judge(
        self, plan: Plan, sent: Sent, items: Tensor, lengths: Tensor, marks: Tensor, before: Tensor
    ) -> tuple[Answer, Weights]:
        """How well a model finds what users have not said, by what they have."""
        (mine, many), said = among(items, lengths, ~gone(marks)), marks[~gone(marks)] > 0
        _, trial, share, _ = sent.vectors[ASKED].tolist()
        double = replace(sent, vectors={name: of.double() for name, of in sent.vectors.items()})
        served, asked = self._served(double), (plan.public.items, plan.settings.run.top)
        told, after = judged(served, mine, many, said, before, first=trial == 0, share=share, asked=asked)
        return Answer({QUALITY: told.to(sent.vectors[ROWS].dtype)}, float(len(lengths))), {JUDGED: after}

    def answer_shapes(self, plan: Plan, sent: Sent) -> dict[str, int]:
        """See the base class."""
        return {name: held.size for name, held in sent.context.items()}

    def problem(self, plan: Plan, sent: Sent, answer: Answer | None) -> str | None:
        """Beside what is refused of all: a norm, or judgements, that so many users cannot have."""
        if (found := super().problem(plan, sent, answer)) is not None or answer is None:
            return found
        most = answer.weight * (1 + 1e-5)
        if SUM in answer.sums:  # what is said again takes back what was said before: twice the norm at the most
            most *= 2 if sent.round_number else 1
            return "a norm above that of its users" if frobenius(answer.sums[SUM]) > most else None
        return None if within(answer.sums[QUALITY], most) else "judgements above one per user"

    # -- the server ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """Add up what was said, and make a model of the sum where that or what is wanted of it has changed."""
        head, dtype, trials = self._held(plan).head, state.full[ROWS].dtype, self.trials(plan)
        kept = state.moments.get(SUM, {}).get(SUM)
        sums = torch.zeros(size_of(head), dtype=torch.float64) if kept is None else kept.clone()
        tallies = dict(state.moments.get(QUALITY, {}))
        for sent, answer in totals.parts():
            if SUM in answer.sums:
                sums[: len(answer.sums[SUM])] += answer.sums[SUM]
            else:
                trials.note(tallies, sent.round_number, sent.size, answer.sums[QUALITY])
        moments = state.moments | {SUM: {SUM: sums}} | ({QUALITY: tallies} if tallies else {})
        after = State(state.full, state.round_number + 1, moments)
        made = torch.tensor(self.made(plan, after), dtype=torch.float64)
        if not bool(sums.any()) or (kept is not None and sums.equal(kept) and made.equal(state.moments[MADE][MADE])):
            return after
        full = {name: of.to(dtype).reshape(-1) for name, of in self.model(plan, sums, Made(*made.tolist())).items()}
        return State(state.full | full, after.round_number, moments | {MADE: {MADE: made}})

    def noise(self, plan: Plan) -> float:
        """Standard deviation of the noise in the sum of pairs; 0 where there is none."""
        return noise_in(plan.settings, SUM, self._held(plan).known_users) if noisy.asked_for(plan.settings) else 0.0

    def made(self, plan: Plan, state: State) -> Made:
        """What the model that a round is about is made with."""
        held, noise = self._held(plan), self.noise(plan)
        making, columns = self.trials(plan).wanted(state.round_number, state.moments.get(QUALITY, {}))
        if noise:
            return Made(noisy.ridge_for(held.head, noise), columns, noisy.BETA, 0.0, held.head)
        usual = Made(penalty(self.ridge, held.length), columns, self.beta, self.near, held.head, self.prior)
        return making.of(usual, counts_in(plan, held.head), self.support)

    def model(self, plan: Plan, sums: Tensor, made: Made) -> Weights:
        """Rows, pairs and neighbours that follow from a sum."""
        held, noise, gram = self._held(plan), self.noise(plan), leading_block(sums, made)
        if noise:
            gram = noisy.recovered(gram, plan.public.survey[COUNTS], held.known_users, noise)
        return model_of(gram, counts_in(plan, held.head), made, held)

    # -- what was learned ----------------------------------------------------------------------------------------------

    def told(self, plan: Plan, state: State) -> list[str]:
        """What was chosen for every size, and how sure that is; or what noise has left."""
        if noisy.asked_for(plan.settings):
            return noisy.words(state.moments.get(SUM, {}).get(SUM), self.noise(plan), plan.public.items)
        if MADE not in state.moments:  # nobody has spoken
            return []
        held = [one.projections or {} for one in self.settled(plan, state).assignments(0)]
        made, names = Made(*state.moments[MADE][MADE].tolist()), list(map(str, plan.capacities))
        return self.trials(plan).words(state.round_number, state.moments.get(QUALITY, {}), made.words(), names, held)

    def remembered(self, plan: Plan) -> dict[str, int]:
        """Of every item, whether it was said."""
        return {SAID: 1}

    def follow(self, own: Weights, lost: Tensor) -> None:
        """See the base class."""
        own[SAID] = marks_of(own[SAID] > 0, lost[:, None])
