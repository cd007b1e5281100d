"""Clients to be trained at once, and rounds drawn ahead."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from fairfold.protocol.words import Visit

One = TypeVar("One", int, Visit)
Drawn = TypeVar("Drawn")

MOMENTS = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Vectors that an optimiser keeps beside the values."""


def at_once(cohort: Iterable[One], most: int) -> Iterator[list[One]]:
    """Clients (or visits of them) to train at once, nobody twice: a second time starts from what the first learned."""
    some: dict[int, One] = {}
    for one in cohort:
        client = one.client if isinstance(one, Visit) else one
        if client in some or len(some) == most:
            yield list(some.values())
            some = {}
        some[client] = one
    if some:
        yield list(some.values())


class Ahead(Generic[Drawn]):
    """What chance decides of each round; drawn by threads some rounds ahead, as a GPU is faster than the drawing.

    Threads of Python wait for each other. So the next rounds' draws begin when this round's steps are queued, and the
    host has little more to do than to wait for them.
    """

    def __init__(self, draw: Callable[[int], Drawn], rounds: int, ahead: int) -> None:
        self._draw, self._rounds, self._ahead = draw, rounds, ahead
        self._threads = ThreadPoolExecutor(ahead, thread_name_prefix="fairfold-samples")
        self._coming: dict[int, Future[Drawn]] = {}

    def of_round(self, number: int) -> Drawn:
        """A round's draws."""
        if number not in self._coming:
            self._coming[number] = self._threads.submit(self._draw, number)
        return self._coming[number].result()

    def after(self, number: int) -> None:
        """Begin to draw for the rounds that follow, and forget those before."""
        wanted = {number, *range(number, min(number + self._ahead, self._rounds - 1) + 1)}
        self._coming = {each: self._coming.get(each) or self._threads.submit(self._draw, each) for each in wanted}
