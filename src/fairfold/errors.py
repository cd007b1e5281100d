"""The errors that fairfold raises on purpose: each says what was given, what was needed and what to do."""

import difflib
from collections.abc import Iterable
from itertools import islice
from unicodedata import category

MAX_LENGTH = 100
"""Longest text for which a similar one is searched: it may come from outside, and comparing takes quadratic time."""

MAX_CANDIDATES = 10_000
"""Most texts among which a similar one is searched; more (the ids of a catalog) would take seconds."""


HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control, format and surrogate characters, and line separators: what a terminal would obey."""


def printable(text: str) -> str:
    """Text in which what a terminal would obey (ESC, U+202E and the like) is written as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode() if letter != "\n" and category(letter) in HIDDEN else letter
        for letter in text
    )


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """A hint at the known text that is most similar to an unknown one; empty where none is."""
    candidates = list(islice(known, MAX_CANDIDATES + 1))
    if len(candidates) > MAX_CANDIDATES or len(text) > MAX_LENGTH:
        return ""
    near = difflib.get_close_matches(text, candidates, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def install_hint(extra: str) -> str:
    """The command that adds an extra's packages to an installed fairfold, from any folder; pip keeps that fairfold."""
    return f"pip install 'fairfold[{extra}]'"


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
    """A malformed message from the network."""


class RequestRefused(FairfoldError, RuntimeError):
    """A request that a device refuses to protect its users."""


class PrivacyBudgetSpent(RequestRefused):
    """A noisy sum that would exceed the privacy budget of a device."""


class AggregationFailed(FairfoldError, RuntimeError):
    """A secure sum that cannot be computed: too many clients dropped out, or sent wrong messages."""


class InvalidCheckpoint(FairfoldError, RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class CannotWrite(FairfoldError, RuntimeError):
    """A file that could not be written: no space, no permission, no such folder."""
