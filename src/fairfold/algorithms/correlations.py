"""Partial correlations of items: a model that is one sum over devices, and serves from a history alone.

A device is asked once. With x its user's history over the H leading items (1 where the user has an item) and n how many
these are, it answers with x xᵀ/n: which items it has together (:mod:`.pairs`). The sum G over devices is all that the
server keeps. It makes the items' partial correlations S of it and their leading eigenvectors (:mod:`.spectrum`): a row
W_j and two numbers a_j, b_j for every item. A user's score of item j is b_j ⟨W_j, Σ a_i W_i⟩ over their history: no
training on devices, no step size, nothing to solve and no private vector; who comes new needs their history alone.

Three sizes nest:

* *What is said.* The pairs among the leading h items are a prefix of the packed sum: a small device sends a shorter
  one, as many of the numbers as its capacity is a share. Prefixes are added up as they are.
* *What is held.* Models are cut to bytes by :mod:`fairfold.methods.leading`: leading rows and columns of W in few bits,
  and pairs (i, j, S_ij), the strongest first. Of a pair the device holds the correlation itself, so it adds what its
  own rows miss of it, S_ij − ⟨W_i, W_j⟩, times ``pair_weight``: one list serves all sizes.
* *What is needed on the way.* A device lists its pairs in blocks, and never holds their matrix.

An item outside the head, or beyond what a device holds, has no score of its own: it comes after all others, in the
order of popularity. A device that is asked again has nothing new to say; its flag (``said``) counts once acknowledged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.algorithms.least_squares import Remembering
from fairfold.algorithms.pairs import frobenius, items_of, matrix_of, pair_sums, size_of, weights_of
from fairfold.algorithms.served import Served
from fairfold.algorithms.spectrum import Precision, strongest
from fairfold.data import Interactions
from fairfold.errors import InvalidMessage
from fairfold.methods import Leading, Tensors
from fairfold.metrics.ranking import Scorer
from fairfold.projections import LeadingBlock, Projection
from fairfold.protocol.algorithm import COUNTS, count_of
from fairfold.protocol.architecture import Architecture, Picture
from fairfold.protocol.people import Client, People
from fairfold.protocol.plan import Plan
from fairfold.protocol.storage import Storage
from fairfold.protocol.words import Answer, Public, Sent, State, Totals
from fairfold.values import BYTES, Weights

ROWS, INTO, OUT, LISTED = "W", "a", "b", "pairs"
"""Names of the model's tensors: rows, what an item of a history and one that is scored are multiplied by, pairs."""

SUM = "sum"
"""Name of what devices answer with, and of what the server keeps."""

SAID = "said"
"""Name of a device's flag: whether the sum holds its pairs."""

LIST_PER_ITEM = 2
"""Pairs in the server's list, by item."""

LISTED_COLUMNS = 64
"""The list is of pairs that so many columns do not explain: devices that hold more hold no list."""


class PairArchitecture(Architecture):
    """Tensors with a row for each item of the head."""

    def __init__(self, items: int, users: int, head: int, factors: int) -> None:
        self.items, self.users, self.head = items, users, head
        self.tables = {ROWS: (head, min(factors, head))}
        self.dense = {INTO: (head,), OUT: (head,), LISTED: (LIST_PER_ITEM * head, 5)}
        self.user_tables, self.own = {}, {SAID: 1}

    def initial(self, generator: torch.Generator, storage: Storage | None = None) -> tuple[Weights, Weights]:
        """Before anybody has spoken there is nothing."""
        full = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in self.shapes.items()}
        return full, {SAID: torch.zeros(self.users, 1)}

    @property
    def tensors(self) -> Tensors:
        """See the base class."""
        return Tensors(self.tables, self.dense, catalogue=self.items)


class Correlations(Remembering):
    """Partial correlations of items from one sum of pairs.

    Attributes:
        kind: Its name.
        beta: Items weigh by the power −β of how many have them, before they are correlated.
        ridge: λ, what is added to the diagonal before the inverse.
        support: Items that fewer users have are outside the head.
        head: The most items that are correlated: the server inverts a matrix of so many rows, and a device of full size
            sends head · (head + 1) / 2 numbers.
        pair_weight: What a pair of the list counts, against 1 of what the rows say.
    """

    DEFAULTS: ClassVar = {
        "model": {"factors": 128},
        "subspace": {"method": "leading"},
        "fleet": {"clients_per_round": None},
        "run": {"rounds": 1},
    }

    kind: Literal["correlations"] = "correlations"
    beta: float = Field(0.15, ge=0, le=2)
    ridge: float = Field(4.0, gt=0)
    support: int = Field(3, ge=1, lt=2**31)
    head: int = Field(8_000, ge=1, lt=2**15)
    pair_weight: float = Field(0.6, ge=0, le=1)

    # -- settings and plan ---------------------------------------------------------------------------------------------

    def fixed(self, settings: Any) -> dict[str, dict[str, Any]]:
        """Nothing."""
        return {}

    def problem_with(self, settings: Any) -> str | None:
        """See the base class."""
        if settings.model.kind != "mf" or settings.model.item_bias:
            return "algorithm.kind='correlations' is for model.kind='mf' without item_bias; 'gradient' serves others"
        if settings.subspace.method != "leading":
            return "algorithm.kind='correlations' needs subspace.method='leading'"
        return None

    def architecture(
        self,
        settings: Any,
        public: Public,
        picture: Picture | None = None,
        projections: Mapping[str, Projection] | None = None,
    ) -> Architecture:
        """Rows for the head: the items up to the last one with enough support, as the survey tells; else all it may be.

        Where items are numbered by their counts these are all that have it.
        """
        head, counts = min(public.items, self.head), public.survey.get(COUNTS)
        if projections is not None:
            if ROWS not in projections or not 1 <= projections[ROWS].shape[0] <= head:
                raise InvalidMessage("an order without rows of items", f"1 to {head} rows", "Check both sides.")
            head = projections[ROWS].shape[0]
        elif counts is not None:
            enough = (counts[:head] >= self.support).nonzero()
            head = int(enough[-1]) + 1 if len(enough) else 1
        return PairArchitecture(public.items, public.users, head, settings.model.factors)

    def surveys(self, settings: Any) -> dict[str, bool]:
        """How many users have each item."""
        return {COUNTS: True}

    def survey(self, settings: Any, histories: Interactions, items: range) -> Answer:
        """See the base class."""
        return Answer({COUNTS: count_of(histories, items)}, float(histories.num_users))

    def numbering(self, plan: Plan) -> Tensor | None:
        """By falling counts; None where they are so already."""
        counts = plan.public.survey[COUNTS]
        if bool((counts[:-1] >= counts[1:]).all()):
            return None
        place = torch.empty(len(counts), dtype=torch.int64)
        place[counts.argsort(descending=True, stable=True)] = torch.arange(len(counts))
        return place

    def spoken(self, plan: Plan, size: int) -> LeadingBlock:
        """What devices of a size say: the leading pairs, as many as their capacity is a share."""
        assert isinstance(plan.architecture, PairArchitecture)
        assert isinstance(plan.method, Leading)
        whole = size_of(plan.architecture.head)
        share = plan.method.share(plan.architecture.tensors, plan.capacities[size])
        return LeadingBlock((whole,), (size_of(max(1, items_of(int(share * whole)))),))

    def traffic(self, plan: Plan, size: int) -> tuple[int, int]:
        """A model down, pairs up."""
        return plan.assignments(0)[size].bytes(), self.spoken(plan, size).size * BYTES

    def send(self, plan: Plan, state: State, sizes: Sequence[int]) -> list[Sent]:
        """The model, and how much to say."""
        found = super().send(plan, state, sizes)
        return [replace(sent, context={SUM: self.spoken(plan, sent.size)}) for sent in found]

    # -- the device ----------------------------------------------------------------------------------------------------

    def answer(self, plan: Plan, sent: Sent, client: Client) -> tuple[Answer, Weights]:
        """The pairs of a history; nothing new where the sum holds them."""
        head = sent.projections[ROWS].shape[0]
        length = (client.items < head).sum()[None]
        weights = weights_of(length) * (client.own[SAID].view(1) == 0)
        sums = pair_sums([client.items], weights, items_of(sent.context[SUM].size))
        return Answer({SUM: sums}, 1.0), {SAID: torch.ones(1)}

    def together(self, plan: Plan, sent: Sent, people: People, clients: list[int]) -> tuple[Tensor, Answer, Weights]:
        """The pairs of many histories in one sum."""
        head = sent.projections[ROWS].shape[0]
        histories = [people.train.of(client) for client in clients]
        lengths = torch.tensor([int(torch.searchsorted(history, head)) for history in histories])
        weights = weights_of(lengths) * (people.private[SAID][clients, 0] == 0)
        good = weights <= self.largest_change
        chosen = [history for history, fine in zip(histories, good.tolist(), strict=True) if fine]
        sums = pair_sums(chosen, weights[good], items_of(sent.context[SUM].size))
        return good, Answer({SUM: sums}, float(len(chosen))), {SAID: torch.ones(len(chosen), 1)}

    def answer_shapes(self, plan: Plan, sent: Sent) -> dict[str, int]:
        """See the base class."""
        return {SUM: sent.context[SUM].size}

    def problem(self, plan: Plan, sent: Sent, answer: Answer | None) -> str | None:
        """Beside what is refused of all: numbers below zero, and a norm that so many histories cannot have."""
        found = super().problem(plan, sent, answer)
        if found is not None or answer is None:
            return found
        if len(answer.sums[SUM]) and float(answer.sums[SUM].min()) < 0:
            return "pairs below zero"
        if frobenius(answer.sums[SUM]) > answer.weight * (1 + 1e-5):
            return "a norm above that of its users"
        return None

    # -- the server ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: Plan, state: State, totals: Totals) -> State:
        """Add the prefixes up, and make a model of the sum."""
        assert isinstance(plan.architecture, PairArchitecture)
        if not totals.by_size:  # nothing was said
            return replace(state, round_number=state.round_number + 1)
        head, dtype = plan.architecture.head, state.full[ROWS].dtype
        kept = state.moments.get(SUM) or {SUM: torch.zeros(size_of(head), dtype=dtype)}
        sums = kept[SUM].clone()
        for _, answer in totals.parts():
            sums[: len(answer.sums[SUM])] += answer.sums[SUM]
        moments = state.moments | {SUM: {SUM: sums}}
        if SUM in state.moments and sums.equal(kept[SUM]):  # all had spoken before
            return replace(state, round_number=state.round_number + 1, moments=moments)
        full = {name: tensor.to(dtype).reshape(-1) for name, tensor in self.model(plan, sums).items()}
        return State(state.full | full, state.round_number + 1, moments)

    def model(self, plan: Plan, sums: Tensor) -> Weights:
        """Rows, factors and pairs that follow from a sum."""
        head, width = plan.architecture.tables[ROWS]
        counts = plan.public.survey.get(COUNTS, torch.ones(head))[:head]
        precision = Precision.of(matrix_of(sums), counts, self.beta, self.ridge)
        values, vectors = precision.spectrum(width)
        rows, roots = vectors * values.clamp(min=0).sqrt(), precision.roots
        listed = strongest(precision.correlations(), rows[:, :LISTED_COLUMNS], counts, LIST_PER_ITEM * head)
        return {ROWS: rows, INTO: precision.scales * roots, OUT: 1 / roots, LISTED: listed}

    # -- what was learned ----------------------------------------------------------------------------------------------

    def tells_apart(self, plan: Plan, held: Sequence[Any], items: Tensor) -> Tensor:
        """Those with a row on some of the devices."""
        known: int = max(one.projections[ROWS].kept[0] for one in held if one.projections is not None)
        return items < known

    def scorer(self, plan: Plan, full: Weights, held: Sequence[Any], people: People) -> Scorer:
        """From everybody's history."""
        known = int((full[OUT] > 0).sum())  # zero beyond what a device holds
        rows = full[ROWS].view(plan.architecture.tables[ROWS])[:known]
        whole = len(rows) == plan.architecture.tables[ROWS][0] and bool(rows[:, -1].any())
        listed = full[LISTED].view(-1, 5)[: 0 if whole else None]  # the whole table needs no list
        served = Served(rows, full[INTO][:known], full[OUT][:known], listed, self.pair_weight)
        everything, of = torch.arange(plan.public.items), people.train.of
        return lambda users: served.scores(served.histories([of(user) for user in users.tolist()]), everything)

    def own_vectors(self, plan: Plan, sent: Sent, people: People, users: list[int]) -> Weights:
        """See the base class: histories as the model sees them."""
        return self._served(sent).histories([people.train.of(user) for user in users])

    def block_scores(self, plan: Plan, sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        """See the base class."""
        return self._served(sent).scores(vectors, items)

    def _served(self, sent: Sent) -> Served:
        rows = sent.vectors[ROWS].view(sent.projections[ROWS].kept)  # type: ignore[attr-defined]
        listed = sent.vectors[LISTED].view(-1, 5)
        return Served(rows, sent.vectors[INTO], sent.vectors[OUT], listed, self.pair_weight)
