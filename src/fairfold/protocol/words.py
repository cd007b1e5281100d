"""What passes between server and devices, and the one law: what a device says is a summand.

``answer(a) + answer(b)`` is what devices a and b would have said together. Whatever the server knows of its clients is
public, or a sum of such words; so sums can be taken in any order, over any grouping, on any machine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fairfold.projections import Assignment, Projection
from fairfold.values import BYTES, Weights


@dataclass(frozen=True)
class Public:
    """All that the server knows of its clients; there are no interactions in it.

    Attributes:
        items: Size of the catalogue.
        users: How many users there are; 1 where the server does not know.
        survey: Sums over devices, taken before the first round (:meth:`Algorithm.survey`).
    """

    items: int
    users: int = 1
    survey: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """What travels to the devices of one size in one round.

    Attributes:
        round_number: Rounds done before this one.
        size: Which of the plan's sizes.
        projections: How such a device holds every tensor.
        vectors: What it receives: every tensor in its size, and what an algorithm sends beside them.
        context: Projections of others that it speaks in, by tensor.
    """

    round_number: int
    size: int
    projections: dict[str, Projection]
    vectors: Weights
    context: dict[str, Projection] = field(default_factory=dict)

    @property
    def bytes_down(self) -> int:
        """Of its numbers."""
        return sum(vector.numel() for vector in self.vectors.values()) * BYTES


@dataclass(frozen=True)
class Answer:
    """What devices say of a round: a summand.

    Attributes:
        sums: Of every tensor, already weighted.
        weight: What the devices count together.
    """

    sums: Weights
    weight: float

    def __add__(self, other: "Answer") -> "Answer":
        sums = {name: vector + other.sums[name] for name, vector in self.sums.items()}
        return Answer(sums, self.weight + other.weight)

    @property
    def bytes_up(self) -> int:
        """Of its numbers."""
        return sum(vector.numel() for vector in self.sums.values()) * BYTES


@dataclass(frozen=True)
class Word:
    """What some clients of one size have to say, one or several together, and what they keep for themselves.

    Attributes:
        sent: What they received.
        clients: Who they are.
        answer: Theirs together.
        own: Their private tensors afterwards: for each of them a row, or as many as it has samples.
    """

    sent: Sent
    clients: list[int]
    answer: Answer
    own: Weights


@dataclass(frozen=True)
class Visit:
    """A client that takes part in a round, and what it receives; clients of a size receive the same object."""

    client: int
    sent: Sent


class Totals:
    """The sums of a round, one per size. The first answer of a size is only read; what follows is added in place."""

    def __init__(self) -> None:
        self.by_size: dict[int, Answer] = {}
        self.sent: dict[int, Sent] = {}
        self._sizes: dict[int, int] = {}
        self._owned: set[int] = set()

    def add(self, sent: Sent, answer: Answer, *, alone: bool = False) -> None:
        """Add an answer; with ``alone`` as one of a size of its own (a hash per client)."""
        key = len(self.by_size) if alone else self._sizes.setdefault(sent.size, len(self.by_size))
        summands = {
            name: sent.projections[name].summand(vector, answer.weight) if name in sent.projections else vector
            for name, vector in answer.sums.items()
        }
        weight = answer.weight
        if key not in self.by_size:
            self.sent[key] = sent
        elif key in self._owned:
            mine = self.by_size[key]
            summands, weight = {name: mine.sums[name].add_(of) for name, of in summands.items()}, mine.weight + weight
        else:
            mine = self.by_size[key]
            summands, weight = {name: mine.sums[name] + of for name, of in summands.items()}, mine.weight + weight
            self._owned.add(key)
        self.by_size[key] = Answer(summands, weight)

    @property
    def weight(self) -> float:
        """Of all together."""
        return sum(answer.weight for answer in self.by_size.values())

    def parts(self) -> Iterable[tuple[Sent, Answer]]:
        """What was sent to each size, and what came back."""
        return ((self.sent[key], answer) for key, answer in self.by_size.items())


@dataclass(frozen=True)
class State:
    """All that the server carries from round to round: a model, and sums.

    Attributes:
        full: θ, one flat vector per tensor of the model.
        round_number: Rounds done.
        moments: What else an algorithm keeps, by its name and that of the tensor: an optimiser's moments, running sums.
    """

    full: Weights
    round_number: int = 0
    moments: dict[str, Weights] = field(default_factory=dict)

    def copy(self) -> "State":
        """One that a round does not change."""
        moments = {moment: {name: of.clone() for name, of in kept.items()} for moment, kept in self.moments.items()}
        return State({name: of.clone() for name, of in self.full.items()}, self.round_number, moments)

    def to(self, device: torch.device) -> "State":
        """The same on a device."""
        moments = {moment: _on(of, device) for moment, of in self.moments.items()}
        return State(_on(self.full, device), self.round_number, moments)


def _on(weights: Mapping[str, torch.Tensor], device: torch.device) -> Weights:
    return {name: tensor.to(device) for name, tensor in weights.items()}


def reduced(full: Weights, assignments: list[Assignment]) -> list[Weights | None]:
    """Every tensor as devices of each size receive it, reduced once per size; None for a size that takes no part."""
    sent: list[Weights | None] = [None if held.projections is None else {} for held in assignments]
    for name, vector in full.items():
        places = [place for place, held in enumerate(assignments) if held.projections is not None]
        projections = [held.projections[name] for held in assignments if held.projections is not None]
        distinct = list(dict.fromkeys(projections))
        if not distinct:
            continue
        vectors = dict(zip(distinct, type(distinct[0]).reduce_each(vector, distinct), strict=True))
        for place, projection in zip(places, projections, strict=True):
            mine = sent[place]
            assert mine is not None
            mine[name] = vectors[projection]
    return sent
