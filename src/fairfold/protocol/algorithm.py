"""What an algorithm is: one frozen object whose fields are its settings, and whose methods are all that is its own.

Everything else (who takes part, what travels, how answers are added up, faults, checkpoints, Flower) is the same for
all. A new algorithm is one file with one subclass; see ``examples/plugins``.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairfold.privacy.budget import Release
from fairfold.projections import Assignment
from fairfold.protocol.words import Answer, Public, Sent, State, Totals, Visit, Word, numbers_of, reduced
from fairfold.settings.base import Frozen
from fairfold.values import BYTES, Shapes, Weights

if TYPE_CHECKING:
    from fairfold.data import Interactions
    from fairfold.metrics.ranking import Scorer
    from fairfold.metrics.rating import Predictor
    from fairfold.projections import Projection
    from fairfold.protocol.architecture import Architecture, Picture
    from fairfold.protocol.people import Client, People
    from fairfold.protocol.plan import Plan
    from fairfold.settings import Settings

COUNTS = "counts"
"""Name of the sum that says how many users have each item."""


class Algorithm(Frozen):
    """What devices compute, what the server makes of their sums, and how items are scored.

    Attributes:
        kind: Its name.
        largest_change: An answer in which a number differs by more than this from what was sent is refused.
        keeps: What a device keeps for itself after training: what it ``"learned"``, whoever heard of it; or only what
            the server ``"acknowledged"``, for sums that remember what each device last said.
        follows: Whether what a device says again may be about another history than before: what it was is taken back.
        ages: Whether what a device says depends on the model that it was sent; else its answer is never too late.
        values: Whether an answer is the weighted model itself; else its weighted change, or a sum of another kind.
        whole_rows: Whether rows of tables are never cut.
        images: Whether it trains networks of images; else recommenders.
        pooled: Whether all data is in one place: one client that has everybody's.
        from_history: Whether a user's scores follow from the model and their own history: it serves new users too.
        grids: Names of answers whose numbers are multiples of a step for every user, and how many steps are 1: sums
            are the same in any order, and as words of 32 bits (:mod:`fairfold.privacy.encoding`).
        bounds: By name, what no number on a grid exceeds; 1 if not given. Of others that is ``privacy.bound``.
        listed: Names of answers of which a device may say some numbers and where they stand, instead of all.
        releases: By name, the sums that a run lets out with noise under ``privacy.level = "private"``: none where an
            algorithm cannot be private.
        public: Names of sums that tell how many users there are and nothing else: these need no noise.
        prefixes: Names of answers of which what small devices say is the beginning of what large ones say.
        DEFAULTS: What other tables take where nothing is said, by table and key.
    """

    kind: str
    largest_change: float = Field(1e4, gt=0)

    keeps: ClassVar[Literal["learned", "acknowledged"]] = "learned"
    follows: ClassVar[bool] = False
    ages: ClassVar[bool] = True
    values: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    images: ClassVar[bool] = False
    pooled: ClassVar[bool] = False
    from_history: ClassVar[bool] = False
    grids: ClassVar[Mapping[str, int]] = {}
    bounds: ClassVar[Mapping[str, float]] = {}
    prefixes: ClassVar[frozenset[str]] = frozenset()
    listed: ClassVar[frozenset[str]] = frozenset()
    releases: ClassVar[Mapping[str, Release]] = {}
    public: ClassVar[frozenset[str]] = frozenset()
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    # -- settings ------------------------------------------------------------------------------------------------------

    def problem_with(self, settings: "Settings") -> str | None:
        """Why the other tables do not go with this algorithm, or None."""
        return None

    def without_effect(self, settings: "Settings") -> Sequence[str]:
        """Keys, as ``table.key``, that have no effect beside these settings, and are then unknown."""
        return ()

    def shows(self, settings: "Settings") -> str | None:
        """What is left out of exact sums under these settings for the sake of users, or None."""
        return None

    def fixed(self, settings: "Settings") -> Mapping[str, Mapping[str, Any]]:
        """What the algorithm decides of other tables, which are then no keys there."""
        return {}

    def predicts_ratings(self, settings: "Settings") -> bool:
        """Whether what is learned predicts ratings; else it ranks, or reads images."""
        return settings.model.predicts_ratings

    # -- before the first round ----------------------------------------------------------------------------------------

    def extra(self, settings: "Settings") -> Shapes:
        """Tensors that travel beside the model's, held whole by everybody."""
        return {}

    def architecture(
        self,
        settings: "Settings",
        public: Public,
        picture: "Picture | None" = None,
        projections: Mapping[str, "Projection"] | None = None,
    ) -> "Architecture":
        """The model's tensors; with ``projections`` on a device, which knows no more than what it is to hold."""
        from fairfold.protocol.architecture import architecture_of

        return architecture_of(settings, public.items, public.users, picture)

    def surveys(self, settings: "Settings") -> dict[str, bool]:
        """What devices sum up before the first round, by name: whether it has a number per item."""
        return {COUNTS: True} if settings.subspace.asks_counts else {}

    def survey(self, settings: "Settings", histories: "Interactions", items: range) -> Answer:
        """A device's part of these sums, for some neighbouring items: a summand like any other.

        Sums without a number per item go with the first items.
        """
        sums = {COUNTS: count_of(histories, items)} if settings.subspace.asks_counts else {}
        return Answer(sums, float(histories.num_users))

    def survey_grids(self, settings: "Settings") -> Mapping[str, int]:
        """Of which sums of the survey the numbers of every user are multiples of a step, and how many steps are 1."""
        return {COUNTS: 1}

    def numbering(self, plan: "Plan") -> Tensor | None:
        """The number that every item of the catalogue gets by what was surveyed; None where it keeps its own."""
        return None

    def remembered(self, plan: "Plan") -> dict[str, int]:
        """Name and row length of what a device keeps of each of its samples."""
        return {}

    def follow(self, own: Weights, lost: Tensor) -> None:
        """Mark the samples that a device's users no longer have, in what it remembers of each; in place."""

    def starts_own(self, plan: "Plan", own: Weights) -> None:
        """Bring users' vectors, drawn at random, to where they start; in place."""

    def settled(self, plan: "Plan", state: State) -> "Plan":
        """The plan by what the server has found out since: the same, where that changes nothing that devices hold."""
        return plan

    def init(self, plan: "Plan", full: Weights) -> State:
        """The server's state before the first round, from tensors drawn at random."""
        return State(full)

    # -- a round -------------------------------------------------------------------------------------------------------

    def send(self, plan: "Plan", state: State, sizes: Sequence[int]) -> list[Sent]:
        """What devices of some sizes receive: ψ ← projection(S, θ), once per size."""
        assignments = plan.assignments(state.round_number)
        held = [assignments[size] for size in sizes]  # nobody is visited whom the method leaves out
        return [
            Sent(state.round_number, size, one.projections or {}, vectors or {})
            for size, one, vectors in zip(sizes, held, reduced(state.full, held), strict=True)
        ]

    @abstractmethod
    def answer(self, plan: "Plan", sent: Sent, client: "Client") -> tuple[Answer, Weights]:
        """What a device computes: its answer, and its private tensors afterwards. This is the specification."""

    def answers(self, plan: "Plan", people: "People", visits: list[Visit]) -> Iterator[Word] | None:
        """The same for many clients at once, faster, with the same sums; None where there is no such way.

        Only answers that would pass :meth:`problem` one by one may be given together.
        """
        return None

    def problem(self, plan: "Plan", sent: Sent, answer: Answer | None) -> str | None:
        """Why an answer cannot be used, or None if it can: the only check there is."""
        if answer is None:
            return "no answer in time"
        wanted, dtype = self.answer_shapes(plan, sent), next(iter(sent.vectors.values())).dtype
        if answer.sums.keys() != wanted.keys():
            return "other tensors than were sent"
        if not 0 <= answer.weight < float("inf"):
            return "a weight out of range"
        for name, vector in answer.sums.items():
            if vector.shape != (wanted[name],) or vector.dtype != dtype:
                return "wrong size"
        asked = {name: self.change(sent, name, vector, answer.weight) for name, vector in answer.sums.items()}
        changes = [numbers_of(change) for change in asked.values()]
        ends = [end for change in changes if change.numel() for end in torch.aminmax(change)]  # NaN is both
        found = iter(torch.stack(ends).tolist() if ends else [])  # all at once: a GPU is waited for once
        for low, high in zip(found, found, strict=True):
            if not (math.isfinite(low) and math.isfinite(high)):
                return "NaN or infinity"
            if max(high, -low) > self.largest_change:
                return "values out of range"
        return None

    def answer_shapes(self, plan: "Plan", sent: Sent) -> dict[str, int]:
        """Name and length of what a device answers with."""
        return {name: held.size for name, held in sent.projections.items()}

    def traffic(self, plan: "Plan", size: int, round_number: int = 0) -> tuple[int, int]:
        """Bytes that a device of a size receives and sends in a round; none where it takes no part."""
        held = plan.assignments(0)[size]
        moved = 0 if self.pooled else held.size() * BYTES
        return moved, moved

    def largest_answer(self, plan: "Plan", size: int) -> int:
        """Bytes that no answer of a device of a size exceeds."""
        return self.traffic(plan, size)[1]

    def change(self, sent: Sent, name: str, vector: Tensor, weight: float) -> Tensor:
        """The change that an answer asks for, of one device or on the average of several."""
        mean = vector / weight if weight else vector
        return mean - sent.vectors[name] if self.values and weight else mean

    @abstractmethod
    def apply(self, plan: "Plan", state: State, totals: Totals) -> State:
        """What the server makes of the sums of a round. It may use up the state it is given."""

    # -- what was learned ----------------------------------------------------------------------------------------------

    def told(self, plan: "Plan", state: State) -> list[str]:
        """What was found out on the way, in sentences for whoever reads of the run."""
        return []

    def tells_apart(self, plan: "Plan", held: Sequence[Any], items: Tensor) -> Tensor:
        """Which of some items the model of these devices knows apart from others, so that they say something."""
        return torch.ones_like(items, dtype=torch.bool)

    def scorer(self, plan: "Plan", full: Weights, held: Sequence[Any], people: "People") -> "Scorer":
        """Scores of all items for users of ``people``.

        ``full`` are the server's tensors, or those that a device's stand for; ``held`` the assignments of the devices
        whose model this is: all of them for the server's.
        """
        raise NotImplementedError

    def stored_scorer(
        self, plan: "Plan", held: Mapping[str, "Projection"], stored: Weights, people: "People"
    ) -> "Scorer":
        """The same by what a device stores of every tensor, as it is stored."""
        full = {name: one.recover(one.unpacked(stored[name])) for name, one in held.items()}
        return self.scorer(plan, full, [Assignment(dict(held))], people)

    def predictor(self, plan: "Plan", full: Weights, held: Sequence[Any], people: "People") -> "Predictor":
        """Ratings of pairs of users and items; arguments as for :meth:`scorer`."""
        raise NotImplementedError

    def own_vectors(self, plan: "Plan", sent: Sent, people: "People", users: list[int]) -> Weights:
        """The vectors by which a device scores items for its users, a row each."""
        return {name: people.private[name][users] for name in plan.architecture.own}

    def block_scores(self, plan: "Plan", sent: Sent, vectors: Weights, items: Tensor) -> Tensor:
        """Scores of some items, [users, items], or of as many items per user, [users, items] of ids [users, items].

        From what a device holds alone: a block of rows is all that is made of its table.
        """
        held, architecture = sent.projections, plan.architecture
        dense = {name: held[name].whole(sent.vectors[name]) for name in architecture.dense if name in held}
        rows = [held[name].rows(sent.vectors[name], items) for name in architecture.tables]
        rows = [of if of.dim() == 3 else of[None] for of in rows]
        return architecture.scores(dense, [vectors[name][:, None, :] for name in architecture.own], rows)

    def candidates(self, plan: "Plan", sent: Sent, many: int) -> int:
        """Leading items among which anybody's first ``many`` are: all, unless those behind come in their order."""
        return plan.public.items


def count_of(histories: "Interactions", items: range, weights: Tensor | None = None) -> Tensor:
    """How many users have each of some neighbouring items; with ``weights`` by user what they count together."""
    inside = (histories.items >= items.start) & (histories.items < items.stop)
    here, counting = (
        histories.items[inside] - items.start,
        None if weights is None else weights[histories.users[inside]],
    )
    return torch.bincount(here, counting, minlength=len(items)).to(torch.float64)
