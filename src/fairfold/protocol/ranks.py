"""Processes that share the clients of a simulation: each has its own, and all add up what theirs have said.

Sums can be taken over any grouping, so a process trains its share of a round's clients, and one sum over all of them
comes before the server's step, which each process takes for itself, on the same numbers. Here is what a round asks of
them, as one process answers it; :mod:`fairfold.backends.distributed` has several.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fairfold.protocol.words import Answer, Sent, Totals

if TYPE_CHECKING:
    from fairfold.protocol.people import People
    from fairfold.protocol.plan import Plan

Value = TypeVar("Value")


class Ranks:
    """One process, which has all clients.

    Attributes:
        number: Of this process.
        many: Of all of them.
        led: Whether the first has told the others where to begin.
    """

    number: int = 0
    many: int = 1
    led: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.number == 0

    def has(self, client: int) -> bool:
        """Whether a client is of this process: always the same, as it keeps the client's private vectors."""
        return client % self.many == self.number

    def mine(self, clients: Iterable[int]) -> list[int]:
        """Those of some clients that are of this process."""
        return [client for client in clients if self.has(client)]

    def work_on(self, device: torch.device) -> None:
        """Refuse a device that this process cannot have for itself."""

    def one_for_all(self) -> AbstractContextManager[None]:
        """A block of work after which all go on, or none: an error of one is told to the others."""
        return nullcontext()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all processes in the place of each tensor; all processes have the same ones."""

    def gathered(self, values: list[Value]) -> list[Value]:
        """What all processes have to say, one after another."""
        return values

    def tell(self, value: Value) -> Value:
        """What the first process says."""
        return value

    def spoke(self, clients: list[int]) -> None:
        """Note who may have learned something since private vectors were last gathered."""

    def gather_private(self, people: "People") -> None:
        """Bring what all clients keep for themselves to all processes."""


ONE = Ranks()


def summed(ranks: Ranks, plan: "Plan", totals: Totals, sent: Sequence[Sent]) -> Totals:
    """The sums over all processes, of answers to what was sent; one of them all where every client has its own hash."""
    found = Totals()
    if plan.method.per_client:
        for asked, answer in ranks.gathered(list(totals.parts())):
            found.add(asked, answer, alone=True)
        return found
    mine = {(asked.size, asked.round_number): answer for asked, answer in totals.parts()}
    heard = [mine.get((asked.size, asked.round_number)) for asked in sent]
    lengths = [_lengths(plan, asked) for asked in sent]
    vectors = [
        torch.zeros(length, dtype=dtype, device=device) if answer is None else answer.sums[name]
        for answer, of, (dtype, device) in zip(heard, lengths, map(_kind, sent), strict=True)
        for name, length in of.items()
    ]
    counts = torch.tensor([[0.0, 0.0] if of is None else [of.weight, 1.0] for of in heard], dtype=torch.float64)
    flat = torch.cat(vectors)
    ranks.add_up([flat, counts])
    parts = iter(torch.split(flat, [len(vector) for vector in vectors]))
    for asked, of, (weight, speakers) in zip(sent, lengths, counts.tolist(), strict=True):
        answer = Answer({name: next(parts) for name in of}, weight)
        if speakers:
            found.take(asked, answer)
    return found


def _lengths(plan: "Plan", sent: Sent) -> dict[str, int]:
    """Of the summands of an answer."""
    lengths = plan.algorithm.answer_shapes(plan, sent)
    whole = {name: held for name, held in sent.projections.items() if not held.linear}
    return {name: torch.Size(whole[name].shape).numel() if name in whole else of for name, of in lengths.items()}


def _kind(sent: Sent) -> tuple[torch.dtype, torch.device]:
    first = next(iter(sent.vectors.values()))
    return first.dtype, first.device
