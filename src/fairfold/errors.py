"""The errors fairfold raises: one small tree, one form.

Every error says what was given, what was needed and what to do, in that order, so that a message can be acted on
without reading the code that raised it.
"""

import difflib
from collections.abc import Iterable
from itertools import islice

LONGEST_WORD = 100
MOST_WORDS = 10_000
"""Among which the one most like another is looked for; of more (the ids of a catalogue) it would take seconds."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like one that is not known; nothing where none is like it."""
    words = list(islice(known, MOST_WORDS + 1))
    if len(words) > MOST_WORDS:
        return ""
    if len(word) > LONGEST_WORD:  # what came from outside may be of any length, and comparing takes fifty times as much
        return ""
    near = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class FairfoldError(Exception):
    """Base of all errors raised on purpose by fairfold.

    Args:
        given: What the caller handed in, with its value.
        needed: What would have been accepted.
        remedy: What to do about it.

    Example:
        >>> import fairfold
        >>> try:
        ...     fairfold.Subspace(10, 20)
        ... except fairfold.FairfoldError as error:
        ...     print(error.needed)
        1 <= size <= 10
    """

    def __init__(self, given: str, needed: str, remedy: str) -> None:
        super().__init__(given, needed, remedy)
        self.given = given
        self.needed = needed
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.given}; needed: {self.needed}. {self.remedy}"


class InvalidSubspace(FairfoldError, ValueError):
    """A size, head, chunk, seed or mapping that defines no subspace."""


class NotNested(FairfoldError, ValueError):
    """Subspaces used together although neither lies inside the other."""


class InvalidVector(FairfoldError, ValueError):
    """A vector of the wrong length or shape, or one that holds NaN or infinity."""


class InvalidRow(FairfoldError, IndexError):
    """A row of a table that the table does not have."""


class InvalidDtype(FairfoldError, TypeError):
    """A tensor (or another value) of a type the operation cannot use."""


class InvalidCapacity(FairfoldError, ValueError):
    """A capacity, a scheme or a memory budget that cannot be read or served."""


class InvalidSettings(FairfoldError, ValueError):
    """Settings of a run that are unknown, malformed or contradict each other."""


class InvalidData(FairfoldError, ValueError):
    """Interactions, ratings or images that cannot be read as they are."""


class InvalidDevice(FairfoldError, RuntimeError):
    """Tensors on different devices used together."""


class InvalidState(FairfoldError, RuntimeError):
    """A saved state that belongs to another subspace than the module it is loaded into."""


class InvalidMessage(FairfoldError, ValueError):
    """A message from the network that is not what it has to be."""


class Refused(FairfoldError, RuntimeError):
    """Something asked of a device that it does not do, for the sake of its users."""


class BudgetSpent(Refused):
    """A noisy sum that a device does not take part in: it would go past what its owner allows in all."""


class SumLost(FairfoldError, RuntimeError):
    """A secure sum that cannot be told: too many devices left, or were wrong."""


class InvalidCheckpoint(FairfoldError, RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class CannotWrite(FairfoldError, RuntimeError):
    """A file that could not be written: no space, no permission, no such folder."""
