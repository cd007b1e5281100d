"""How long work tells what it is doing: a function that opens a stage and gives back a counter."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
# Called with the name of a stage and its size (0: not known); the block gets a function to count what is done.
Stages = Callable[[str, int], AbstractContextManager[Advance]]


@contextmanager
def silent(_name: str, _size: int) -> Iterator[Advance]:
    """Stages that nobody watches."""
    yield lambda _done: None
