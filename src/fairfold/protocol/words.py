"""What passes between server and devices, and the one law: what a device says is a summand.

``answer(a) + answer(b)`` is what devices a and b would have said together. Whatever the server knows of its clients is
public, or a sum of such words; so sums can be taken in any order, over any grouping, on any machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairfold.projections import Assignment, Projection
from fairfold.values import BYTES, Weights


@dataclass(frozen=True)
class Public:
    """All that the server knows of its clients; there are no interactions in it.

    The size of the catalogue; how many users there are (1 where the server does not know); and sums over devices, taken
    before the first round (:meth:`Algorithm.survey`).
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
        """Of its numbers, as they are sent."""
        coded = {name: held for name, held in self.projections.items() if held.coded}
        plain = {name: vector for name, vector in self.vectors.items() if name not in coded}
        return _bytes(plain) + sum(held.bytes for held in coded.values())


@dataclass(frozen=True)
class Answer:
    """What devices say of a round: a summand.

    Attributes:
        sums: Of every tensor, already weighted; sparse where a device has little to say of many numbers.
        weight: What the devices count together.
    """

    sums: Weights
    weight: float

    def __add__(self, other: "Answer") -> "Answer":
        sums = {name: _plus(vector, other.sums[name]) for name, vector in self.sums.items()}
        return Answer(sums, self.weight + other.weight)

    def dense(self) -> "Answer":
        """The same with all of its numbers."""
        return Answer({name: vector.to_dense() for name, vector in self.sums.items()}, self.weight)

    @property
    def bytes_up(self) -> int:
        """Of its numbers."""
        return _bytes(self.sums)


@dataclass(frozen=True)
class Word:
    """What some clients of one size have to say, one or several together, to what they received.

    Not sent are their ``own`` private tensors: for each of them a row, or as many as it has samples.
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


def by_sent(visits: Iterable[Visit]) -> Iterable[tuple[Sent, list[int]]]:
    """What was sent, each with the clients who received it."""
    found: dict[int, tuple[Sent, list[int]]] = {}
    for visit in visits:
        found.setdefault(id(visit.sent), (visit.sent, []))[1].append(visit.client)
    return found.values()


class Totals:
    """The sums of a round, one per size and round in which it was asked: the same one, where rounds wait for all.

    The first answer of each is only read; what follows is added in place.
    """

    def __init__(self) -> None:
        self.by_size: dict[int, Answer] = {}
        self.sent: dict[int, Sent] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._owned: set[int] = set()

    def add(self, sent: Sent, answer: Answer, *, alone: bool = False) -> None:
        """Add an answer; with ``alone`` as one of a size of its own (a hash per client)."""
        asked, new = (sent.size, sent.round_number), len(self.by_size)
        key = new if alone else self._places.setdefault(asked, new)
        summands = {
            name: sent.projections[name].summand(vector, answer.weight) if name in sent.projections else vector
            for name, vector in answer.sums.items()
        }
        said, before = Answer(summands, answer.weight), self.by_size.get(key)
        if before is None:
            self.sent[key], self.by_size[key] = sent, said.dense()
        elif key in self._owned:
            sums = {name: before.sums[name].add_(of) for name, of in summands.items()}
            self.by_size[key] = Answer(sums, before.weight + answer.weight)
        else:
            self.by_size[key] = before + said
            self._owned.add(key)

    def take(self, sent: Sent, summed: Answer) -> None:
        """Take a sum of summands as it is, the only one of its size and round."""
        key = self._places.setdefault((sent.size, sent.round_number), len(self.by_size))
        self.sent[key], self.by_size[key] = sent, summed

    @property
    def weight(self) -> float:
        """Of all together."""
        return sum(answer.weight for answer in self.by_size.values())

    def parts(self) -> Iterable[tuple[Sent, Answer]]:
        """What was sent to each size, and what came back; of several rounds each apart."""
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
        moments = {moment: on(of, device) for moment, of in self.moments.items()}
        return State(on(self.full, device), self.round_number, moments)


def on(weights: Mapping[str, Tensor], device: torch.device) -> Weights:
    """Tensors on a device."""
    return {name: tensor.to(device) for name, tensor in weights.items()}


def put(values: Sequence[int | float | list[bool]], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the host on a device, which the host does not wait for."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The same for a tensor."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def numbers_of(vector: Tensor) -> Tensor:
    """The numbers that are said of a vector: all, or those of a sparse one."""
    return vector.coalesce().values() if vector.is_sparse else vector


def _plus(one: Tensor, other: Tensor) -> Tensor:
    return other + one if one.is_sparse and not other.is_sparse else one + other  # torch adds sparse ones to others


def _bytes(weights: Weights) -> int:
    """Of a sparse vector both its numbers and their places."""
    return sum(numbers_of(vector).numel() * (1 + vector.is_sparse) for vector in weights.values()) * BYTES


def reduced(full: Weights, assignments: list[Assignment]) -> list[Weights | None]:
    """Every tensor as devices of each size receive it, reduced once per size; None for a size that takes no part."""
    sizes = [held.projections for held in assignments]
    found: dict[tuple[str, Projection], Tensor] = {}
    for name, vector in full.items():
        distinct = list(dict.fromkeys(held[name] for held in sizes if held is not None))
        reduced_each = type(distinct[0]).reduce_each(vector, distinct) if distinct else []
        found |= {(name, held): of for held, of in zip(distinct, reduced_each, strict=True)}
    return [None if held is None else {name: found[name, held[name]] for name in full} for held in sizes]
