"""What :mod:`fairfold.algorithms.ratings` says under masks: words of 32 bits, which sums that remember lose nothing by.

All numbers of a vector have one step, and none may be larger than what the sum of all devices has room for. So a
device rounds what it says, and says it in part where it is too large; and it keeps what it *said*. What was rounded off
or left out is in its next change: errors do not add up, and after some rounds everything has been said.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairfold.data import Interactions
from fairfold.errors import InvalidSettings

HUNDREDS = 2.0**-8
"""What a rating counts in sums over a user's ratings, so that these are not much larger than other numbers. Powers of
two take no digit from a number."""
FACTS = (1.0, 2.0**-2, 2.0**4)
"""What a user's facts are multiplied by: 1, the log of how many ratings, and the mean row, which is small."""

LARGEST_RATING = 100.0
"""No rating is further from 0."""
SQUARES = 2.0**15
"""A user's sum of squared ratings before the first round; who has more is counted with fewer ratings. All is in whole
numbers."""
ABOVE_STEPS = 2**8
"""How many steps are 1 in what ratings are above the means of their users."""


def units_of(size: int) -> Tensor:
    """What the sums of each user are multiplied by (:meth:`.rating_rows.Raters.sums`)."""
    each = torch.tensor([1.0] * size + [*FACTS[:2]] + [FACTS[2]] * size)
    hundreds = torch.tensor([HUNDREDS])
    return torch.cat([hundreds.expand(size**2), (each[:, None] * each).flatten(), hundreds])


@dataclass(frozen=True)
class Words:
    """How numbers are said.

    Attributes:
        steps: How many are 1.
        bound: What no number of a device exceeds. Where it would be more than half of it, all that goes to the same
            numbers is said in part; the other half is more than enough for what rounding adds.
    """

    steps: int
    bound: float

    def said(self, changes: Tensor, together: Tensor) -> Tensor:
        """What is said of some changes, rows of numbers that go ``together`` where they have the same number there."""
        places, together = torch.unique(together, return_inverse=True)
        totals = changes.new_zeros(len(places), changes.shape[1]).index_add_(0, together, changes.abs())
        parts = (self.bound / 2 / totals.amax(1)).clamp(max=1)
        return (changes * parts[together, None] * self.steps).round() / self.steps


OF_ITEMS = Words(2**7, 2.0**9)
OF_USERS = Words(2**11, 2.0**5)


def rated(histories: Interactions, *, masked: bool) -> Tensor:
    """How many ratings there are, their sum, and the sum of their squares."""
    assert histories.ratings is not None
    given, owner = histories.ratings.double(), histories.users
    sums = torch.stack([torch.ones_like(given), given, given.square()], dim=1)
    each = torch.zeros(histories.num_users, 3).double().index_add_(0, owner, sums)
    if masked:
        each = (each * (SQUARES / each[:, 2:]).clamp(max=1)).round()
    return each.sum(0)


def above(histories: Interactions, items: range, *, masked: bool) -> Tensor:
    """What the ratings of each of some neighbouring items are above the means of their users."""
    assert histories.ratings is not None
    given, counts = histories.ratings.double(), histories.counts_by_user.clamp(min=1)
    means = torch.zeros(histories.num_users).double().index_add_(0, histories.users, given) / counts
    more = given - means[histories.users]
    if masked:
        more = (more * ABOVE_STEPS).round() / ABOVE_STEPS
    here = (histories.items >= items.start) & (histories.items < items.stop)
    return torch.zeros(len(items)).double().index_add_(0, histories.items[here] - items.start, more[here])


def require_ratings(histories: Interactions, *, masked: bool) -> None:
    """Refuse data without ratings, and under masks ratings that words have no room for."""
    if histories.ratings is None:
        lacking = "data without ratings for algorithm.kind='ratings'"
        raise InvalidSettings(lacking, "ratings", "Use other data (such as --data ml-1m), or another recipe.")
    largest = float(histories.ratings.abs().max()) if len(histories) else 0.0
    if masked and not largest <= LARGEST_RATING:
        raise InvalidSettings(
            f"a rating of {largest:g} (or its negative) with privacy.level='secure'",
            f"ratings from {-LARGEST_RATING:g} to {LARGEST_RATING:g}: words of 32 bits have room for no others",
            "Give all ratings in other units (divide them all by one number), or use privacy.level='plain'.",
        )  # fmt: skip
